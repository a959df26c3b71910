"""From a recipe to reports: what is selected, in which order, what is pruned, what imports do."""

from collections.abc import Callable
from pathlib import Path

import msgspec
from gradient_protocol.messages.shapes import Cluster, Derivation, Note
from gradient_worker.evaluator.evaluator import (
    Answer,
    Done,
    ImportAnswer,
    KnownAnswer,
    NeedImport,
    QueryKnown,
    RecipeEvaluation,
    Report,
    Step,
)

from tests.unit.evaluator.test_recipe_errors import SOURCE, build


class Outcome:
    """All that an evaluation yielded."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.progress: list[tuple[int, int]] = []

    @property
    def reports(self) -> list[Report]:
        return [step for step in self.steps if isinstance(step, Report)]

    @property
    def derivations(self) -> list[Derivation]:
        return [each for report in self.reports for each in report.result.derivations]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.derivations]

    @property
    def attrs(self) -> dict[str, str | None]:
        return {each.name: each.attr for each in self.derivations}

    @property
    def clusters(self) -> list[Cluster]:
        return [each for report in self.reports for each in report.result.clusters]

    @property
    def errors(self) -> list[Note]:
        return [each for report in self.reports for each in report.result.errors]

    @property
    def done(self) -> Done:
        assert isinstance(self.steps[-1], Done)
        return self.steps[-1]


def evaluate(
    directory: Path,
    text: str,
    *attrs: str,
    known: Callable[[str], bool] = lambda _: False,
    imports: Callable[[NeedImport], ImportAnswer] | None = None,
) -> Outcome:
    directory.mkdir(exist_ok=True)
    (directory / "gradient.toml").write_text(text)
    evaluation = RecipeEvaluation(directory, SOURCE, attrs)
    outcome = Outcome()
    answer: Answer | None = None
    while not outcome.steps or not isinstance(outcome.steps[-1], Done):
        step = evaluation.advance(answer)
        outcome.steps.append(step)
        outcome.progress.append(evaluation.progress)
        answer = None
        if isinstance(step, QueryKnown):
            answer = KnownAnswer(frozenset(filter(known, step.drv_paths)))
        elif isinstance(step, NeedImport):
            assert imports is not None
            answer = imports(step)
    return outcome


CHAIN = build("c-1", "inputs = ['b-1']") + build("b-1", "inputs = ['a-1']") + build("a-1") + build("z-1")


def test_without_attrs_every_build_is_asked_for_and_comes_after_what_it_needs(tmp_path: Path) -> None:
    outcome = evaluate(tmp_path, CHAIN)
    assert outcome.names == ["a-1", "b-1", "c-1", "z-1"]
    assert outcome.attrs == {name: name for name in outcome.names}
    assert outcome.done.stats.derivations == 4
    assert outcome.errors == []


def test_progress_counts_what_is_reported_or_known_of_what_was_found(tmp_path: Path) -> None:
    assert evaluate(tmp_path, CHAIN).progress == [(0, 4), (4, 4)]
    # Asked about, then one step after the answer, which settles what the known one needs too.
    known = evaluate(tmp_path, CHAIN, "c", known=lambda path: path.endswith("-b-1.drv"))
    assert known.progress == [(0, 3), (2, 3), (3, 3)]
    assert evaluate(tmp_path, "[[build]]").progress == [(0, 0), (0, 0)]


def test_an_attr_is_a_name_with_or_without_its_version(tmp_path: Path) -> None:
    assert evaluate(tmp_path, CHAIN, "b").attrs == {"a-1": None, "b-1": "b"}
    assert evaluate(tmp_path, CHAIN, "b-1", "z", "z").attrs == {"a-1": None, "b-1": "b-1", "z-1": "z"}
    both = build("x-1.0") + build("x-2.0") + build("x")
    assert evaluate(tmp_path, both, "x").attrs == {"x": "x"}
    assert evaluate(tmp_path, build("x-1.0") + build("x-2.0"), "x").attrs == {"x-1.0": "x", "x-2.0": "x"}


def test_a_derivation_carries_what_its_recipe_says(tmp_path: Path) -> None:
    text = build("lib-a-1.0", "outputs = ['out', 'dev']") + build(
        "app-2.0",
        "inputs = ['source', 'lib-a-1.0']",
        "system = 'x86_64-linux'",
        "features = ['kvm']",
        "env = { A = 'b' }",
        "timeout = 60",
        "max_silent = 1.5",
        "prefer_local = true",
    )
    library, app = evaluate(tmp_path, text).derivations
    assert (app.pname, app.system, app.features, app.env) == ("app", "x86_64-linux", ["kvm"], {"A": "b"})
    assert (app.timeout_secs, app.max_silent_secs, app.prefer_local) == (60.0, 1.5, True)
    assert app.sources == [SOURCE]
    (edge,) = app.inputs
    assert (edge.drv_path, edge.name, edge.outputs, edge.runtime_only) == (
        library.drv_path,
        "lib-a-1.0",
        ["out", "dev"],
        False,
    )
    assert (library.system, library.sources, library.timeout_secs, library.prefer_local) == (
        "any",
        [],
        None,
        False,
    )


def test_only_what_decides_an_output_decides_its_path(tmp_path: Path) -> None:
    def path(*more: str) -> str:
        return evaluate(tmp_path, build("a", *more)).derivations[0].drv_path

    assert path("timeout = 5", "max_silent = 3", "prefer_local = true") == path()
    different = [path(), path("env = { A = 'x' }"), path("features = ['f']"), path("inputs = ['source']")]
    assert len(set(different)) == len(different)


def test_a_download_is_built_in_and_lies_where_its_hash_says(tmp_path: Path) -> None:
    text = f"[[build]]\nname = 'f-1'\nfixed_output = {{ url = 'https://x/f', sha256 = '{'AB' * 32}' }}"
    (download,) = evaluate(tmp_path, text).derivations
    assert (download.system, download.command) == ("builtin", [])
    assert download.fixed_output is not None
    assert download.fixed_output.sha256 == "ab" * 32


def test_what_the_server_knows_is_left_out_with_what_only_it_needs(tmp_path: Path) -> None:
    text = CHAIN + build("d-1", "inputs = ['c-1', 'z-1']")
    outcome = evaluate(tmp_path, text, "d", known=lambda path: path.endswith("-c-1.drv"))
    assert outcome.names == ["z-1", "d-1"]
    assert (outcome.done.stats.derivations, outcome.done.stats.known) == (5, 1)
    # What was asked for is reported even if it is known, and never asked about.
    everything = evaluate(tmp_path, text, known=lambda _: True)
    assert everything.names == ["a-1", "b-1", "c-1", "z-1", "d-1"]
    assert not any(isinstance(step, QueryKnown) for step in everything.steps)


CLUSTER = (
    build("dep-1")
    + build("left-1", "inputs = ['dep-1']")
    + build("right-1")
    + build("after-1", "inputs = ['left-1']")
    + build("alone-1")
    + """
[[cluster]]
name = "pair"
same_zone = true
[[cluster.member]]
build = "left-1"
role = "server"
primary = true
pin = "w1"
[[cluster.member]]
build = "right-1"
role = "client"
"""
)


def test_a_member_brings_its_whole_cluster_in_one_batch(tmp_path: Path) -> None:
    outcome = evaluate(tmp_path, CLUSTER, "after", known=lambda _: True)
    # Members are reported even if they are known: the cluster names them.
    assert outcome.names == ["left-1", "right-1", "after-1"]
    (cluster,) = outcome.clusters
    by_name = {each.name: each.drv_path for each in outcome.derivations}
    assert (cluster.name, cluster.same_zone, cluster.retry_budget) == ("pair", True, 1)
    assert [(m.drv_path, m.role, m.primary, m.pin) for m in cluster.members] == [
        (by_name["left-1"], "server", True, "w1"),
        (by_name["right-1"], "client", False, None),
    ]
    assert outcome.names.index("left-1") + 1 == outcome.names.index("right-1")


def test_a_change_in_one_member_changes_the_paths_of_all(tmp_path: Path) -> None:
    def paths(text: str) -> dict[str, str]:
        return {each.name: each.drv_path for each in evaluate(tmp_path, text).derivations}

    before, after = paths(CLUSTER), paths(CLUSTER.replace('pin = "w1"', 'pin = "w2"'))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"left-1", "right-1", "after-1"}


def test_batches_are_bounded_in_number_and_in_bytes_and_in_order(tmp_path: Path) -> None:
    many = "".join(build(f"n{n}-1", *([f"inputs = ['n{n - 1}-1']"] if n else [])) for n in range(1200))
    sizes = [len(report.result.derivations) for report in evaluate(tmp_path, many).reports]
    assert sizes == [500, 500, 200]
    large = "".join(build(f"n{n}-1", f"env = {{ A = '{'x' * 100_000}' }}") for n in range(20))
    outcome = evaluate(tmp_path, large)
    assert max(len(msgspec.msgpack.encode(report.result)) for report in outcome.reports) < 600_000
    assert len(outcome.names) == 20


def test_one_derivation_too_large_for_a_message_is_an_error(tmp_path: Path) -> None:
    (note,) = evaluate(tmp_path, build("a", f"env = {{ A = '{'x' * 4_000_000}' }}")).errors
    assert note.source == "gradient.toml:1: build"
    assert "over 3145728 bytes" in note.message


def test_a_recipe_without_builds_is_a_warning(tmp_path: Path) -> None:
    (report,) = evaluate(tmp_path, "# nothing yet\n").reports
    assert [note.message for note in report.result.warnings] == ["defines no builds"]


GENERATOR = (
    "import = ['gen-1']\n" + build("gen-1", "inputs = ['base-1']") + build("base-1") + build("other-1")
)


def generated(directory: Path, text: str) -> Callable[[NeedImport], ImportAnswer]:
    def answer(step: NeedImport) -> ImportAnswer:
        (path,) = step.paths
        directory.mkdir()
        (directory / "gradient.toml").write_text(text)
        return ImportAnswer({path: directory})

    return answer


def test_an_import_is_reported_first_and_its_output_is_read_as_further_recipes(tmp_path: Path) -> None:
    more = build("made-1", "inputs = ['base-1', 'source']")
    outcome = evaluate(tmp_path / "tree", GENERATOR, imports=generated(tmp_path / "made", more))
    kinds = [type(step).__name__ for step in outcome.steps]
    assert kinds == ["Report", "NeedImport", "Report", "Done"]
    assert outcome.names == ["base-1", "gen-1", "other-1", "made-1"]
    need = outcome.steps[1]
    assert isinstance(need, NeedImport)
    generator, made = outcome.derivations[1], outcome.derivations[3]
    assert need.paths == (generator.outputs[0].path,)
    # `source`, in an imported recipe, is the tree that the recipe lies in.
    assert made.sources == [generator.outputs[0].path]
    assert [edge.name for edge in made.inputs] == ["base-1"]


def test_an_attr_found_without_an_import_waits_for_none(tmp_path: Path) -> None:
    outcome = evaluate(tmp_path, GENERATOR, "other")
    assert outcome.names == ["other-1"]


def test_an_attr_of_an_imported_recipe_needs_only_what_the_import_needs(tmp_path: Path) -> None:
    outcome = evaluate(
        tmp_path / "tree", GENERATOR, "made", imports=generated(tmp_path / "made", build("made-1"))
    )
    assert outcome.attrs == {"base-1": None, "gen-1": None, "made-1": "made"}
    missing = evaluate(
        tmp_path / "tree", GENERATOR, "nope", imports=generated(tmp_path / "more", build("made-1"))
    )
    assert [note.message for note in missing.errors] == ["no build is called 'nope'"]


def test_an_import_that_failed_or_is_broken_is_an_error_at_its_place(tmp_path: Path) -> None:
    def failed(step: NeedImport) -> ImportAnswer:
        return ImportAnswer({}, dict.fromkeys(step.paths, "exit status 1"))

    (note,) = evaluate(tmp_path / "tree", GENERATOR, imports=failed).errors
    assert (note.source, note.message) == ("gradient.toml:1: import", "import of 'gen-1': exit status 1")
    broken = generated(tmp_path / "broken", build("other-1"))
    (note,) = evaluate(tmp_path / "tree", GENERATOR, imports=broken).errors
    assert note.source == "gen-1/gradient.toml:2: build.name"
    (tmp_path / "a file").write_text("")
    (note,) = evaluate(
        tmp_path / "tree", GENERATOR, imports=lambda step: ImportAnswer({step.paths[0]: tmp_path / "a file"})
    ).errors
    assert (note.source, note.message) == ("gen-1/gradient.toml", "there is no gradient.toml")


def test_ten_thousand_builds_in_one_file(tmp_path: Path) -> None:
    text = "".join(
        build(
            f"n{n}-1", f"inputs = [{', '.join(repr(f'n{m}-1') for m in sorted({n // 2, n - 1} - {n, -1}))}]"
        )
        for n in range(10_000)
    )
    outcome = evaluate(tmp_path, text, "n9999")
    assert len(outcome.names) == 10_000
    assert outcome.done.stats.cpu_ms < 20_000
