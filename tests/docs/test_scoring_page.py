"""docs/scoring.md says what the code does: its tables are the code's, its example is worked out by hand."""

import json

import pytest
import trio
from gradient_server.scoring.policy import policy_by_name

from bench.day import Row, chart, rows_of
from bench.day_load import JobClass, day_of_jobs, hosts
from bench.day_world import simulate
from tests.docs.scoring_page import DOCS, example, generated


def test_the_tables_are_those_of_the_code() -> None:
    page = (DOCS / "scoring.md").read_text()
    assert generated(page) == page, "run: python -m tests.docs.scoring_page"


def test_the_picture_is_of_the_recorded_day() -> None:
    rows = [Row(**row) for row in json.loads((DOCS / "scoring-day.json").read_text())]
    assert (DOCS / "scoring-day.svg").read_text() == chart(rows)
    assert sum(row.count for row in rows if row.jobs == "all") == 3 * 10_000


def test_the_example_is_right_by_hand() -> None:
    scores = example()
    assert scores.estimate is not None
    compiler, manual, _ = (scores.estimate.detail(index) for index in range(3))
    assert compiler["download_secs"] == pytest.approx(2e9 / (800e6 / 8))
    assert compiler["paths_secs"] == pytest.approx(50 * 0.18)
    run = 600 * (1 + 5 * 0.04) * (2400 / 3000)
    assert compiler["run_secs"] == pytest.approx(run)
    assert compiler["oom_retry_secs"] == pytest.approx(0.1 * run)
    assert compiler["upload_secs"] == pytest.approx(1e9 / (400e6 / 8))
    # Its history does not say what core it ran on: the mean of the fleet stands for it.
    assert manual["total_secs"] == pytest.approx(20 * 1.2 * 0.8 + 1e6 / 50e6)
    total = 20 + 9 + run + 0.1 * run + 20
    assert scores.total[0] == pytest.approx(3600 - total + 60 * 90 / 30)
    assert scores.total[1] == pytest.approx(3600 - (20 * 1.2 * 0.8 + 0.02) + 60 * 30 / 30 + 1000)
    # 13,200 MB are needed, min(9216 - 1024, 16384 - 6144) are there, and 6144 will be released.
    assert scores.vetoes_of(2) == ("ResourceSaturationRule",)
    assert scores.points_of(2)["ResourceSaturationRule"] == -8600
    assert scores.wins.tolist() == [True, True, False]


@pytest.mark.parametrize("name", ["simple", "resource-aware"])
def test_a_simulated_day_leaves_nobody_behind(name: str) -> None:
    jobs = day_of_jobs(150, seed=3, day_secs=1800.0)
    day = trio.run(simulate, jobs, hosts(2), policy_by_name(name))
    assert sorted(one.job.number for one in day.outcomes) == [job.number for job in jobs]
    rows = {row.jobs: row for row in rows_of(name, day.outcomes)}
    assert rows["all"].count == 150
    assert rows[JobClass.PRIORITISED].longest_secs <= rows["all"].longest_secs
    if name == "resource-aware":
        assert rows["all"].failed == 0
