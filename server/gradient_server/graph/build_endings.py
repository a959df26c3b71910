"""How a build's assignment ends: with success, by a failure of some kind, or with its worker."""

from dataclasses import dataclass
from typing import Any

from gradient_protocol.kinds import FailureKind

from gradient_server.domain.plausible import plausible_peak_mb
from gradient_server.domain.status import AbortReason, AssignmentStatus
from gradient_server.graph import sql
from gradient_server.graph.assignments import Assignment, close_assignment, store_attempt
from gradient_server.graph.failures import Decision, JobHistory, Limits, Outcome, decide, decide_lost
from gradient_server.graph.heal import forget_paths, heal, missing_paths
from gradient_server.graph.metrics import store_lost_peak
from gradient_server.graph.progress import advance, fail_builds, finish
from gradient_server.graph.states import BuildEvent
from gradient_server.graph.transitions import move_builds
from gradient_server.graph.wishes import is_wanted
from gradient_server.graph.work import Work

__all__ = [
    "Build",
    "Failure",
    "build_failed",
    "build_lost",
    "build_succeeded",
    "complete_build",
    "find_build",
    "lacking_outputs",
    "limits",
    "note_peak",
    "spend",
]

_FIND = sql.statement(
    "SELECT b.id, b.derivation, d.name, b.attempts, b.inputs_unavailable_loops,"
    " b.substitute_misses, b.oom_retries,"
    " b.peak_ram_mb, b.ifd FROM derivation_build b JOIN derivation d ON d.id = b.derivation WHERE b.id = :id"
)
_OUTPUTS = sql.statement(
    "SELECT o.name, o.path, o.nar_hash, p.nar_hash, p.nar_size FROM derivation_output o"
    " LEFT JOIN cached_path p ON p.path = o.path WHERE o.derivation = :derivation ORDER BY o.position"
)
_SET_OUTPUT = sql.statement(
    "UPDATE derivation_output SET nar_hash = :nar_hash, nar_size = :nar_size"
    " WHERE derivation = :derivation AND name = :name"
)
_SPEND = sql.statement(
    "UPDATE derivation_build SET attempts = :attempts, inputs_unavailable_loops = :loops,"
    " substitute_misses = :misses, oom_retries = :oom_retries, error = :error,"
    " failure_kind = :kind WHERE id = :id"
)
_NOT_BEFORE = sql.statement("UPDATE derivation_build SET not_before = :not_before WHERE id = :id")
_PEAK = sql.statement(
    "UPDATE derivation_build SET peak_ram_mb = :peak WHERE id = :id"
    " AND (peak_ram_mb IS NULL OR peak_ram_mb < :peak)"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """What is said about a failed try: to be stored, shown, and healed by."""

    kind: str
    error: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Build:
    """A shared build that a worker has, and what it has used so far."""

    id: str
    derivation: int
    name: str
    history: JobHistory
    ifd: bool


def find_build(work: Work, build: str) -> Build:
    """The build's row. LookupError if there is none."""
    rows: list[tuple[Any, ...]] = sql.run(work.connection, _FIND, {"id": build})
    if not rows:
        raise LookupError(f"no build {build}")
    row = rows[0]
    return Build(row[0], row[1], row[2], JobHistory(row[3], row[4], row[5], row[6], row[7]), bool(row[8]))


def limits(work: Work) -> Limits:
    """The configured bounds as the pure decisions take them."""
    settings = work.settings
    return Limits(
        max_attempts=settings.max_attempts,
        retry_backoff_secs=settings.retry_backoff_secs,
        inputs_unavailable_max_loops=settings.inputs_unavailable_max_loops,
        substitute_miss_escalation_threshold=settings.substitute_miss_escalation_threshold,
        largest_worker_ram_mb=settings.largest_worker_ram_mb(),
    )


def lacking_outputs(work: Work, build: Build) -> list[str]:
    """Outputs of a finished build that the server does not hold.

    Those it holds are recorded as they are held: another worker may have been first, and what consumers
    get is what is held.
    """
    lacking = []
    rows = sql.run(work.connection, _OUTPUTS, {"derivation": build.derivation})
    for name, path, reported_hash, nar_hash, nar_size in rows:
        if nar_hash is None:
            lacking.append(path)
        elif nar_hash != reported_hash:
            held = {"derivation": build.derivation, "name": name, "nar_hash": nar_hash, "nar_size": nar_size}
            sql.run(work.connection, _SET_OUTPUT, held)
    return lacking


def build_succeeded(
    work: Work, assignment: Assignment, build: Build, *, seq: int, spans_dropped: int
) -> None:
    """The build is Completed; what depends on it moves on. Its outputs are held (`lacking_outputs`)."""
    store_attempt(work, assignment, "Completed", None)
    close_assignment(work, assignment, AssignmentStatus.COMPLETED, seq=seq, spans_dropped=spans_dropped)
    complete_build(work, build, assignment.worker_name)


def complete_build(work: Work, build: Build, worker: str | None) -> None:
    """An assigned build is Completed, its assignment closed; what depends on it moves on."""
    move_builds(work, [build.id], BuildEvent.SUCCEEDED)
    finish(
        work,
        [build.id],
        [build.derivation],
        worker=worker,
        imported=build.ifd,
        names={build.id: build.name},
    )


def build_failed(
    work: Work,
    assignment: Assignment,
    build: Build,
    kind: FailureKind,
    error: str,
    *,
    seq: int | None = None,
    spans_dropped: int = 0,
    reported_missing: tuple[str, ...] = (),
    peak_ram_mb: int | None = None,
) -> None:
    """A failure of any kind: the row of the table of failure kinds that it names."""
    history = build.history
    peak_ram_mb = plausible_peak_mb(peak_ram_mb)
    if kind is FailureKind.OUT_OF_MEMORY and peak_ram_mb is not None:
        note_peak(work, build, peak_ram_mb)
        peak = peak_ram_mb if history.peak_ram_mb is None else max(history.peak_ram_mb, peak_ram_mb)
        history = JobHistory(
            history.attempts,
            history.inputs_unavailable_loops,
            history.substitute_misses,
            history.oom_retries,
            peak,
        )
    decision = decide(kind, assignment.abort_reason, history, limits(work))
    store_attempt(work, assignment, kind.value, error)
    close_assignment(work, assignment, AssignmentStatus.FAILED, seq=seq, spans_dropped=spans_dropped)
    _follow(work, assignment, build, decision, Failure(kind.value, error, reported_missing))


def note_peak(work: Work, build: Build, peak_ram_mb: int) -> None:
    """Records the memory (MiB) at which a try was killed or lost, if it is the largest so far."""
    sql.run(work.connection, _PEAK, {"id": build.id, "peak": peak_ram_mb})


def build_lost(
    work: Work, assignment: Assignment, build: Build, error: str, peak_ram_mb: int | None = None
) -> None:
    """The worker no longer has it, or is gone, or did not confirm its abort.

    The memory it was last seen with raises its prediction, and counts in the history of its name.
    """
    peak_ram_mb = plausible_peak_mb(peak_ram_mb)
    if peak_ram_mb is not None:
        note_peak(work, build, peak_ram_mb)
        store_lost_peak(work, assignment, peak_ram_mb)
    accepted = assignment.accepted_at is not None
    decision = decide_lost(accepted, assignment.abort_reason, build.history, limits(work))
    store_attempt(work, assignment, "Lost", error)
    close_assignment(work, assignment, AssignmentStatus.ABANDONED)
    _follow(work, assignment, build, decision, Failure(FailureKind.TRANSIENT.value, error))


def _follow(work: Work, assignment: Assignment, build: Build, decision: Decision, failure: Failure) -> None:
    outcome = decision.outcome
    wanted = is_wanted(work, build.id)
    if outcome is Outcome.ABORT and assignment.abort_reason is AbortReason.EVALUATION and wanted:
        # Another evaluation has joined since: its wish counts, and the abort uses no attempt.
        outcome = Outcome.REQUEUE
    elif outcome in (Outcome.REQUEUE, Outcome.HEAL) and not wanted:
        outcome = Outcome.ABORT
    spend(work, build, decision, failure)
    if outcome is Outcome.FAIL:
        _end(work, assignment, build, BuildEvent.FAILED, failure)
    elif outcome is Outcome.ABORT:
        _end(work, assignment, build, BuildEvent.ABORTED, failure)
    elif outcome is Outcome.HEAL:
        _heal(work, assignment, build, failure)
    else:
        _requeue(work, build, decision.backoff_secs)


def _end(work: Work, assignment: Assignment, build: Build, event: BuildEvent, failure: Failure) -> None:
    worker = assignment.worker_name
    fail_builds(work, [build.id], event, error=failure.error, kind=failure.kind, worker=worker)


def _heal(work: Work, assignment: Assignment, build: Build, failure: Failure) -> None:
    made, sources = missing_paths(work, [build.derivation], failure.missing)
    if sources:
        # Nothing in the graph makes a source: only who submitted it can bring it back.
        forget_paths(work, sources)
        lost = f"the source {sources[0]} is lost: submit it again ({failure.error})"
        _end(work, assignment, build, BuildEvent.FAILED, Failure(failure.kind, lost))
        return
    move_builds(work, [build.id], BuildEvent.WAITS_AGAIN)
    if made:
        heal(work, [build.derivation], made)
    else:
        # It missed nothing that it needs: tried again, but not at once.
        _set_not_before(work, build, work.settings.retry_backoff_secs)
    advance(work, [build.id])


def _requeue(work: Work, build: Build, backoff_secs: float | None) -> None:
    move_builds(work, [build.id], BuildEvent.WAITS_AGAIN)
    if backoff_secs is not None:
        _set_not_before(work, build, backoff_secs)
    advance(work, [build.id])


def _set_not_before(work: Work, build: Build, backoff_secs: float) -> None:
    sql.run(work.connection, _NOT_BEFORE, {"id": build.id, "not_before": work.now + backoff_secs})


def spend(work: Work, build: Build, decision: Decision, failure: Failure) -> None:
    """Stores what the build has used up, and the last failure."""
    parameters = {
        "id": build.id,
        "attempts": decision.attempts,
        "loops": decision.inputs_unavailable_loops,
        "misses": decision.substitute_misses,
        "oom_retries": decision.oom_retries,
        "error": failure.error,
        "kind": failure.kind,
    }
    sql.run(work.connection, _SPEND, parameters)
