"""docs/faults.md names tests that there are, and has a row for each fault of processes."""

import re
from pathlib import Path

from tests.docs.blocks import block_of
from tests.docs.faults_page import BLOCK, PAGE, table

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`((?:acceptance|integration)/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())
    assert len(named) > 30
    for file, test in named:
        assert f"def {test or 'test_'}" in (TESTS / file).read_text(), f"{file} has no {test}"


def test_every_fault_of_processes_has_its_figures() -> None:
    block = block_of(PAGE.read_text(), BLOCK)
    for file in sorted((TESTS / "acceptance").glob("test_faults_*.py")):
        for test in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE):
            assert f"`acceptance/{file.name}::{test}`" in block, "record them as the page says"


def test_a_fault_that_was_measured_twice_has_one_row() -> None:
    entry = '{{"fault": "a cut", "again": 0, "secs": {secs}, "test": "acceptance/test_x.py::test_y"}}'
    rows = table([entry.format(secs=2.0), entry.format(secs=1.04)]).splitlines()[2:]
    assert rows == ["| a cut | 0 | 1.0 | `acceptance/test_x.py::test_y` |"]
