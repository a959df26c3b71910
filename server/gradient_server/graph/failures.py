"""What follows a failed job (protocol.md, Failure kinds). Pure.

The report's kind, the stored reason of an abort and what the job has used up so far decide between
four outcomes: the job ends for good, it is aborted, it goes back to the queue, or a missing input is
made again first. Every way back is bounded by something: attempts, loops of healing, misses of
substitutes (beyond the threshold a miss counts as a transient failure), one retry after an
out-of-memory kill, and for the free ones an operator's or the server's own act each time.
"""

import dataclasses
import enum
from dataclasses import dataclass

from gradient_protocol.kinds import FailureKind

from gradient_server.domain.status import AbortReason

__all__ = ["Decision", "JobHistory", "Limits", "Outcome", "decide", "decide_abort", "decide_lost"]


class Outcome(enum.Enum):
    """What becomes of the job."""

    FAIL = enum.auto()
    ABORT = enum.auto()
    REQUEUE = enum.auto()
    HEAL = enum.auto()


@dataclass(frozen=True, slots=True)
class JobHistory:
    """What the job has used so far. `peak_ram_mb`: the largest peak that was ever recorded of it."""

    attempts: int
    inputs_unavailable_loops: int = 0
    substitute_misses: int = 0
    oom_retries: int = 0
    peak_ram_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome and the counters after it. `backoff_secs` before the next try, None at once."""

    outcome: Outcome
    attempts: int
    backoff_secs: float | None = None
    inputs_unavailable_loops: int = 0
    substitute_misses: int = 0
    oom_retries: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The configured bounds, and the largest memory (MiB) of a known worker, None where unknown."""

    max_attempts: int
    retry_backoff_secs: float
    inputs_unavailable_max_loops: int
    substitute_miss_escalation_threshold: int
    largest_worker_ram_mb: int | None


def decide(
    kind: FailureKind, abort_reason: AbortReason | None, history: JobHistory, limits: Limits
) -> Decision:
    """The row of the table that `kind` names."""
    if kind is FailureKind.ABORTED:
        if abort_reason is None:
            return _transient(history, limits)
        return decide_abort(abort_reason, history)
    if kind in (FailureKind.PERMANENT, FailureKind.TIMEOUT):
        return _with(history, Outcome.FAIL, attempts=history.attempts + 1)
    if kind is FailureKind.OUT_OF_MEMORY:
        return _out_of_memory(history, limits)
    if abort_reason in (AbortReason.USER, AbortReason.EVALUATION):
        # What would be tried again is not, once somebody has asked for its end.
        return _with(history, Outcome.ABORT)
    if kind is FailureKind.CANCELED:
        return _with(history, Outcome.REQUEUE)
    if kind is FailureKind.INPUTS_UNAVAILABLE:
        return _inputs_unavailable(history, limits)
    if kind is FailureKind.SUBSTITUTE_UNAVAILABLE:
        return _substitute_unavailable(history, limits)
    return _transient(history, limits)


def decide_abort(reason: AbortReason, history: JobHistory) -> Decision:
    """An abort that the server asked for: its stored reason decides (protocol.md, Lost connections)."""
    if reason in (AbortReason.USER, AbortReason.EVALUATION):
        return _with(history, Outcome.ABORT)
    return _with(history, Outcome.REQUEUE)


def decide_lost(
    accepted: bool, abort_reason: AbortReason | None, history: JobHistory, limits: Limits
) -> Decision:
    """A job whose worker is gone, or no longer has it.

    Without using an attempt if its acceptance was never committed, else as Transient.
    """
    if abort_reason is not None:
        return decide_abort(abort_reason, history)
    return _transient(history, limits) if accepted else _with(history, Outcome.REQUEUE)


def _transient(history: JobHistory, limits: Limits) -> Decision:
    attempts = history.attempts + 1
    if attempts >= limits.max_attempts:
        return _with(history, Outcome.FAIL, attempts=attempts)
    backoff_secs = limits.retry_backoff_secs * 2.0 ** (attempts - 1)
    return _with(history, Outcome.REQUEUE, attempts=attempts, backoff_secs=backoff_secs)


def _out_of_memory(history: JobHistory, limits: Limits) -> Decision:
    attempts = history.attempts + 1
    peak, largest = history.peak_ram_mb, limits.largest_worker_ram_mb
    roomier = peak is not None and largest is not None and largest > peak
    if history.oom_retries == 0 and roomier:
        return _with(history, Outcome.REQUEUE, attempts=attempts, oom_retries=1)
    return _with(history, Outcome.FAIL, attempts=attempts)


def _inputs_unavailable(history: JobHistory, limits: Limits) -> Decision:
    if history.inputs_unavailable_loops >= limits.inputs_unavailable_max_loops:
        return _with(history, Outcome.FAIL)
    return _with(history, Outcome.HEAL, inputs_unavailable_loops=history.inputs_unavailable_loops + 1)


def _substitute_unavailable(history: JobHistory, limits: Limits) -> Decision:
    misses = history.substitute_misses + 1
    if misses <= limits.substitute_miss_escalation_threshold:
        return _with(history, Outcome.REQUEUE, substitute_misses=misses)
    transient = _transient(history, limits)
    return _with(
        history,
        transient.outcome,
        attempts=transient.attempts,
        backoff_secs=transient.backoff_secs,
        substitute_misses=misses,
    )


def _with(history: JobHistory, outcome: Outcome, **spent: int | float | None) -> Decision:
    """`outcome` with the counters of `history`, save those of `spent`."""
    unchanged = Decision(
        outcome=outcome,
        attempts=history.attempts,
        inputs_unavailable_loops=history.inputs_unavailable_loops,
        substitute_misses=history.substitute_misses,
        oom_retries=history.oom_retries,
    )
    return dataclasses.replace(unchanged, **spent)  # type: ignore[arg-type]  # names and types are checked in tests
