"""How evaluations move on: their ends, and the limit of each task on how many run at once.

A task with `max_concurrent_evaluations` lets its oldest unfinished evaluations run, that many; the
others are Queued and unknown to the scheduler until one of these has ended.
"""

from collections.abc import Iterable

from gradient_server.domain.events import EvaluationChanged, JobQueued, JobUnqueued
from gradient_server.domain.job import eval_key
from gradient_server.domain.status import EvaluationStatus
from gradient_server.graph import sql
from gradient_server.graph.pending import load_queued_evaluations
from gradient_server.graph.states import EvaluationEvent
from gradient_server.graph.transitions import move_evaluation
from gradient_server.graph.work import Work

__all__ = ["announce_evaluation", "end_evaluation", "settle_evaluations"]

# Far more than transactions can run at the same time: with this many builds open, the build that
# finishes now cannot be among the last ones, and the evaluation's row need not be locked.
_CANNOT_ALL_FINISH_AT_ONCE = 200

_FEW_OPEN = sql.statement(
    "SELECT 1", "SELECT 1 FROM build_job WHERE evaluation = :id AND outcome IS NULL OFFSET :many LIMIT 1"
)
_LOCK = sql.statement("SELECT 1", "SELECT 1 FROM evaluation WHERE id = :id FOR UPDATE")
_IS_COMPLETE = sql.statement(
    "SELECT 1 FROM evaluation v WHERE v.id = :id AND v.status = 'Building'"
    " AND NOT EXISTS (SELECT 1 FROM build_job j WHERE j.evaluation = v.id AND j.outcome IS NULL)"
)
_COUNT_FAILED = sql.statement(
    "SELECT COUNT(*), COALESCE(SUM(CASE WHEN outcome = 'Completed' THEN 0 ELSE 1 END), 0)"
    " FROM build_job WHERE evaluation = :id"
)
_EXPLAIN = sql.statement("UPDATE evaluation SET error = :error WHERE id = :id")
_NEXT_OF_TASK = sql.statement(
    "SELECT v.id, t.max_concurrent_evaluations FROM evaluation v JOIN task t ON t.id = v.task"
    " WHERE t.max_concurrent_evaluations IS NOT NULL AND v.finished_at IS NULL"
    " AND v.task = (SELECT e.task FROM evaluation e WHERE e.id = :id) ORDER BY v.created_at, v.id"
)


def settle_evaluations(work: Work, evaluations: Iterable[str]) -> None:
    """Ends those evaluations whose job has completed and whose builds all have their outcome."""
    for evaluation in sorted(evaluations):
        if not _may_be_complete(work, evaluation):
            continue
        counted = sql.run(work.connection, _COUNT_FAILED, {"id": evaluation})
        total, failed = int(counted[0][0]), int(counted[0][1])
        if failed:
            end_evaluation(
                work, evaluation, EvaluationEvent.FAILED, error=f"{failed} of {total} builds failed"
            )
        else:
            end_evaluation(work, evaluation, EvaluationEvent.ALL_BUILT)


def end_evaluation(work: Work, evaluation: str, event: EvaluationEvent, *, error: str | None = None) -> None:
    """Gives an evaluation its final state and lets the next one of its task in."""
    move_evaluation(work, evaluation, event)
    if error is not None:
        sql.run(work.connection, _EXPLAIN, {"id": evaluation, "error": error})
    status = {
        EvaluationEvent.ALL_BUILT: EvaluationStatus.COMPLETED,
        EvaluationEvent.FAILED: EvaluationStatus.FAILED,
        EvaluationEvent.ABORTED: EvaluationStatus.ABORTED,
    }[event]
    if event is not EvaluationEvent.ALL_BUILT:
        work.events.append(JobUnqueued(eval_key(evaluation), error or status))
    work.events.append(EvaluationChanged(evaluation, status, error))
    let_in = sql.run(work.connection, _NEXT_OF_TASK, {"id": evaluation})
    if let_in:
        admitted = [row[0] for row in let_in[: int(let_in[0][1])]]
        for job in load_queued_evaluations(work.connection, admitted[-1:]):
            work.events.append(JobQueued(job))


def announce_evaluation(work: Work, evaluation: str) -> None:
    """Tells the scheduler of an evaluation that is Queued, if its task lets it in, and everyone else."""
    for job in load_queued_evaluations(work.connection, [evaluation]):
        work.events.append(JobQueued(job))
    work.events.append(EvaluationChanged(evaluation, EvaluationStatus.QUEUED))


def _may_be_complete(work: Work, evaluation: str) -> bool:
    if sql.is_postgresql(work.connection):
        parameters = {"id": evaluation, "many": _CANNOT_ALL_FINISH_AT_ONCE}
        if sql.run(work.connection, _FEW_OPEN, parameters):
            return False
        sql.run(work.connection, _LOCK, {"id": evaluation})
    return bool(sql.run(work.connection, _IS_COMPLETE, {"id": evaluation}))
