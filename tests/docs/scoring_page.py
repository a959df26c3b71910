"""The parts of docs/scoring.md that are made from code: `python -m tests.docs.scoring_page` writes them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from gradient_server.scoring import weights
from gradient_server.scoring.columns import JobColumns
from gradient_server.scoring.contexts import (
    HistoryPrediction,
    InstanceContext,
    Windowed,
    WorkerContext,
    WorkerMetricsView,
)
from gradient_server.scoring.policy import Scores, policy_by_name, resource_aware_table, simple_table

from bench.day import Row, chart, table
from tests.docs.blocks import with_block
from tests.fakes.scheduler import START, build

__all__ = ["DOCS", "PARTS", "example", "generated"]

DOCS: Final = Path(__file__).parents[2] / "docs"
NAMES: Final = ("compiler", "manual", "browser")


def example() -> Scores:
    """The worked example: three builds, one worker; the numbers that docs/scoring.md starts from."""
    jobs = [
        build("compiler", ready_at=START - 90.0),
        build("manual", build_request=True, ready_at=START - 30.0),
        build("browser", ready_at=START - 600.0),
    ]
    histories = [
        HistoryPrediction(
            peak_ram_mb=6000.0,
            uncontended_build_time_ms=600_000.0,
            cpu_core_score=2400.0,
            oom_rate=0.1,
            output_nar_size=1e9,
            samples=20,
        ),
        HistoryPrediction(
            peak_ram_mb=500.0, uncontended_build_time_ms=20_000.0, output_nar_size=1e6, samples=3
        ),
        HistoryPrediction(
            peak_ram_mb=12_000.0, uncontended_build_time_ms=1_800_000.0, output_nar_size=2e8, samples=9
        ),
    ]
    known = JobColumns.of(jobs, now=START, histories=histories)
    columns = JobColumns(
        known.matrix,
        now=START,
        missing_count=np.array([50.0, 0.0, 100.0]),
        missing_nar_size=np.array([2e9, 0.0, 1e9]),
    )
    worker = WorkerContext(
        architectures=frozenset({"x86_64-linux"}),
        fetch=True,
        metrics=WorkerMetricsView(
            cpu_count=16.0,
            cpu_core_score=3000.0,
            ram_total_mb=16_384.0,
            ram_free_mb=9216.0,
            cpu_usage_pct=40.0,
            upload_speed_mbps=400.0,
            download_speed_mbps=800.0,
            running_builds=5,
            assigned_builds=5,
            ram_reserved_mb=6144.0,
            ram_reserved_unused_mb=1024.0,
        ),
    )
    instance = InstanceContext(wait_secs=Windowed(w1h=30.0), cpu_core_score_mean=2400.0)
    return policy_by_name("resource-aware").score_detailed(columns, worker, instance)


def _rules() -> str:
    simple = {spec.rule.name for spec in simple_table() if spec.enabled}
    lines = ["| Rule | In `simple` | In `resource-aware` | What it does |", "|---|---|---|---|"]
    for spec in resource_aware_table():
        cells = ["yes" if on else "no" for on in (spec.rule.name in simple, spec.enabled)]
        lines.append(f"| `{spec.rule.name}` | {' | '.join(cells)} | {spec.rule.description} |")
    return "\n".join(lines) + "\n"


def _weights() -> str:
    lines = ["| Magnitude | Value |", "|---|--:|"]
    lines += [f"| `{name}` | {getattr(weights, name):g} |" for name in sorted(weights.__all__)]
    return "\n".join(lines) + "\n"


def _per_job(heading: str, rows: Mapping[str, Sequence[str]]) -> str:
    """A table with a column for each job of the example."""
    lines = [f"| {heading} | {' | '.join(NAMES)} |", "|---|" + "--:|" * len(NAMES)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def _estimates() -> str:
    estimate = example().estimate
    assert estimate is not None
    rows = {}
    for part in ("download", "paths", "run", "oom_retry", "upload", "total"):
        values = [estimate.detail(index)[f"{part}_secs"] for index in range(len(NAMES))]
        rows[part.replace("_", " ")] = [f"{value:.2f}" for value in values]
    return _per_job("Seconds", rows)


def _points() -> str:
    scores = example()
    points = [scores.points_of(index) for index in range(len(NAMES))]
    rows = {f"`{rule}`": [f"{one[rule] + 0.0:.2f}" for one in points] for rule in scores.rule_names}
    rows["sum"] = [f"{total:.2f}" for total in scores.total]
    held = [", ".join(f"`{name}`" for name in scores.vetoes_of(index)) for index in range(len(NAMES))]
    rows["held by"] = [names or "-" for names in held]
    return _per_job("Points", rows)


def _recorded_day() -> list[Row]:
    return [Row(**row) for row in json.loads((DOCS / "scoring-day.json").read_text())]


PARTS: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {
        "rules": _rules,
        "weights": _weights,
        "estimates": _estimates,
        "points": _points,
        "a day": lambda: table(_recorded_day()),
    }
)


def generated(page: str) -> str:
    """The page with every generated part as the code has it now."""
    for name, part in PARTS.items():
        page = with_block(page, name, part())
    return page


def main() -> None:
    """Writes the page and the picture of the recorded day."""
    page = DOCS / "scoring.md"
    page.write_text(generated(page.read_text()))
    (DOCS / "scoring-day.svg").write_text(chart(_recorded_day()))


if __name__ == "__main__":
    main()
