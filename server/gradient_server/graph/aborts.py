"""Aborts: of an evaluation, of one job, of what a worker has; and of those that nobody confirmed.

An abort of running work is stored with its reason before the worker is told (protocol.md, Lost
connections): the events carry the AbortWanted, to be sent after the commit and again after a resume.
An evaluation's abort takes back its wishes, and a build that somebody else wants goes on.
"""

from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind

from gradient_server.domain.events import Event
from gradient_server.domain.job import split_job_key
from gradient_server.domain.status import AbortReason
from gradient_server.graph import sql
from gradient_server.graph.aftermath import carry_out
from gradient_server.graph.assignments import find_open
from gradient_server.graph.endings import lose
from gradient_server.graph.evaluations import end_evaluation
from gradient_server.graph.progress import abort_builds
from gradient_server.graph.settings import GraphSettings
from gradient_server.graph.states import EvaluationEvent
from gradient_server.graph.wishes import drop_wishes, request_aborts
from gradient_server.graph.work import Work

__all__ = [
    "abort_assignments",
    "abort_assignments_of_worker",
    "abort_evaluation",
    "abort_job",
    "reap_unconfirmed",
    "unconfirmed_aborts",
]

_EVALUATION_OPEN = sql.statement("SELECT 1 FROM evaluation WHERE id = :id AND finished_at IS NULL")
_OPEN_BUILD = sql.statement("SELECT id FROM derivation_build WHERE id = :id AND finished_at IS NULL")
_OPEN_OF_JOB = sql.statement("SELECT id FROM dispatched_job WHERE job_key = :job_key AND finished_at IS NULL")
_OPEN_OF_WORKER = sql.statement(
    "SELECT id FROM dispatched_job WHERE worker = :worker AND finished_at IS NULL ORDER BY id"
)
_UNCONFIRMED = sql.statement(
    "SELECT id FROM dispatched_job WHERE finished_at IS NULL AND abort_requested_at <= :before"
    " AND instance = :instance AND held_report IS NULL AND cluster_attempt IS NULL ORDER BY id"
)


def abort_evaluation(
    connection: sa.Connection,
    evaluation_id: str,
    *,
    now: float,
    ids: IdSource,
    error: str = "aborted on request",
) -> list[Event] | None:
    """Ends an evaluation as Aborted, its job and its builds too unless others want them.

    None if there is no such evaluation, or it has ended.
    """
    work = Work(connection, now, ids)
    sql.lock_graph(connection)
    if not sql.run(connection, _EVALUATION_OPEN, {"id": evaluation_id}):
        return None
    end_evaluation(work, evaluation_id, EvaluationEvent.ABORTED, error=error)
    request_aborts(work, _open_of_job(work, f"eval:{evaluation_id}"), AbortReason.EVALUATION, error)
    drop_wishes(work, evaluation_id, error)
    return carry_out(work)


def abort_job(
    connection: sa.Connection, job_key: str, *, now: float, ids: IdSource, error: str = "aborted on request"
) -> list[Event] | None:
    """Aborts one job for everyone who wants it. None if there is none that could still be aborted.

    A build that waits ends at once; one that a worker has ends when the worker confirms.
    """
    kind, job = split_job_key(job_key)
    if kind is JobKind.EVAL:
        return abort_evaluation(connection, job, now=now, ids=ids, error=error)
    work = Work(connection, now, ids)
    sql.lock_graph(connection)
    moved = abort_builds(work, _open_builds(work, job), error=error)
    running = _open_of_job(work, job_key)
    request_aborts(work, running, AbortReason.USER, error)
    events = carry_out(work)
    return events if moved or running else None


def abort_assignments(
    connection: sa.Connection,
    assignment_ids: Sequence[str],
    reason: AbortReason,
    *,
    now: float,
    ids: IdSource,
    text: str,
) -> list[Event]:
    """Stores an abort for those that are open, for the server's own reasons (Revoked,"
    " Drained, Unanswered)."""
    work = Work(connection, now, ids)
    request_aborts(work, assignment_ids, reason, text)
    return work.events


def abort_assignments_of_worker(
    connection: sa.Connection, worker_id: str, reason: AbortReason, *, now: float, ids: IdSource, text: str
) -> list[Event]:
    """The same for everything that a worker has open."""
    rows = sql.run(connection, _OPEN_OF_WORKER, {"worker": worker_id})
    return abort_assignments(connection, [row[0] for row in rows], reason, now=now, ids=ids, text=text)


def unconfirmed_aborts(connection: sa.Connection, instance_id: str, before: float) -> list[str]:
    """Open assignments of this instance whose abort was asked for at `before` (wall time) or earlier."""
    rows = sql.run(connection, _UNCONFIRMED, {"instance": instance_id, "before": before})
    return [row[0] for row in rows]


def reap_unconfirmed(
    connection: sa.Connection,
    assignment_ids: Iterable[str],
    *,
    now: float,
    ids: IdSource,
    settings: GraphSettings | None = None,
) -> list[Event]:
    """Closes, as abandoned, those whose abort was stored and that nobody confirmed. Its reason decides."""
    work = Work(connection, now, ids, settings or GraphSettings())
    sql.lock_graph(connection)
    for assignment in find_open(work, list(assignment_ids)):
        # A member's is declared lost by whoever runs its attempt.
        alone = assignment.cluster_attempt is None
        if alone and assignment.abort_reason is not None:
            lose(work, assignment, "the worker did not confirm the abort")
    return carry_out(work)


def _open_of_job(work: Work, job_key: str) -> list[str]:
    return [row[0] for row in sql.run(work.connection, _OPEN_OF_JOB, {"job_key": job_key})]


def _open_builds(work: Work, build: str) -> list[str]:
    return [row[0] for row in sql.run(work.connection, _OPEN_BUILD, {"id": build})]
