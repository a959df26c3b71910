"""Everything that can be wrong with a recipe, each with one clear line at the right place."""
# ruff: noqa: E501 - tables of cases, one a line

from pathlib import Path

import pytest
from gradient_protocol.messages.shapes import EvalResult
from gradient_worker.evaluator.evaluator import Done, RecipeEvaluation, Report

SOURCE = "a" * 32 + "-source"


def build(name: str, *more: str, command: str = 'command = ["x"]') -> str:
    return "\n".join(["[[build]]", f'name = "{name}"', command, *more, ""])


def errors(directory: Path, text: str | bytes, *attrs: str) -> list[tuple[str | None, str]]:
    (directory / "gradient.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return errors_of(directory, *attrs)


def errors_of(directory: Path, *attrs: str) -> list[tuple[str | None, str]]:
    evaluation = RecipeEvaluation(directory, SOURCE, attrs)
    step = evaluation.advance()
    assert isinstance(step, Report)
    assert step.result == EvalResult(derivations=[], clusters=[], warnings=[], errors=step.result.errors)
    assert isinstance(evaluation.advance(), Done)
    assert all("\n" not in note.message for note in step.result.errors)
    return [(note.source, note.message) for note in step.result.errors]


BUILD_CASES = [
    ("unknown key", build("a-1", "comand = 1"), "4: build.comand", "build 'a-1': unknown key 'comand', did you mean 'command'?"),
    ("unknown table", "[[biuld]]\nname = 'a'", "1: biuld", "unknown key 'biuld', did you mean 'build'?"),
    ("no name", "[[build]]\ncommand = ['x']", "1: build.name", "name is missing"),
    ("no command", "\n[[build]]\nname = 'a'", "2: build.command", "build 'a': command is missing (a build has one, or fixed_output)"),
    ("empty command", build("a", command="command = []"), "3: build.command", "build 'a': command is empty"),
    ("command as text", build("a", command='command = "make"'), "3: build.command", "build 'a': command is text, an array is due"),
    ("number in command", build("a", command='command = [\n"x",\n5]'), "5: build.command", "build 'a': command holds a number where text is due"),
    ("bad name", build("../a"), "2: build.name", "'../a' cannot be a name: at most 160 letters, digits and + - . _ ? =, no dash or dot first"),
    ("name of the source", build("source"), "2: build.name", "the name 'source' stands for the source tree"),
    ("wrong timeout", build("a", "timeout = '5'"), "4: build.timeout", "build 'a': timeout is text, a number of seconds is due"),
    ("no time", build("a", "max_silent = 0"), "4: build.max_silent", "build 'a': max_silent must be over 0 and at most 315360000 seconds"),
    ("endless time", build("a", "timeout = inf"), "4: build.timeout", "build 'a': timeout must be over 0 and at most 315360000 seconds"),
    ("too long a time", build("a", f"timeout = 1{'0' * 400}"), "4: build.timeout", "build 'a': timeout must be over 0 and at most 315360000 seconds"),
    ("NUL in a text", build("a", 'system = "a\\u0000"'), "4: build.system", "build 'a': system holds a NUL byte"),
    ("NUL in a command", build("a", command='command = ["a\\u0000"]'), "3: build.command", "build 'a': command holds a NUL byte"),
    ("flag as text", build("a", "prefer_local = 'yes'"), "4: build.prefer_local", "build 'a': prefer_local is text, true or false is due"),
    ("number in env", build("a", "env = { A = 'x',", "B = 1 }").replace("',\n", "', "), "4: build.env.B", "build 'a': env.B is a number, text is due"),
    ("bad variable", build("a", 'env = { "A=B" = "x" }'), "4: build.env.A=B", "build 'a': 'A=B' cannot be an environment variable"),
    ("twice the output", build("a", "outputs = ['out', 'out']"), "4: build.outputs", "build 'a': output 'out' is there twice"),
    ("no output", build("a", "outputs = []"), "4: build.outputs", "build 'a': outputs is empty"),
    ("output HOME", build("a", "outputs = ['HOME']"), "4: build.outputs", "build 'a': output 'HOME' is a variable that every build has"),
    ("builds as a table", "[build]\nname = 'a'", "1: build", "build is a table; write [[build]] above each"),
    ("duplicate name", build("a-1") + build("b") + build("a-1"), "8: build.name", "two builds have the name 'a-1'"),
    ("unknown input", build("lib-a-1") + build("b", "inputs = [", "'source',", "'lib-b-1']"), "9: build.inputs", "build 'b': unknown input 'lib-b-1', did you mean 'lib-a-1'?"),
    ("one variable", build("x-1") + build("x-2") + build("b", "inputs = ['x-1', 'x-2']"), "10: build.inputs", "build 'b': input 'x-2' would be X, and so would input 'x-1'"),
    ("the variable of an output", build("x-1") + build("b", "outputs = ['X']", "inputs = ['x-1']"), "8: build.inputs", "build 'b': input 'x-1' would be X, and so would its own output 'X'"),
    ("reserved variable", build("home-1") + build("b", "inputs = ['home-1']"), "7: build.inputs", "build 'b': input 'home-1' would be HOME, which a build's environment has already"),
    ("needs itself", build("a", "inputs = ['a']"), "4: build.inputs", "a cycle: a needs a"),
    ("cycle", build("a", "inputs = ['c']") + build("b", "inputs = ['a']") + build("c", "inputs = ['b']"), "8: build.inputs", "a cycle: a needs c, c needs b, b needs a"),
    ("unknown import", "import = [\n'gen']\n" + build("gem"), "2: import", "import of an unknown build 'gen', did you mean 'gem'?"),
    ("command of a download", build("a", "[build.fixed_output]", "url = 'https://x.example/'", f"sha256 = '{'a' * 64}'"), "3: build.command", "build 'a': a download (fixed_output) has no command"),
    ("hash of a download", "[[build]]\nname = 'a'\nfixed_output = { url = 'https://x.example/', sha256 = 'abc' }", "3: build.fixed_output.sha256", "build 'a': sha256 must be 64 hexadecimal digits"),
    ("URL of a download", f"[[build]]\nname = 'a'\nfixed_output = {{ url = 'x', sha256 = '{'a' * 64}' }}", "3: build.fixed_output.url", "build 'a': 'x' is no URL"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "place", "message"), [case[1:] for case in BUILD_CASES], ids=[case[0] for case in BUILD_CASES]
)
def test_a_wrong_build_is_told_with_file_line_and_key(
    tmp_path: Path, text: str, place: str, message: str
) -> None:
    assert errors(tmp_path, text) == [(f"gradient.toml:{place}", message)]


AB = build("a") + build("b")  # six lines


def cluster(*members: str, more: str = "same_zone = true") -> str:
    head = f"[[cluster]]\nname = 'c'\n{more}\n"
    return AB + head + "".join(f"[[cluster.member]]\n{member}\nrole = 'r'\n" for member in members)


CLUSTER_CASES = [
    ("no members", cluster(), "7: cluster.member", "cluster 'c': has no members; give it at least one [[cluster.member]]"),
    ("unknown build", cluster("build = 'bb'"), "11: cluster.member.build", "cluster 'c': member of an unknown build 'bb', did you mean 'b'?"),
    ("no role", AB + "[[cluster]]\nname='c'\n[[cluster.member]]\nbuild='a'", "9: cluster.member.role", "cluster 'c': role is missing"),
    ("two primaries", cluster("primary = true\nbuild = 'a'", "build = 'b'\nprimary = true"), "16: cluster.member.primary", "cluster 'c': 'a' and 'b' are both primary"),
    ("one pin", cluster("build = 'a'\npin = 'w1'", "build = 'b'\npin = 'w1'"), "16: cluster.member.pin", "cluster 'c': two members are pinned to worker 'w1', each needs its own"),
    ("twice a member", cluster("build = 'a'", "build = 'a'"), "14: cluster.member.build", "cluster 'c': build 'a' is a member of cluster 'c' already"),
    ("negative budget", cluster("build = 'a'", more="retry_budget = -1"), "9: cluster.retry_budget", "cluster 'c': retry_budget must be a whole number, 0 or more"),
    ("misspelt key", cluster("build = 'a'", more="same_zones = true"), "9: cluster.same_zones", "cluster 'c': unknown key 'same_zones', did you mean 'same_zone'?"),
    ("download", cluster("build = 'd'") + f"[[build]]\nname = 'd'\nfixed_output = {{ url = 'https://x/', sha256 = '{'a' * 64}' }}", "11: cluster.member.build", "cluster 'c': the download 'd' runs no command"),
    ("two names", cluster("build = 'a'") + "[[cluster]]\nname = 'c'\n[[cluster.member]]\nbuild = 'b'\nrole = 'r'", "14: cluster.name", "two clusters have the name 'c'"),
    (
        "a member that needs another",
        cluster("build = 'a'", "build = 'n'") + build("n", "inputs = ['a']"),
        "19: build.inputs",
        "a cycle: n (cluster 'c') needs a (cluster 'c'); members start together",
    ),
    (
        "a member that needs another by way of a third",
        cluster("build = 'a'", "build = 'n'") + build("n", "inputs = ['m']") + build("m", "inputs = ['a']"),
        "23: build.inputs",
        "a cycle: n (cluster 'c') needs m, m needs a (cluster 'c'); members start together",
    ),
    (
        "a helper's output",
        cluster("build = 'a'\nprimary = true", "build = 'b'") + build("n", "inputs = ['a', 'b']"),
        "20: build.inputs",
        "build 'n': needs 'b', which is a helper of the primary of cluster 'c' and may be aborted",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [case[1:] for case in CLUSTER_CASES],
    ids=[case[0] for case in CLUSTER_CASES],
)
def test_a_wrong_cluster_is_told_with_file_line_and_key(
    tmp_path: Path, text: str, place: str, message: str
) -> None:
    assert errors(tmp_path, text) == [(f"gradient.toml:{place}", message)]


def test_two_clusters_that_need_each_other_are_a_cycle(tmp_path: Path) -> None:
    text = build("a") + build("b", "inputs = ['d']") + build("c", "inputs = ['a']") + build("d")
    for name, members in (("x", "ab"), ("y", "cd")):
        text += f"[[cluster]]\nname = '{name}'\n"
        text += "".join(f"[[cluster.member]]\nbuild = '{member}'\nrole = 'r'\n" for member in members)
    ((_, message),) = errors(tmp_path, text)
    assert message == (
        "a cycle: b (cluster 'x') needs d (cluster 'y'), c (cluster 'y') needs a (cluster 'x'); members start together"
    )


def test_all_problems_are_told_in_the_order_of_the_file_up_to_a_bound(tmp_path: Path) -> None:
    told = errors(tmp_path, build("a", "inputs = ['z9999']", "x = 1") + build("a") * 100)
    assert [source for source, _ in told[:2]] == ["gradient.toml:4: build.inputs", "gradient.toml:5: build.x"]
    assert told[-1] == ("gradient.toml", "and 52 more")
    assert len(told) == 51


def test_what_is_no_toml_is_told_with_its_line(tmp_path: Path) -> None:
    assert errors(tmp_path, build("a") + "name = \n") == [
        ("gradient.toml:4: name", "not valid TOML: Invalid value")
    ]
    ((source, message),) = errors(tmp_path, "[[build]]\nname = 'a'\nname = 'b'")
    assert source == "gradient.toml:3: name"
    assert "overwrite" in message
    ((source, message),) = errors(tmp_path, "x = [1,\n")
    assert source is not None
    assert source.startswith("gradient.toml:2")
    assert errors(tmp_path, b"a = 1\nb = '\xff'") == [("gradient.toml:2", "not valid UTF-8")]
    ((_, message),) = errors(tmp_path, "a = " + "9" * 5000)
    assert message.startswith("not valid: Exceeds the limit")
    assert errors(tmp_path, "a = " + "[" * 100_000) == [("gradient.toml", "not valid: nested too deeply")]


def test_a_missing_recipe_and_one_that_is_no_file_of_the_tree(tmp_path: Path) -> None:
    assert errors_of(tmp_path) == [("gradient.toml", "there is no gradient.toml")]
    secret = tmp_path / "secret"
    secret.write_text("secret = 1")
    (tmp_path / "gradient.toml").symlink_to(secret)
    ((_, message),) = errors_of(tmp_path)
    assert "cannot be read" in message
    (tmp_path / "gradient.toml").unlink()
    (tmp_path / "gradient.toml").mkdir()
    ((_, message),) = errors_of(tmp_path)
    assert message == "gradient.toml is not a file"


def test_an_attr_that_nothing_is_called_by(tmp_path: Path) -> None:
    assert errors(tmp_path, build("hello-1.0"), "hello", "helo") == [
        ("gradient.toml", "no build is called 'helo', did you mean 'hello'?")
    ]


def test_one_mistake_hides_no_other(tmp_path: Path) -> None:
    """Whatever is wrong with an entry, what others say of it and it of others is checked all the same."""
    text = "\n".join(
        [
            "[[build]]",  # 1: no name, and an input that is none
            "command = ['x']",
            "inputs = ['nothing']",
            "[[build]]",  # 4: a name that cannot be, but is referred to
            "name = '../a'",
            "command = ['x']",
            "[[build]]",  # 7: a cycle, an unknown key
            "name = 'b-1'",
            "command = ['x']",
            "inputs = ['../a', 'c-1']",
            "tiemout = 1",
            "[[build]]",
            "name = 'c-1'",
            "command = ['x']",
            "inputs = ['b-1']",
            "[[cluster]]",  # 16: no name, a member without a role of an unknown build, one twice
            "[[cluster.member]]",
            "build = 'zzz'",
            "[[cluster.member]]",
            "build = 'd-1'",
            "role = 'r'",
            "[[cluster.member]]",
            "build = 'd-1'",
            "role = 'r'",
            "[[build]]",
            "name = 'd-1'",
            "command = []",
        ]
    )
    assert errors(tmp_path, text) == [
        ("gradient.toml:1: build.name", "name is missing"),
        ("gradient.toml:3: build.inputs", "unknown input 'nothing'"),
        (
            "gradient.toml:5: build.name",
            "'../a' cannot be a name: at most 160 letters, digits and + - . _ ? =, no dash or dot first",
        ),
        ("gradient.toml:11: build.tiemout", "build 'b-1': unknown key 'tiemout', did you mean 'timeout'?"),
        ("gradient.toml:15: build.inputs", "a cycle: b-1 needs c-1, c-1 needs b-1"),
        ("gradient.toml:16: cluster.name", "name is missing"),
        ("gradient.toml:17: cluster.member.role", "role is missing"),
        ("gradient.toml:18: cluster.member.build", "member of an unknown build 'zzz'"),
        ("gradient.toml:23: cluster.member.build", "build 'd-1' is a member of a cluster already"),
        ("gradient.toml:27: build.command", "build 'd-1': command is empty"),
    ]
