"""Nothing starves: 10,000 jobs over twelve simulated hosts for a simulated day, under three policies.

`python -m bench.day [--jobs N] [--hosts N] [--seed N] [--write]`. The scheduler, its ranking, its
histories and its waiting builds are the real ones (`day_world`); hosts, database and time are not. One
line of JSON a policy and class of jobs: the wait from being ready to the start, in seconds. `--write`
puts the figures into docs/.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import trio
from gradient_server.scoring.columns import Field, JobColumns, Points
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.policy import RulePolicy, policy_by_name
from gradient_server.scoring.rule import ScoreRule

from bench.day_load import JobClass, day_of_jobs, hosts
from bench.day_plot import Group, plot
from bench.day_world import Outcome, simulate
from tests.docs.blocks import with_block

__all__ = ["POLICIES", "Row", "chart", "first_in_first_out", "rows_of", "table"]

DOCS: Final = Path(__file__).parent.parent / "docs"
POLICIES: Final = ("resource-aware", "simple", "first-in-first-out")


class ArrivalRule(ScoreRule):
    """A point for each second since the job was ready, and nothing else."""

    name = "ArrivalRule"
    description = "Whoever was ready first goes first."

    def score(
        self,
        columns: JobColumns,
        worker: WorkerContext,  # noqa: ARG002 - the same everywhere
        instance: InstanceContext,  # noqa: ARG002 - the interface of a rule
    ) -> Points:
        """Seconds since `ready_at`."""
        points: Points = columns.now - columns.field(Field.READY_AT)
        return points


def first_in_first_out() -> RulePolicy:
    """The control: no rule of ours."""
    return RulePolicy(POLICIES[2], [ArrivalRule()], uses_history=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One class of jobs under one policy. Waits in seconds; `killed`: tries that the kernel ended."""

    policy: str
    jobs: str
    count: int
    mean_secs: float
    p50_secs: float
    p95_secs: float
    longest_secs: float
    killed: int
    failed: int


def rows_of(policy: str, outcomes: Sequence[Outcome]) -> list[Row]:
    """A row a class, and one of all."""
    rows = []
    for kind in (*JobClass, None):
        of_kind = [one for one in outcomes if kind is None or one.job.kind is kind]
        waits = sorted(one.wait_secs for one in of_kind)
        rows.append(
            Row(
                policy=policy,
                jobs="all" if kind is None else str(kind),
                count=len(waits),
                mean_secs=round(sum(waits) / len(waits), 1),
                p50_secs=round(waits[len(waits) // 2], 1),
                p95_secs=round(waits[len(waits) * 95 // 100], 1),
                longest_secs=round(waits[-1], 1),
                killed=sum(one.kills for one in of_kind),
                failed=sum(one.failed for one in of_kind),
            )
        )
    return rows


def _duration(secs: float) -> str:
    if secs < 100:
        return f"{secs:.0f} s"
    return f"{secs / 60:.0f} min" if secs < 6000 else f"{secs / 3600:.1f} h"


def table(rows: Sequence[Row]) -> str:
    """The figures as a part of a page."""
    lines = [
        "| Jobs | Policy | Count | Mean wait | 95th percentile | Longest | Killed for memory | Failed |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in dict.fromkeys(row.jobs for row in rows):
        for row in (row for row in rows if row.jobs == name):
            waits = [_duration(secs) for secs in (row.mean_secs, row.p95_secs, row.longest_secs)]
            cells = [row.jobs, f"`{row.policy}`", f"{row.count:,}", *waits, str(row.killed), str(row.failed)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def chart(rows: Sequence[Row]) -> str:
    """The figures as an SVG."""
    groups = [
        Group(name, [(row.p95_secs, row.longest_secs) for row in rows if row.jobs == name])
        for name in dict.fromkeys(row.jobs for row in rows)
    ]
    return plot("Wait until the start: 95th percentile (bar) and longest (line)", POLICIES, groups)


def main() -> None:
    """Each policy's day in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--hosts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the figures into docs/")
    options = parser.parse_args()
    jobs = day_of_jobs(options.jobs, seed=options.seed)
    rows: list[Row] = []
    for name in POLICIES:
        policy = first_in_first_out() if name == POLICIES[2] else policy_by_name(name)
        began = time.process_time()
        day = trio.run(simulate, jobs, hosts(options.hosts), policy)
        rows += rows_of(name, day.outcomes)
        took = round(time.process_time() - began, 1)
        print(json.dumps({"policy": name, "hours": round(day.clock.passed / 3600, 1), "cpu_secs": took}))
        for row in rows[-len(JobClass) - 1 :]:
            print(json.dumps(asdict(row)), flush=True)
    if options.write:
        page = DOCS / "scoring.md"
        page.write_text(with_block(page.read_text(), "a day", table(rows)))
        (DOCS / "scoring-day.svg").write_text(chart(rows))
        (DOCS / "scoring-day.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
