"""How an evaluation's assignment ends: fetched, walked, failed or lost.

A walk that reported errors fails its evaluation; so does a failure that is final. What the evaluation
still waits for is then taken back.
"""

from dataclasses import dataclass
from typing import Any

from gradient_protocol.kinds import FailureKind

from gradient_server.domain.events import EvaluationChanged
from gradient_server.domain.status import AssignmentStatus, EvaluationStatus
from gradient_server.graph import sql
from gradient_server.graph.assignments import Assignment, close_assignment
from gradient_server.graph.build_endings import limits
from gradient_server.graph.evaluations import announce_evaluation, end_evaluation, settle_evaluations
from gradient_server.graph.failures import Decision, JobHistory, Outcome, decide, decide_lost
from gradient_server.graph.heal import forget_paths, heal, missing_paths
from gradient_server.graph.progress import advance, fail_builds
from gradient_server.graph.states import BuildEvent, EvaluationEvent
from gradient_server.graph.transitions import move_evaluation
from gradient_server.graph.wishes import drop_wishes
from gradient_server.graph.work import Work

__all__ = [
    "Evaluation",
    "evaluation_again",
    "evaluation_ended",
    "evaluation_failed",
    "evaluation_fetched",
    "evaluation_lost",
    "evaluation_walked",
    "find_evaluation",
    "source_is_held",
]

_FIND = sql.statement(
    "SELECT id, status, attempts, source, source_path, finished_at IS NOT NULL FROM evaluation WHERE id = :id"
)
_FIRST_ERROR = sql.statement(
    "SELECT source, message FROM evaluation_note WHERE evaluation = :id AND level = 'error'"
    " ORDER BY id LIMIT 1"
)
_FORGET_NOTES = sql.statement("DELETE FROM evaluation_note WHERE evaluation = :id")
_SPEND = sql.statement("UPDATE evaluation SET attempts = :attempts, not_before = :not_before WHERE id = :id")
_FORGET_SOURCE = sql.statement("UPDATE evaluation SET source_path = NULL WHERE id = :id")
_HELD = sql.statement("SELECT 1 FROM cached_path WHERE path = :path")
_CREATED = sql.statement(
    "SELECT b.id FROM build_job j JOIN derivation_build b ON b.id = j.build"
    " WHERE j.evaluation = :id AND j.outcome IS NULL AND b.status = 'Created' ORDER BY b.id"
)
_WITHOUT_SOURCE = sql.statement(
    "SELECT b.id, s.path FROM derivation_build b JOIN derivation_source s ON s.derivation = b.derivation"
    " WHERE b.id IN [ids] AND b.status = 'Created'"
    " AND NOT EXISTS (SELECT 1 FROM cached_path p WHERE p.path = s.path) ORDER BY b.id, s.path"
)
_WISHED = sql.statement("SELECT derivation FROM build_job WHERE evaluation = :id ORDER BY derivation")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation that a worker has. `from_store`: its source is a path that was uploaded."""

    id: str
    status: EvaluationStatus
    attempts: int
    from_store: bool
    source_path: str | None
    is_final: bool


def find_evaluation(work: Work, evaluation: str) -> Evaluation:
    """The evaluation's row. LookupError if there is none."""
    rows: list[tuple[Any, ...]] = sql.run(work.connection, _FIND, {"id": evaluation})
    if not rows:
        raise LookupError(f"no evaluation {evaluation}")
    row = rows[0]
    from_store = sql.from_json(row[3]).get("type") == "Path"
    return Evaluation(row[0], EvaluationStatus(row[1]), row[2], from_store, row[4], bool(row[5]))


def source_is_held(work: Work, evaluation: Evaluation) -> bool:
    """Whether the follow-up of a fetch could read the source from the server's store."""
    path = evaluation.source_path
    return path is not None and bool(sql.run(work.connection, _HELD, {"path": path}))


def evaluation_fetched(work: Work, evaluation: Evaluation) -> None:
    """The fetch half of a split job is done: the cached follow-up waits for a worker."""
    move_evaluation(work, evaluation.id, EvaluationEvent.FETCHED)
    announce_evaluation(work, evaluation.id)


def evaluation_walked(work: Work, evaluation: Evaluation) -> None:
    """The graph is complete: the evaluation ends with its builds, or now if its walk had errors."""
    errors = sql.run(work.connection, _FIRST_ERROR, {"id": evaluation.id})
    if errors:
        source, message = errors[0]
        _fail(work, evaluation, message if source is None else f"{source}: {message}")
        return
    move_evaluation(work, evaluation.id, EvaluationEvent.WALKED)
    work.events.append(EvaluationChanged(evaluation.id, EvaluationStatus.BUILDING))
    # Whatever was to be uploaded with the walk is here by now: nothing waits for a source in silence.
    waiting = [row[0] for row in sql.run(work.connection, _CREATED, {"id": evaluation.id})]
    advance(work, waiting)
    _fail_without_source(work, waiting)
    settle_evaluations(work, [evaluation.id])


def evaluation_failed(
    work: Work,
    assignment: Assignment,
    evaluation: Evaluation,
    kind: FailureKind,
    error: str,
    *,
    seq: int | None = None,
    spans_dropped: int = 0,
    reported_missing: tuple[str, ...] = (),
) -> None:
    """A failure of any kind. An evaluation that has ended meanwhile stays as it is."""
    close_assignment(work, assignment, AssignmentStatus.FAILED, seq=seq, spans_dropped=spans_dropped)
    if evaluation.is_final:
        return
    if kind is FailureKind.INPUTS_UNAVAILABLE:
        _heal(work, evaluation, error, reported_missing)
        return
    history = JobHistory(evaluation.attempts)
    _follow(work, evaluation, decide(kind, assignment.abort_reason, history, limits(work)), error)


def evaluation_ended(work: Work, evaluation: Evaluation, event: EvaluationEvent, error: str) -> None:
    """FAILED or ABORTED for good; what it still waits for is taken back. One that has ended stays so."""
    if evaluation.is_final:
        return
    end_evaluation(work, evaluation.id, event, error=error)
    drop_wishes(work, evaluation.id, error)


def evaluation_again(work: Work, evaluation: Evaluation, *, source_lost: bool) -> None:
    """It waits for a worker again, at once, and has used no attempt."""
    if source_lost:
        sql.run(work.connection, _FORGET_SOURCE, {"id": evaluation.id})
    _requeue(work, evaluation, Decision(Outcome.REQUEUE, evaluation.attempts))


def evaluation_lost(work: Work, assignment: Assignment, evaluation: Evaluation, error: str) -> None:
    """The worker no longer has it, or is gone, or did not confirm its abort."""
    close_assignment(work, assignment, AssignmentStatus.ABANDONED)
    if evaluation.is_final:
        return
    accepted = assignment.accepted_at is not None
    history = JobHistory(evaluation.attempts)
    _follow(work, evaluation, decide_lost(accepted, assignment.abort_reason, history, limits(work)), error)


def _follow(work: Work, evaluation: Evaluation, decision: Decision, error: str) -> None:
    if decision.outcome is Outcome.FAIL:
        _fail(work, evaluation, error)
    elif decision.outcome is Outcome.ABORT:
        end_evaluation(work, evaluation.id, EvaluationEvent.ABORTED, error=error)
        drop_wishes(work, evaluation.id, error)
    else:
        _requeue(work, evaluation, decision)


def _requeue(work: Work, evaluation: Evaluation, decision: Decision) -> None:
    # The next walk tells its own warnings and errors.
    sql.run(work.connection, _FORGET_NOTES, {"id": evaluation.id})
    backoff_secs = decision.backoff_secs
    parameters = {
        "id": evaluation.id,
        "attempts": decision.attempts,
        "not_before": None if backoff_secs is None else work.now + backoff_secs,
    }
    sql.run(work.connection, _SPEND, parameters)
    move_evaluation(work, evaluation.id, EvaluationEvent.RELEASED)
    announce_evaluation(work, evaluation.id)


def _heal(work: Work, evaluation: Evaluation, error: str, reported_missing: tuple[str, ...]) -> None:
    if evaluation.source_path is not None and evaluation.source_path in reported_missing:
        forget_paths(work, [evaluation.source_path])
        if evaluation.from_store:
            _fail(work, evaluation, f"the source {evaluation.source_path} is lost: submit it again ({error})")
            return
        sql.run(work.connection, _FORGET_SOURCE, {"id": evaluation.id})
    wished = [row[0] for row in sql.run(work.connection, _WISHED, {"id": evaluation.id})]
    made, _ = missing_paths(work, wished, reported_missing)
    own = JobHistory(evaluation.attempts)
    # An import that went missing is made again when the next walk asks for it.
    _follow(work, evaluation, decide(FailureKind.TRANSIENT, None, own, limits(work)), error)
    heal(work, wished, made)


def _fail(work: Work, evaluation: Evaluation, error: str) -> None:
    end_evaluation(work, evaluation.id, EvaluationEvent.FAILED, error=error)
    drop_wishes(work, evaluation.id, f"its evaluation failed: {error}")


def _fail_without_source(work: Work, builds: list[str]) -> None:
    if not builds:
        return
    lost: dict[str, list[str]] = {}
    seen: set[str] = set()
    for build, path in sql.run(work.connection, _WITHOUT_SOURCE, {"ids": sql.array(work.connection, builds)}):
        if build not in seen:
            seen.add(build)
            lost.setdefault(path, []).append(build)
    for path, stuck in lost.items():
        error = f"its source {path} was never uploaded: submit it again"
        fail_builds(work, stuck, BuildEvent.FAILED, error=error, racing=True)
