"""The exact edges of the rules, which random columns hit too rarely to tell one side from the other."""

import numpy as np
import pytest
from gradient_protocol.kinds import EvalStep
from gradient_server.domain.job import PendingJob
from gradient_server.scoring.columns import Field, JobColumns
from gradient_server.scoring.contexts import (
    HistoryPrediction,
    InstanceContext,
    Windowed,
    WorkerContext,
    WorkerMetricsView,
)
from gradient_server.scoring.policy import RulePolicy, Scores
from gradient_server.scoring.rule import ScoreRule
from gradient_server.scoring.rules import (
    EstimatedTimeRule,
    RescoreWaitRule,
    ResourceSaturationRule,
    TransferLimitRule,
    WaitTimeRule,
)

from tests.fakes.scheduler import START, build, evaluation

MIB = 1024 * 1024


def columns_of(job: PendingJob, *, peak_mb: float = np.nan, missing_bytes: float = 0.0) -> JobColumns:
    """One candidate that its worker has scored."""
    known = JobColumns.of([job], now=START, histories=[HistoryPrediction(peak_ram_mb=peak_mb, samples=1)])
    return JobColumns(
        known.matrix,
        now=START,
        missing_count=np.array([0.0]),
        missing_nar_size=np.array([missing_bytes]),
    )


def saturation(columns: JobColumns, instance: InstanceContext | None = None, **figures: float) -> Scores:
    metrics = WorkerMetricsView(**{"ram_total_mb": 8000.0, **figures})  # type: ignore[arg-type]  # all floats
    policy = RulePolicy("memory", [ResourceSaturationRule()], uses_history=True)
    return policy.score_detailed(columns, WorkerContext(metrics=metrics), instance or InstanceContext())


@pytest.mark.parametrize(("size", "points"), [(MIB, 0.0), (MIB + 1, -3600.0)])
def test_an_upload_of_more_than_a_mebibyte_needs_a_slot(size: int, points: float) -> None:
    full = InstanceContext(upload_slots=2, uploads_in_flight=2)
    columns = columns_of(build("x", output_size=size))
    scored = RulePolicy("slots", [TransferLimitRule()], uses_history=False)
    assert scored.score(columns, WorkerContext(), full).tolist() == [points]


@pytest.mark.parametrize(("size", "points"), [(3 * MIB, 0.0), (3 * MIB + 1, -3600.0)])
def test_a_download_above_the_mean_in_mebibytes_needs_a_slot(size: int, points: float) -> None:
    full = InstanceContext(download_slots=1, downloads_in_flight=1, nar_size_mb=Windowed(w1h=3.0))
    columns = columns_of(build("x"), missing_bytes=size)
    scored = RulePolicy("slots", [TransferLimitRule()], uses_history=False)
    assert scored.score(columns, WorkerContext(), full).tolist() == [points]


@pytest.mark.parametrize(("available", "held"), [(111.0, False), (110.9, True)])
def test_what_is_needed_to_start_is_a_tenth_more_than_the_peak_rounded_up(
    available: float, held: bool
) -> None:
    # 100.5 * 1.1 is 110.55.
    scores = saturation(columns_of(build("x"), peak_mb=100.5), ram_reserved_mb=8000.0 - available)
    assert (scores.vetoes_of(0) == ("ResourceSaturationRule",)) == held
    assert scores.points_of(0)["ResourceSaturationRule"] == (-8600.0 if held else 0.0)


@pytest.mark.parametrize(
    ("peaks", "need"),
    [
        (Windowed(w1h=300.0, w24h=500.0), 500.0),
        (Windowed(w1h=300.0), 300.0),
        (Windowed(w5m=100.0), 1024.0),
    ],
)
def test_an_unmeasured_build_needs_the_mean_of_the_day_else_of_the_hour(peaks: Windowed, need: float) -> None:
    instance = InstanceContext(peak_ram_mb=peaks)
    for more, held in ((0.0, False), (0.5, True)):
        scores = saturation(columns_of(build("x")), instance, ram_reserved_mb=8000.0 - need + more)
        assert bool(scores.vetoes_of(0)) == held


@pytest.mark.parametrize(("total", "waits"), [(4000.0, True), (3999.0, False)])
def test_only_the_largest_worker_waits_for_what_is_larger_than_all(total: float, waits: bool) -> None:
    columns = columns_of(build("x"), peak_mb=9000.0)
    columns.matrix[Field.POOL_RAM_TOTAL_MB] = 4000.0
    scores = saturation(columns, ram_total_mb=total, ram_reserved_mb=100.0)
    assert (scores.waits is not None) == waits
    assert scores.vetoes_of(0) == ()


@pytest.mark.parametrize(
    ("system", "hot", "points"),
    [("any", 79.9, 0.0), ("any", 80.0, -8600.0), ("builtin", 80.0, 0.0), ("builtin", 90.0, -8600.0)],
)
def test_builtin_jobs_bear_a_hotter_processor(system: str, hot: float, points: float) -> None:
    columns = columns_of(build("x", system=system), peak_mb=1.0)
    scores = saturation(columns, cpu_usage_pct=hot, assigned_builds=1)
    assert scores.points_of(0)["ResourceSaturationRule"] == points


def test_only_an_evaluation_without_its_fetch_step_is_cached() -> None:
    jobs = [build("x"), evaluation("whole"), evaluation("cached", steps=(EvalStep.EVALUATE,))]
    assert JobColumns.of(jobs, now=START).field(Field.CACHED_EVAL).tolist() == [0.0, 0.0, 1.0]


def test_a_total_of_nothing_is_not_below_the_floor() -> None:
    policy = RulePolicy("waits", [WaitTimeRule()], uses_history=False)
    scores = policy.score_detailed(columns_of(build("x", ready_at=START)), WorkerContext(), InstanceContext())
    assert (scores.total.tolist(), scores.wins.tolist()) == ([0.0], [True])


def test_the_fallbacks_of_an_estimate_are_those_that_were_used() -> None:
    jobs = [build("known"), build("unscored"), build("present")]
    histories = [HistoryPrediction(uncontended_build_time_ms=5.0, samples=1), None, None]
    known = JobColumns.of(jobs, now=START, histories=histories)
    columns = JobColumns(
        known.matrix,
        now=START,
        missing_nar_size=np.array([0.0, np.nan, np.nan]),
        outputs_present=np.array([False, False, True]),
    )
    metrics = WorkerMetricsView(download_speed_mbps=8.0)
    policy = RulePolicy("time", [EstimatedTimeRule()], uses_history=True)
    scores = policy.score_detailed(columns, WorkerContext(metrics=metrics), InstanceContext())
    assert scores.estimate is not None
    used = [scores.estimate.detail(place)["fallbacks"] for place in range(3)]
    assert used == [["upload_speed"], ["upload_speed", "missing", "history"], ["upload_speed"]]


class Constant(ScoreRule):
    """So many points for every candidate."""

    def __init__(self, points: float) -> None:
        self.name = f"Constant{points:g}"
        self.points = points

    def score(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> float:
        return self.points


def test_what_is_the_same_for_all_counts_too() -> None:
    policy = RulePolicy("same", [Constant(5.0), WaitTimeRule(), Constant(-2.0)], uses_history=False)
    columns = JobColumns.of([build("x", ready_at=START - 60), build("y", ready_at=START)], now=START)
    assert policy.score(columns, WorkerContext(), InstanceContext()).tolist() == [63.0, 3.0]


def test_a_hold_of_one_rule_does_not_lift_that_of_another() -> None:
    known = JobColumns.of(
        [build("unscored"), build("large")],
        now=START,
        histories=[HistoryPrediction(peak_ram_mb=peak, samples=1) for peak in (10.0, 5000.0)],
    )
    columns = JobColumns(known.matrix, now=START, missing_nar_size=np.array([np.nan, 0.0]))
    metrics = WorkerMetricsView(ram_total_mb=8000.0, ram_reserved_mb=7000.0)
    rules = [RescoreWaitRule(), ResourceSaturationRule(), Constant(1e6)]
    scores = RulePolicy("holds", rules, uses_history=True).score_detailed(
        columns, WorkerContext(metrics=metrics), InstanceContext()
    )
    assert scores.wins.tolist() == [False, False]
    assert [scores.vetoes_of(place) for place in (0, 1)] == [
        ("RescoreWaitRule",),
        ("ResourceSaturationRule",),
    ]
