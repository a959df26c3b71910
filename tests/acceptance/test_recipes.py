"""Recipes that are wrong: one clear line each, with file, line and key, and exit status 1."""

from pathlib import Path

import pytest

from tests.acceptance.pool import Pool
from tests.acceptance.processes import one_line

SOUND = '[[build]]\nname = "{}"\ncommand = ["true"]\n'

WRONG = {
    "no TOML": ('[[build]]\nname = "a-1\n', "gradient.toml:2: name: not valid TOML"),
    "an unknown key": (SOUND.format("a-1") + "comand = 1\n", "gradient.toml:4: build.comand: "),
    "a wrong type": (SOUND.format("a-1") + 'timeout = "long"\n', "gradient.toml:4: build.timeout: "),
    "an unknown input": (
        SOUND.format("lib-1.0") + SOUND.format("app-1.0") + 'inputs = ["lib-1.1"]\n',
        "gradient.toml:7: build.inputs: build 'app-1.0': unknown input 'lib-1.1', did you mean 'lib-1.0'?",
    ),
    "a duplicate name": (
        SOUND.format("twin-1") + SOUND.format("twin-1"),
        "gradient.toml:5: build.name: two builds have the name 'twin-1'",
    ),
    "a cycle": (
        SOUND.format("a-1") + 'inputs = ["b-1"]\n' + SOUND.format("b-1") + 'inputs = ["a-1"]\n',
        "a cycle: a-1 needs b-1, b-1 needs a-1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_recipe_is_told_with_its_place(pool: Pool, tmp_path: Path, name: str) -> None:
    text, expected = WRONG[name]
    (tmp_path / "gradient.toml").write_text(text)
    done = pool.gradient("build", tmp_path)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if expected in line]
    assert len(lines) == 1, done.stdout
    assert lines[0].startswith("error: gradient.toml:")


def test_an_attribute_that_is_not_there(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "gradient.toml").write_text(SOUND.format("only-1.0"))
    done = pool.gradient("build", tmp_path, "onli")
    assert done.returncode == 1
    assert "onli" in done.stdout
    assert "only" in done.stdout


def test_a_directory_without_a_recipe_is_a_matter_of_usage(pool: Pool, tmp_path: Path) -> None:
    assert "has no gradient.toml" in one_line(pool.gradient("build", tmp_path), 2)
