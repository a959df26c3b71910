"""The table of failure kinds, row by row, and its bounds."""

import pytest
from gradient_protocol.kinds import FailureKind
from gradient_server.domain.status import AbortReason
from gradient_server.graph.failures import (
    Decision,
    JobHistory,
    Limits,
    Outcome,
    decide,
    decide_lost,
)
from hypothesis import given
from hypothesis import strategies as st

LIMITS = Limits(
    max_attempts=3,
    retry_backoff_secs=30.0,
    inputs_unavailable_max_loops=3,
    substitute_miss_escalation_threshold=2,
    largest_worker_ram_mb=1_000,
)
FRESH = JobHistory(attempts=0)


def test_transient_doubles_its_pause_until_the_last_attempt() -> None:
    decided = [decide(FailureKind.TRANSIENT, None, JobHistory(used), LIMITS) for used in range(3)]
    assert [(each.outcome, each.attempts, each.backoff_secs) for each in decided] == [
        (Outcome.REQUEUE, 1, 30.0),
        (Outcome.REQUEUE, 2, 60.0),
        (Outcome.FAIL, 3, None),
    ]


@pytest.mark.parametrize("kind", [FailureKind.PERMANENT, FailureKind.TIMEOUT])
@pytest.mark.parametrize("reason", [None, *AbortReason])
def test_what_is_final_is_final_whatever_was_asked_for(kind: FailureKind, reason: AbortReason | None) -> None:
    assert decide(kind, reason, FRESH, LIMITS).outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("peak", "largest", "retries", "outcome"),
    [
        (500, 1_000, 0, Outcome.REQUEUE),
        (500, 1_000, 1, Outcome.FAIL),
        (1_000, 1_000, 0, Outcome.FAIL),
        (None, 1_000, 0, Outcome.FAIL),
        (500, None, 0, Outcome.FAIL),
    ],
)
def test_out_of_memory(peak: int | None, largest: int | None, retries: int, outcome: Outcome) -> None:
    limits = Limits(3, 30.0, 3, 2, largest)
    history = JobHistory(0, oom_retries=retries, peak_ram_mb=peak)
    decision = decide(FailureKind.OUT_OF_MEMORY, None, history, limits)
    assert (decision.outcome, decision.attempts, decision.backoff_secs) == (outcome, 1, None)


@pytest.mark.parametrize(
    ("reason", "decision"),
    [
        (None, Decision(Outcome.REQUEUE, attempts=1, backoff_secs=30.0)),
        (AbortReason.USER, Decision(Outcome.ABORT, attempts=0)),
        (AbortReason.EVALUATION, Decision(Outcome.ABORT, attempts=0)),
        (AbortReason.REVOKED, Decision(Outcome.REQUEUE, attempts=0)),
        (AbortReason.DRAINED, Decision(Outcome.REQUEUE, attempts=0)),
        (AbortReason.UNANSWERED, Decision(Outcome.REQUEUE, attempts=0)),
    ],
)
def test_an_aborts_stored_reason_decides(reason: AbortReason | None, decision: Decision) -> None:
    assert decide(FailureKind.ABORTED, reason, FRESH, LIMITS) == decision


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.TRANSIENT,
        FailureKind.CANCELED,
        FailureKind.INPUTS_UNAVAILABLE,
        FailureKind.SUBSTITUTE_UNAVAILABLE,
    ],
)
def test_nothing_is_tried_again_that_somebody_asked_to_end(kind: FailureKind) -> None:
    for reason in (AbortReason.USER, AbortReason.EVALUATION):
        assert decide(kind, reason, FRESH, LIMITS).outcome is Outcome.ABORT


@pytest.mark.parametrize(
    ("accepted", "reason", "outcome", "attempts"),
    [
        (True, None, Outcome.REQUEUE, 1),
        (False, None, Outcome.REQUEUE, 0),
        (True, AbortReason.USER, Outcome.ABORT, 0),
        (True, AbortReason.DRAINED, Outcome.REQUEUE, 0),
    ],
)
def test_a_loss(accepted: bool, reason: AbortReason | None, outcome: Outcome, attempts: int) -> None:
    decision = decide_lost(accepted, reason, FRESH, LIMITS)
    assert (decision.outcome, decision.attempts) == (outcome, attempts)


FREE = {FailureKind.CANCELED, FailureKind.ABORTED}


@given(
    st.lists(st.sampled_from([kind for kind in FailureKind if kind not in FREE]), min_size=12, max_size=12)
)
def test_no_series_of_failures_goes_on_for_ever(kinds: list[FailureKind]) -> None:
    # 2 transient retries + 3 loops + 2 misses + 1 out-of-memory kill = 8 tries that come back.
    history = JobHistory(attempts=0, peak_ram_mb=500)
    for tries, kind in enumerate(kinds, start=1):
        decision = decide(kind, None, history, LIMITS)
        if decision.outcome is Outcome.FAIL:
            assert tries <= 9
            return
        history = JobHistory(
            decision.attempts,
            decision.inputs_unavailable_loops,
            decision.substitute_misses,
            decision.oom_retries,
            500,
        )
    pytest.fail("it was tried twelve times")
