"""Whatever a file holds, an evaluation ends, with a graph in order or with errors in their place."""

import re
import tempfile
from pathlib import Path

from gradient_protocol.messages.shapes import Derivation, Note
from gradient_worker.evaluator.evaluator import Done, ImportAnswer, NeedImport, RecipeEvaluation, Report
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = "a" * 32 + "-source"
DOCUMENT = Path(__file__).parents[3] / "docs" / "recipes.md"
EXAMPLES = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
MEMBERS = "".join(f"[[build]]\nname = '{name}-test-1'\ncommand = ['x']\n" for name in ("server", "client"))
GOOD = "import = ['app-2.0']\n" + EXAMPLES[0] + MEMBERS + EXAMPLES[1]


def evaluate(text: str) -> tuple[list[Derivation], list[Note]]:
    derivations: list[Derivation] = []
    errors: list[Note] = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "gradient.toml").write_bytes(text.encode(errors="surrogateescape"))
        evaluation = RecipeEvaluation(Path(directory), SOURCE, [])
        answer: ImportAnswer | None = None
        while not isinstance(step := evaluation.advance(answer), Done):
            answer = None
            if isinstance(step, NeedImport):
                answer = ImportAnswer({}, dict.fromkeys(step.paths, "not here"))
            elif isinstance(step, Report):
                derivations += step.result.derivations
                errors += step.result.errors
    return derivations, errors


def test_the_documents_examples_are_right() -> None:
    derivations, errors = evaluate(GOOD)
    assert [each.name for each in derivations] == [
        "zlib-src-1.3",
        "zlib-1.3",
        "app-2.0",
        "server-test-1",
        "client-test-1",
    ]
    assert [(note.source, note.message) for note in errors] == [
        ("gradient.toml:1: import", "import of 'app-2.0': not here")
    ]


changes = st.lists(
    st.tuples(st.integers(0, len(GOOD)), st.integers(0, 12), st.text("[]{}\"'=.,#\\\n ab1-\0é", max_size=4)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(changes)
def test_a_mangled_recipe_is_an_error_that_names_a_line_of_the_file_or_a_graph(
    mangling: list[tuple[int, int, str]],
) -> None:
    text = GOOD
    for at, length, replacement in mangling:
        text = text[:at] + replacement + text[at + length :]
    derivations, errors = evaluate(text)
    assert derivations or errors or not text.strip()
    for note in errors:
        assert "\n" not in note.message
        line = re.match(r"gradient\.toml:(\d+)", note.source or "")
        assert line is None or 1 <= int(line.group(1)) <= text.count("\n") + 1


graphs = st.lists(st.sets(st.integers(0, 11), max_size=3), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(graphs, st.sets(st.integers(0, 11), max_size=3))
def test_a_graph_is_in_order_or_a_cycle(edges: list[set[int]], members: set[int]) -> None:
    count = len(edges)
    text = ""
    for number, needs in enumerate(edges):
        inputs = [f"n{need}" for need in sorted(needs) if need < count]
        text += f"[[build]]\nname = 'n{number}'\ncommand = ['x']\ninputs = {inputs}\n"
    members = {member for member in members if member < count}
    if members:
        text += "[[cluster]]\nname = 'c'\n"
        text += "".join(
            f"[[cluster.member]]\nbuild = 'n{member}'\nrole = 'r'\n" for member in sorted(members)
        )
    derivations, errors = evaluate(text)
    if has_cycle(edges, members):
        assert [note.message.split(":")[0] for note in errors] == ["a cycle"]
        return
    assert errors == []
    place = {each.drv_path: at for at, each in enumerate(derivations)}
    assert len(place) == count
    assert all(place[edge.drv_path] < place[each.drv_path] for each in derivations for edge in each.inputs)


def has_cycle(edges: list[set[int]], members: set[int]) -> bool:
    """By taking away, again and again, what needs nothing that is left."""
    node = {number: -1 if number in members else number for number in range(len(edges))}
    left = {(node[number], node[need]) for number in node for need in edges[number] if need in node}
    while removable := {a for pair in left for a in pair} - {a for a, _ in left}:
        left = {(a, b) for a, b in left if b not in removable}
    return bool(left)
