"""Every key of a recipe is found again, however it is written."""

import tomllib
from collections.abc import Iterator

from gradient_worker.evaluator.positions import KeyPath, Positions

TEXT = '''\
# build = "not this"
import = ["a", # first
  "b#", 'c]',
]

[[build]]
name = "one"   # name
command = [
  "/bin/sh", "-c",
  """
[[build]]
name = "not this"
""",
  \'\'\'also = "not"\'\'\',
]
env.PATH = "/x"
"quoted key" = { a = 1, b = [ { c = "}" } ] }

[build.fixed_output]
url = "x"

[[build]]
  name = 'two'
[[cluster]]
name = "c"
[[cluster.member]]
build = "one"
[[cluster.member]]
build = "two"
pin = """"quoted"" """
[[cluster]]
[[cluster.member]]
build = "three"
[last.table]
x = 2026-01-01
'''


def line_of(needle: str) -> int:
    return TEXT[: TEXT.index(needle)].count("\n") + 1


def test_keys_are_found_where_they_are_written() -> None:
    positions = Positions(TEXT)
    expected: dict[KeyPath, int] = {
        ("import",): 2,
        ("import", 1): 3,
        ("import", 2): 3,
        ("build", 0): line_of('[[build]]\nname = "one"'),
        ("build", 0, "name"): line_of('name = "one"'),
        ("build", 0, "command", 1): line_of('"/bin/sh"'),
        ("build", 0, "command", 2): line_of('"""'),
        ("build", 0, "command", 3): line_of("'''also"),
        ("build", 0, "env", "PATH"): line_of("env.PATH"),
        ("build", 0, "quoted key", "b", 0, "c"): line_of('"quoted key"'),
        ("build", 0, "fixed_output"): line_of("[build.fixed_output]"),
        ("build", 0, "fixed_output", "url"): line_of('url = "x"'),
        ("build", 1, "name"): line_of("name = 'two'"),
        ("cluster", 0, "member", 1, "pin"): line_of("pin ="),
        ("cluster", 1, "member", 0, "build"): line_of('build = "three"'),
        ("last", "table", "x"): line_of("x = 2026"),
    }
    assert {path: positions.line(path) for path in expected} == expected


def test_what_is_missing_is_at_the_table_that_lacks_it() -> None:
    positions = Positions(TEXT)
    assert positions.line(("build", 1, "command")) == positions.line(("build", 1))
    assert positions.line(("nowhere",)) == 1


def key_paths(value: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield (*path, key)
        yield from key_paths(below, (*path, key))


def test_no_key_that_the_parser_finds_is_missed() -> None:
    found = Positions(TEXT)._found
    paths = set(key_paths(tomllib.loads(TEXT)))
    # The table `last` is named by no header of its own.
    assert paths - found.keys() == {("last",)}
    assert found.keys() - paths == set()
