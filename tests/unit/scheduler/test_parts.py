"""The parts that the scheduler is made of, each on its own."""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from gradient_protocol.kinds import EvalStep, JobKind
from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.eligibility import RefusalCode, Requirement, Requirements, refusal
from gradient_server.scheduler.ram import NeedKind, RamNeed, Reserved, reserved_by
from gradient_server.scheduler.selection import best, in_order
from gradient_server.scheduler.tracker import JobTracker
from gradient_server.scheduler.worker import Worker
from gradient_server.scoring.columns import Field, JobColumns
from gradient_server.scoring.contexts import HistoryPrediction, InstanceContext
from gradient_server.scoring.ram_need import needed_to_start_mb
from hypothesis import given, settings

from tests.fakes.scheduler import START, RecordingOutbox, build, evaluation, metrics, worker

FETCH_ONLY = (EvalStep.FETCH,)


@pytest.mark.parametrize(
    ("job", "info", "code"),
    [
        (build("x"), worker("a"), None),
        (build("x", system="builtin"), worker("a"), None),
        (build("x", system="x86_64-linux"), worker("a"), None),
        (build("x", system="riscv64-linux"), worker("a"), RefusalCode.SYSTEM),
        (build("x", features=frozenset({"kvm"})), worker("a"), RefusalCode.FEATURES),
        (build("x", features=frozenset({"kvm"})), worker("a", system_features=["kvm", "tpm"]), None),
        (build("x"), worker("a", builds=False), RefusalCode.CAPABILITY),
        (build("x"), worker("a", max_concurrent_builds=0), RefusalCode.NO_SLOTS),
        (build("x"), worker("a", projects=frozenset({"q"})), RefusalCode.PROJECT),
        (build("x", projects=("p", "q")), worker("a", projects=frozenset({"q"})), None),
        (evaluation("e"), worker("a", fetch=False), RefusalCode.CAPABILITY),
        (evaluation("e", steps=(EvalStep.EVALUATE,)), worker("a", fetch=False), None),
        (evaluation("e", steps=(EvalStep.EVALUATE,)), worker("a", evaluates=False), RefusalCode.CAPABILITY),
        (evaluation("e", steps=FETCH_ONLY), worker("a", evaluates=False), None),
        (evaluation("e"), worker("a", max_concurrent_evaluations=0), RefusalCode.NO_SLOTS),
        (evaluation("e", system="riscv64-linux"), worker("a"), None),
    ],
)
def test_a_hard_no_has_its_reason(job: object, info: object, code: RefusalCode | None) -> None:
    answer = refusal(Requirement.of(job), info)
    assert (None if answer is None else answer.code) is code


def test_requirements_are_shared_and_the_unused_are_forgotten_in_time() -> None:
    requirements = Requirements()
    first = requirements.acquire(Requirement.of(build("x")))
    assert requirements.acquire(Requirement.of(build("y"))) == first
    for number in range(2_000):
        requirements.release(requirements.acquire(Requirement.of(build("z", projects=(str(number),)))))
    assert len(requirements) <= 300
    assert requirements.get(first) == Requirement.of(build("x"))


JOB_NAMES = st.sampled_from([f"{number}" for number in range(12)])
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), JOB_NAMES, st.sampled_from([None, START - 1, START + 5, START + 9])),
        st.tuples(st.just("remove"), JOB_NAMES, st.none()),
        st.tuples(st.just("bump"), st.just(""), st.none()),
        st.tuples(st.just("due"), st.just(""), st.sampled_from([START, START + 6, START + 20])),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(CHANGES)
def test_the_columns_follow_a_plain_dictionary(changes: list[tuple[str, str, float | None]]) -> None:
    tracker = JobTracker()
    candidates: dict[str, tuple[float, int]] = {}
    held: dict[str, float] = {}
    for what, name, when in changes:
        job_id = f"build:{name}"
        if what == "add" and job_id not in candidates and job_id not in held:
            tracked = tracker.add(build(name, not_before=when, queued_at=float(name), closure_size=7), START)
            if when is not None and when > START:
                held[job_id] = when
                assert tracked is None
            else:
                candidates[job_id] = (float(name), 0)
        elif what == "remove":
            assert (tracker.remove(job_id) is not None) == (job_id in candidates)
            candidates.pop(job_id, None)
            held.pop(job_id, None)
        elif what == "bump":
            tracker.tables[JobKind.BUILD].bump_rescore()
            candidates = {one: (queued_at, count + 1) for one, (queued_at, count) in candidates.items()}
        elif what == "due" and when is not None:
            taken = {job.job_id for job in tracker.take_due(when)}
            assert taken == {one for one, at in held.items() if at <= when}
            held = {one: at for one, at in held.items() if at > when}
    table = tracker.tables[JobKind.BUILD]
    rows = {
        one.job.job_id: (table.matrix[Field.QUEUED_AT, one.row], table.matrix[Field.RESCORE_COUNT, one.row])
        for one in table
    }
    assert rows == candidates
    assert tracker.next_due() == min(held.values(), default=None)
    assert len(tracker) == len(candidates) + len(held)


def test_a_pending_job_takes_little_memory() -> None:
    tracker = JobTracker()
    table = tracker.tables[JobKind.BUILD]
    for number in range(1_000):
        tracker.add(build(str(number)), START)
    assert table.matrix.base is not None
    assert table.matrix.base.nbytes / 1_000 < 512


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 5.0, 9.5]), st.booleans()), min_size=1, max_size=9),
    st.integers(1, 9),
)
def test_the_best_that_passes_wins_and_the_smaller_id_breaks_ties(
    candidates: list[tuple[float, bool]], limit: int
) -> None:
    total = np.array([points for points, _ in candidates])
    wins = np.array([passes and points >= 0 for points, passes in candidates])
    # Ids in another order than places.
    job_ids = [f"build:{(7 * place) % 10}" for place in range(len(candidates))]
    ranked = sorted(range(len(candidates)), key=lambda place: (-total[place], job_ids[place]))
    assert best(total, wins, job_ids) == next((place for place in ranked if wins[place]), None)
    assert in_order(total, job_ids, np.arange(len(candidates)), limit) == ranked[:limit]


PEAKS = st.one_of(st.none(), st.integers(0, 9_000))
NEEDS = st.fixed_dictionaries(
    {
        "peak_ram_mb": PEAKS,
        "is_fixed_output": st.booleans(),
        "substitute_outputs": st.one_of(st.none(), st.just(1)),
    }
)


@given(st.sampled_from([build, evaluation]), NEEDS, PEAKS, st.booleans())
def test_the_need_of_one_job_is_that_of_its_column(
    make: Callable[..., PendingJob], fields: dict[str, object], past: int | None, present: bool
) -> None:
    history = HistoryPrediction(peak_ram_mb=np.nan if past is None else float(past))
    job = make("x", **fields)
    columns = JobColumns.of([job], now=START, histories=[history])
    columns.outputs_present = np.array([present])
    unmeasured_mb = InstanceContext().unmeasured_build_ram_mb
    need = RamNeed.of(job, history, outputs_present=present, unmeasured_mb=unmeasured_mb)
    column = np.broadcast_to(needed_to_start_mb(columns, InstanceContext()), 1)
    assert need.needed_to_start_mb == column[0]


def test_needs_are_predicted_unmeasured_or_negligible() -> None:
    nothing = HistoryPrediction()
    told = {"outputs_present": False, "unmeasured_mb": 700.0}
    assert RamNeed.of(build("x"), nothing, **told) == RamNeed(NeedKind.UNMEASURED, 700.0, 700.0)
    after_kill = RamNeed.of(build("x", peak_ram_mb=1001), HistoryPrediction(peak_ram_mb=900.0), **told)
    assert after_kill == RamNeed(NeedKind.PREDICTED, 1001.0, 1102.0)
    assert RamNeed.of(evaluation("e"), nothing, **told).kind is NeedKind.NEGLIGIBLE


def test_each_job_counts_the_larger_of_reserved_and_observed() -> None:
    jobs = [(1000.0, 400.0), (500.0, 800.0), (200.0, None)]
    assert reserved_by(jobs, measured=True) == Reserved(2000.0, 800.0, 1200.0)
    assert reserved_by(jobs, measured=False) == Reserved(2000.0, 0.0, 1200.0)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0, None])
def test_live_figures_that_are_none_are_unknown(odd: float | None) -> None:
    state = Worker(worker("a"), RecordingOutbox())
    state.heartbeat(
        metrics(
            lateness_secs=-1.0 if odd is None else odd,
            cpu_usage_pct=odd,
            upload_speed_mbps=odd,
            download_speed_mbps=0.0,
        )
    )
    view = state.context.metrics
    assert np.isnan([view.cpu_usage_pct, view.upload_speed_mbps, view.download_speed_mbps]).all()
    assert np.isnan(state.lateness_secs)


def test_free_memory_is_capped_by_the_total() -> None:
    state = Worker(worker("a"), RecordingOutbox())
    state.heartbeat(metrics(ram_free_mb=10**6, cpu_usage_pct=400.0))
    assert (state.context.metrics.ram_free_mb, state.context.metrics.cpu_usage_pct) == (8000.0, 100.0)
