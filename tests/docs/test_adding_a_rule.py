"""CONTRIBUTING.md, "To add a scoring rule", tried by adding one to a copy: with all of its steps the tests of
the rules pass, and without any one of them one fails.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCORING = "server/gradient_server/scoring"

RULE = '''"""A rule that is thrown away."""

from gradient_server.scoring.columns import Field, JobColumns, Points
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.rule import ScoreRule
from gradient_server.scoring.weights import BUILTIN_PENALTY


class ThrowAwayRule(ScoreRule):
    """A few points from what the server itself could do."""

    name = "ThrowAwayRule"
    description = "Lowers what is builtin."

    def score(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Points:
        return columns.field(Field.BUILTIN) * -BUILTIN_PENALTY
'''
RULE_IMPORT = "from gradient_server.scoring.rules.thrown_away import ThrowAwayRule\n"
# Each step: file, what is there, and what takes its place. The fifth is a command.
STEPS = {
    "weight": [
        (f"{SCORING}/weights.py", '__all__ = [\n', '__all__ = [\n    "BUILTIN_PENALTY",\n'),
        (f"{SCORING}/weights.py", "ASSIGN_FLOOR = 0.0\n", "ASSIGN_FLOOR = 0.0\nBUILTIN_PENALTY = 7.0\n"),
    ],
    "rule": [
        (f"{SCORING}/rules/__init__.py", '__all__ = [\n', '__all__ = [\n    "ThrowAwayRule",\n'),
        (
            f"{SCORING}/rules/__init__.py",
            "from gradient_server.scoring.rules.waiting",
            RULE_IMPORT + "from gradient_server.scoring.rules.waiting",
        ),
    ],
    "row": [
        (f"{SCORING}/policy.py", "    WaitTimeRule,\n)", "    WaitTimeRule,\n    ThrowAwayRule,\n)"),
        (
            f"{SCORING}/policy.py",
            "        RuleSpec(False, FairShareRule()),\n",
            "        RuleSpec(False, FairShareRule()),\n        RuleSpec(True, ThrowAwayRule()),\n",
        ),
    ],
    "oracle": [
        (
            "tests/properties/scoring/oracle.py",
            "    return result\n",
            '    rules["ThrowAwayRule"] = -7.0 * job.builtin\n    return result\n',
        )
    ],
    "page": [],
}  # fmt: skip
# What tells of the step that was forgotten.
EXPECTED = {
    "weight": "cannot import name 'BUILTIN_PENALTY'",
    "rule": "cannot import name 'ThrowAwayRule'",
    "row": "test_every_rule_is_in_the_full_table",
    "oracle": "assert math.isclose(got.total",
    "page": "run: python -m tests.docs.scoring_page",
}
GENERATE = "from tests.docs.scoring_page import main; main()\n"
CHECK = """
from hypothesis import Phase, given, settings, strategies
from tests.docs.test_scoring_page import test_the_tables_are_those_of_the_code
from tests.properties.scoring import test_columns_and_oracle as oracle
from tests.unit.scoring.test_policies import test_every_rule_is_in_the_full_table
test_every_rule_is_in_the_full_table()
test_the_tables_are_those_of_the_code()
agrees = oracle.test_every_rule_agrees_with_the_text.hypothesis.inner_test
few = settings(max_examples=30, phases=[Phase.generate], deadline=None, database=None)
few(given(strategies.lists(oracle.JOBS, min_size=1), oracle.WORKERS, oracle.INSTANCES)(agrees))()
print("all pass")
"""


def copy_with(directory: Path, steps: set[str]) -> None:
    """A checkout with these steps taken; what no step touches is linked."""
    for name in ("protocol", "bench"):
        (directory / name).symlink_to(ROOT / name)
    for path in ("server/gradient_server", "tests", "tests/properties"):
        (directory / path).mkdir(parents=True)
        for entry in (ROOT / path).iterdir():
            if entry.name not in {"scoring", "docs", "properties", "__pycache__"}:
                (directory / path / entry.name).symlink_to(entry)
    for path in (SCORING, "tests/properties/scoring", "tests/docs", "docs"):
        shutil.copytree(ROOT / path, directory / path)
    for step in steps:
        for file, there, instead in STEPS[step]:
            text = (directory / file).read_text()
            assert there in text, (step, file)
            (directory / file).write_text(text.replace(there, instead, 1))
    if "rule" in steps:
        (directory / SCORING / "rules/thrown_away.py").write_text(RULE)


@pytest.mark.parametrize("forgotten", [None, *STEPS])
def test_each_step_of_the_checklist_is_needed_and_together_they_are_enough(
    tmp_path: Path, forgotten: str | None
) -> None:
    steps = set(STEPS) - {forgotten}
    copy_with(tmp_path, steps)
    # Its packages come before those that are installed.
    paths = [str(tmp_path / name) for name in (".", "server", "protocol")]
    done = subprocess.run(
        [sys.executable, "-c", GENERATE * ("page" in steps) + CHECK],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("all pass" in done.stdout) == (forgotten is None), (forgotten, done.stderr)
    if forgotten is not None:
        assert EXPECTED[forgotten] in done.stderr, done.stderr
