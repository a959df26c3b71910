"""Who has which job: the claim of a job for a worker, and the ends of an assignment that leave the
job to be assigned again (cluster-jobs.md, "Claim"; design.md, "The database is the truth").

The order of locks is the same everywhere: the assignment's row, then the job's; a claim makes its
assignment anew, so it locks the job alone. Reports and their consequences are the graph's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from gradient_protocol.kinds import JobKind

from gradient_server.db.hot import HotStatement, array_of, execute_text, texts_in
from gradient_server.db.tables import dispatched_job
from gradient_server.domain.job import split_job_key
from gradient_server.domain.status import AbortReason, AssignmentStatus

__all__ = [
    "Claim",
    "ClosedAssignment",
    "OpenAssignment",
    "accept_assignment",
    "claim_assignment",
    "claim_assignments",
    "close_abandoned",
    "note_log",
    "open_assignments",
    "reject_assignment",
    "store_abort",
]

# After an abort for one of these reasons the job is not wanted any more.
UNWANTED = (AbortReason.USER, AbortReason.EVALUATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A job for a worker, and what is recorded of the moment. Sizes in bytes, None is unknown.

    `cluster_attempt`, `cluster_role` and `cluster_index` are set together, for a cluster's member.
    """

    assignment_id: str
    job_key: str
    worker_id: str
    instance_id: str
    cluster_attempt: str | None = None
    cluster_role: str | None = None
    cluster_index: int | None = None
    missing_count: int | None = None
    missing_nar_size: int | None = None
    dependency_count: int | None = None
    score_breakdown: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ClosedAssignment:
    """An assignment that ended without a report.

    `requeued`: the job is Queued again. It is not where its abort was asked for by a user or an
    evaluation (`abort_reason`): whoever closed it must then end the job.
    """

    assignment_id: str
    job_key: str
    kind: JobKind
    worker_id: str
    cluster_attempt: str | None
    abort_reason: AbortReason | None
    requeued: bool


@dataclass(frozen=True, slots=True)
class OpenAssignment:
    """A `dispatched_job` row that is not closed. Times in seconds since the epoch."""

    assignment_id: str
    job_key: str
    kind: JobKind
    worker_id: str
    instance_id: str
    status: AssignmentStatus
    assigned_at: float
    accepted_at: float | None
    cluster_attempt: str | None
    cluster_role: str | None
    cluster_index: int | None
    last_seq: int
    refused_seq: int | None
    # A cluster member's final report is stored: it can no longer be lost.
    report_stored: bool
    abort_reason: AbortReason | None
    abort_requested_at: float | None
    log_bytes: int
    log_truncated: bool


# The columns of a claim that do not depend on the kind of job.
_CLAIM = """
INSERT INTO dispatched_job (
    id, job_key, {reference}, worker, instance, cluster_attempt, cluster_role, cluster_index,
    status, assigned_at, last_seq, log_bytes, log_truncated, spans_dropped, fetch_only,
    queued_at, ready_at, missing_count, missing_nar_size, dependency_count, score_breakdown)
SELECT
    :assignment, :job_key, job.id, :worker, :instance,
    CAST(:attempt AS TEXT), CAST(:role AS TEXT), CAST(:position AS INTEGER),
    'Assigned', :now, 0, 0, FALSE, 0, FALSE,
    job.queued_at, job.ready_at, CAST(:missing_count AS BIGINT), CAST(:missing_nar_size AS BIGINT),
    CAST(:dependency_count AS INTEGER), {breakdown}
FROM {table} AS job
WHERE job.id = :job AND job.status = 'Queued' AND (job.not_before IS NULL OR job.not_before <= :now)
    AND {wanted}
    AND (CAST(:attempt AS TEXT) IS NOT NULL
        OR NOT EXISTS (SELECT 1 FROM cluster_member AS member WHERE member.{reference} = job.id))
ON CONFLICT (job_key) WHERE finished_at IS NULL DO NOTHING
RETURNING id
"""


def _claim_statement(table: str, reference: str, wanted: str) -> HotStatement:
    return HotStatement(
        _CLAIM.format(table=table, reference=reference, wanted=wanted, breakdown=":breakdown"),
        _CLAIM.format(table=table, reference=reference, wanted=wanted, breakdown="CAST(:breakdown AS JSON)"),
    )


@dataclass(frozen=True, slots=True)
class _JobStatements:
    """What is said to the database about one kind of job."""

    lock: HotStatement
    claim: HotStatement
    assign: HotStatement
    requeue: HotStatement


def _statements(table: str, reference: str, wanted: str) -> _JobStatements:
    assign = f"UPDATE {table} SET status = 'Assigned' WHERE "  # noqa: S608 - our names
    return _JobStatements(
        # A snapshot taken after this lock sees every cluster whose submission held it before.
        lock=HotStatement(f"SELECT 1 FROM {table} WHERE id = :job FOR NO KEY UPDATE"),  # noqa: S608 - our names
        claim=_claim_statement(table, reference, wanted),
        assign=HotStatement(*(assign + one_of for one_of in texts_in("id", "jobs"))),
        requeue=HotStatement(
            f"UPDATE {table} SET status = 'Queued' "  # noqa: S608 - our names
            "WHERE id = :job AND status = 'Assigned' RETURNING id"
        ),
    )


_JOBS = {
    JobKind.BUILD: _statements("derivation_build", "derivation_build", "TRUE"),
    JobKind.EVAL: _statements("evaluation", "evaluation", "job.abort_requested_at IS NULL"),
}


def claim_assignment(connection: sa.Connection, claim: Claim, *, now: float) -> bool:
    """Makes the assignment and the job's Assigned transition; False, and nothing, if it cannot start.

    It can start when it is Queued, its backoff has passed, no assignment of it is open and, without
    an attempt, it is no cluster's member.
    """
    return claim_assignments(connection, [claim], now=now) == {claim.assignment_id}


def claim_assignments(connection: sa.Connection, claims: Sequence[Claim], *, now: float) -> set[str]:
    """`claim_assignment` for each, in this order; the ids of the assignments that were made."""
    claimed: set[str] = set()
    jobs: dict[JobKind, list[str]] = {}
    for claim in claims:
        kind, job = split_job_key(claim.job_key)
        if _insert(connection, _JOBS[kind], claim, job, now):
            claimed.add(claim.assignment_id)
            jobs.setdefault(kind, []).append(job)
    for kind, assigned in jobs.items():
        execute_text(connection, _JOBS[kind].assign, {"jobs": array_of(connection, assigned)})
    return claimed


def _insert(
    connection: sa.Connection, statements: "_JobStatements", claim: Claim, job: str, now: float
) -> bool:
    if connection.dialect.name == "postgresql":
        execute_text(connection, statements.lock, {"job": job})
    breakdown = None if claim.score_breakdown is None else json.dumps(claim.score_breakdown)
    made = execute_text(
        connection,
        statements.claim,
        {
            "assignment": claim.assignment_id,
            "job_key": claim.job_key,
            "job": job,
            "worker": claim.worker_id,
            "instance": claim.instance_id,
            "attempt": claim.cluster_attempt,
            "role": claim.cluster_role,
            "position": claim.cluster_index,
            "missing_count": claim.missing_count,
            "missing_nar_size": claim.missing_nar_size,
            "dependency_count": claim.dependency_count,
            "breakdown": breakdown,
            "now": now,
        },
    )
    return bool(made)


_ACCEPT = HotStatement(
    """
UPDATE dispatched_job SET status = 'Accepted', accepted_at = COALESCE(accepted_at, :now)
WHERE id = :assignment AND worker = :worker AND finished_at IS NULL
    AND (CAST(:instance AS TEXT) IS NULL OR instance = :instance)
RETURNING id
"""
)


def accept_assignment(
    connection: sa.Connection,
    assignment_id: str,
    worker_id: str,
    *,
    now: float,
    instance_id: str | None = None,
) -> bool:
    """The worker has the job. Repeating it is harmless; False if it is not this worker's, or closed.

    With `instance_id`, False too if another instance owns it by now.
    """
    parameters = {"assignment": assignment_id, "worker": worker_id, "instance": instance_id, "now": now}
    return bool(execute_text(connection, _ACCEPT, parameters))


_CLOSE = HotStatement(
    """
UPDATE dispatched_job SET status = :status, finished_at = :now
WHERE id = :assignment AND finished_at IS NULL
    AND (CAST(:worker AS TEXT) IS NULL OR worker = :worker)
    AND (CAST(:instance AS TEXT) IS NULL OR instance = :instance)
    AND (status = 'Assigned' OR CAST(:answered AS INTEGER) = 1)
RETURNING job_key, worker, cluster_attempt, abort_reason
"""
)


def reject_assignment(
    connection: sa.Connection,
    assignment_id: str,
    worker_id: str,
    *,
    now: float,
    instance_id: str | None = None,
) -> ClosedAssignment | None:
    """The worker refused the job: closed as Rejected, no attempt used; None if there is nothing to reject.

    An assignment that was accepted before can no longer be rejected.
    """
    return _close(
        connection,
        AssignmentStatus.REJECTED,
        {
            "assignment": assignment_id,
            "worker": worker_id,
            "instance": instance_id,
            "answered": 0,
            "now": now,
        },
    )


def close_abandoned(
    connection: sa.Connection, assignment_id: str, *, now: float, instance_id: str | None = None
) -> ClosedAssignment | None:
    """Nobody will report on it: closed as Abandoned, no attempt used; None if it was closed before.

    For a claim that was not sent, a worker that does not list it, one that did not confirm an abort.
    """
    return _close(
        connection,
        AssignmentStatus.ABANDONED,
        {"assignment": assignment_id, "worker": None, "instance": instance_id, "answered": 1, "now": now},
    )


def _close(
    connection: sa.Connection, status: AssignmentStatus, parameters: dict[str, Any]
) -> ClosedAssignment | None:
    rows = execute_text(connection, _CLOSE, parameters | {"status": str(status)})
    if not rows:
        return None
    job_key, worker, attempt, reason = rows[0]
    kind, job = split_job_key(job_key)
    abort_reason = None if reason is None else AbortReason(reason)
    requeued = abort_reason not in UNWANTED and bool(
        execute_text(connection, _JOBS[kind].requeue, {"job": job})
    )
    return ClosedAssignment(
        assignment_id=parameters["assignment"],
        job_key=job_key,
        kind=kind,
        worker_id=worker,
        cluster_attempt=attempt,
        abort_reason=abort_reason,
        requeued=requeued,
    )


_STORE_ABORT = HotStatement(
    """
UPDATE dispatched_job SET abort_reason = :reason, abort_requested_at = :now
WHERE id = :assignment AND finished_at IS NULL
    AND (abort_reason IS NULL
        OR (abort_reason NOT IN ('User', 'Evaluation') AND :reason IN ('User', 'Evaluation')))
RETURNING id
"""
)


def store_abort(connection: sa.Connection, assignment_id: str, reason: AbortReason, *, now: float) -> bool:
    """Records that the assignment is to be aborted, before the worker is told.

    The first reason stands, save that a user's or evaluation's wish overrides one that would requeue
    the job. False if the assignment is closed or nothing was changed.
    """
    parameters = {"assignment": assignment_id, "reason": str(reason), "now": now}
    return bool(execute_text(connection, _STORE_ABORT, parameters))


_NOTE_LOG = HotStatement(
    """
UPDATE dispatched_job SET log_bytes = :log_bytes, log_truncated = CAST(:truncated AS INTEGER) = 1
WHERE id = :assignment AND log_bytes <= :log_bytes RETURNING id
"""
)


def note_log(connection: sa.Connection, assignment_id: str, log_bytes: int, *, truncated: bool) -> bool:
    """Records how much of the log is stored, in uncompressed bytes; it never shrinks."""
    parameters = {"assignment": assignment_id, "log_bytes": log_bytes, "truncated": int(truncated)}
    return bool(execute_text(connection, _NOTE_LOG, parameters))


def open_assignments(
    connection: sa.Connection, *, instance_id: str | None = None, worker_id: str | None = None
) -> list[OpenAssignment]:
    """The open assignments of a worker, of an instance, or of both, the oldest first."""
    row = dispatched_job.c
    query = sa.select(
        row.id,
        row.job_key,
        row.worker,
        row.instance,
        row.status,
        row.assigned_at,
        row.accepted_at,
        row.cluster_attempt,
        row.cluster_role,
        row.cluster_index,
        row.last_seq,
        row.refused_seq,
        row.held_report.is_not(None).label("report_stored"),
        row.abort_reason,
        row.abort_requested_at,
        row.log_bytes,
        row.log_truncated,
    ).where(row.finished_at.is_(None))
    if instance_id is not None:
        query = query.where(row.instance == instance_id)
    if worker_id is not None:
        query = query.where(row.worker == worker_id)
    return [_open_assignment(found) for found in connection.execute(query.order_by(row.assigned_at, row.id))]


def _open_assignment(found: Any) -> OpenAssignment:  # noqa: ANN401 - a row of the query above
    return OpenAssignment(
        assignment_id=found.id,
        job_key=found.job_key,
        kind=split_job_key(found.job_key)[0],
        worker_id=found.worker,
        instance_id=found.instance,
        status=AssignmentStatus(found.status),
        assigned_at=found.assigned_at,
        accepted_at=found.accepted_at,
        cluster_attempt=found.cluster_attempt,
        cluster_role=found.cluster_role,
        cluster_index=found.cluster_index,
        last_seq=found.last_seq,
        refused_seq=found.refused_seq,
        report_stored=bool(found.report_stored),
        abort_reason=None if found.abort_reason is None else AbortReason(found.abort_reason),
        abort_requested_at=found.abort_requested_at,
        log_bytes=found.log_bytes,
        log_truncated=bool(found.log_truncated),
    )
