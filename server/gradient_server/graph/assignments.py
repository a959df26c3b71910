"""Assignments as reports, losses and aborts find them, and their close."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.shapes import Span

from gradient_server.domain.events import AssignmentClosed
from gradient_server.domain.job import split_job_key
from gradient_server.domain.status import AbortReason, AssignmentStatus
from gradient_server.graph import sql
from gradient_server.graph.content import is_stored_integer, is_stored_time
from gradient_server.graph.work import Work

__all__ = [
    "Assignment",
    "close_assignment",
    "close_assignments",
    "find_assignment",
    "find_open",
    "store_attempt",
    "store_attempts",
    "store_spans",
]

MAX_SPANS = 2_000
LOST = "Lost"

_COLUMNS = (
    "SELECT a.id, a.job_key, a.worker, w.name, a.instance, a.cluster_attempt, a.status, a.assigned_at,"
    " a.accepted_at, a.finished_at, a.last_seq, a.refused_seq, a.held_report IS NOT NULL, a.abort_reason,"
    " a.log_bytes, a.log_truncated, a.fetch_only FROM dispatched_job a LEFT JOIN worker w ON w.id = a.worker"
)
_FIND = sql.statement(_COLUMNS + " WHERE a.id = :id", _COLUMNS + " WHERE a.id = :id FOR UPDATE OF a")
_FIND_OPEN = sql.statement(
    _COLUMNS + " WHERE a.id IN [ids] AND a.finished_at IS NULL ORDER BY a.id",
    _COLUMNS + " WHERE a.id IN [ids] AND a.finished_at IS NULL ORDER BY a.id FOR UPDATE OF a",
)
_CLOSE = sql.statement(
    "UPDATE dispatched_job SET status = :status, finished_at = :now, last_seq = :seq,"
    " spans_dropped = :spans_dropped WHERE id = :id AND finished_at IS NULL"
)
_CLOSE_ACCEPTED = sql.statement(
    "UPDATE dispatched_job SET status = :status, finished_at = :now, last_seq = :seq,"
    " spans_dropped = :spans_dropped, accepted_at = COALESCE(accepted_at, :accepted_at)"
    " WHERE id = :id AND finished_at IS NULL"
)
_FORGET_IMPORTS = sql.statement("DELETE FROM import_request WHERE assignment = :id RETURNING query")
_ATTEMPT = sql.statement(
    "INSERT INTO build_attempt (assignment, build, worker, started_at, finished_at, outcome,"
    " error, log_bytes,"
    " log_truncated) VALUES (:id, :build, :worker, :started_at, :now, :outcome, :error,"
    " :log_bytes, :log_truncated)"
    " ON CONFLICT (assignment) DO NOTHING"
)
_SPAN = sql.statement(
    'INSERT INTO span (assignment, position, parent, kind, start, "end", nar_bytes, stored_bytes, paths)'
    " VALUES (:id, :position, :parent, :kind, :start, :end, :nar_bytes, :stored_bytes, :paths)",
    'INSERT INTO span (assignment, "position", parent, kind, start, "end", nar_bytes, stored_bytes, paths)'
    " VALUES (:id, :position, :parent, :kind, :start, :end, :nar_bytes, :stored_bytes, :paths)",
)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A `dispatched_job` row. `job` is the id within the kind; times in seconds since the epoch."""

    id: str
    job_key: str
    kind: JobKind
    job: str
    worker_id: str
    worker_name: str | None
    instance_id: str
    cluster_attempt: str | None
    status: AssignmentStatus
    assigned_at: float
    accepted_at: float | None
    finished_at: float | None
    last_seq: int
    refused_seq: int | None
    report_held: bool
    abort_reason: AbortReason | None
    log_bytes: int
    log_truncated: bool
    fetch_only: bool


def find_assignment(work: Work, assignment_id: str) -> Assignment | None:
    """The assignment, open or closed; locked until the transaction ends."""
    rows = sql.run(work.connection, _FIND, {"id": assignment_id})
    return _assignment(rows[0]) if rows else None


def find_open(work: Work, assignment_ids: Sequence[str]) -> list[Assignment]:
    """Those that are open, by id; locked until the transaction ends."""
    if not assignment_ids:
        return []
    parameters = {"ids": sql.array(work.connection, assignment_ids)}
    return [_assignment(row) for row in sql.run(work.connection, _FIND_OPEN, parameters)]


def close_assignment(
    work: Work,
    assignment: Assignment,
    status: AssignmentStatus,
    *,
    seq: int | None = None,
    spans_dropped: int = 0,
) -> None:
    """Closes an open assignment; `seq` of the final report, None where there was none."""
    parameters = {
        "id": assignment.id,
        "status": status.value,
        "now": work.now,
        "seq": assignment.last_seq if seq is None else seq,
        "spans_dropped": spans_dropped,
    }
    sql.run(work.connection, _CLOSE, parameters)
    if assignment.kind is JobKind.EVAL:
        forgotten = sql.run(work.connection, _FORGET_IMPORTS, {"id": assignment.id})
        work.imports_over |= bool(forgotten)
    work.events.append(
        AssignmentClosed(assignment.id, assignment.job_key, assignment.kind, assignment.worker_id)
    )


def close_assignments(
    work: Work, reported: Sequence[tuple[Assignment, int, int, bool]], status: AssignmentStatus
) -> None:
    """Closes open assignments of builds by their final reports.

    `reported`: each with the report's number, the spans dropped, and whether it is accepted only now.
    """
    rows = [
        {
            "id": assignment.id,
            "status": status.value,
            "now": work.now,
            "seq": seq,
            "spans_dropped": spans_dropped,
            "accepted_at": work.now if accepted else None,
        }
        for assignment, seq, spans_dropped, accepted in reported
    ]
    sql.run_many(work.connection, _CLOSE_ACCEPTED, rows)
    work.events.extend(
        AssignmentClosed(assignment.id, assignment.job_key, assignment.kind, assignment.worker_id)
        for assignment, *_ in reported
    )


def store_attempt(work: Work, assignment: Assignment, outcome: str, error: str | None) -> None:
    """Records a build's try on a worker."""
    sql.run(work.connection, _ATTEMPT, _attempt(work, assignment, outcome, error))


def store_attempts(work: Work, assignments: Sequence[Assignment], outcome: str) -> None:
    """The same of several, which ended without an error."""
    sql.run_many(work.connection, _ATTEMPT, [_attempt(work, one, outcome, None) for one in assignments])


def _attempt(work: Work, assignment: Assignment, outcome: str, error: str | None) -> dict[str, object]:
    return {
        "id": assignment.id,
        "build": assignment.job,
        "worker": assignment.worker_id,
        "started_at": assignment.assigned_at,
        "now": work.now,
        "outcome": outcome,
        "error": error,
        "log_bytes": assignment.log_bytes,
        "log_truncated": bool(assignment.log_truncated),
    }


def store_spans(work: Work, assignment: Assignment, spans: Sequence[Span], dropped: int) -> int:
    """Stores what can be stored of a report's spans; how many are dropped in all.

    Positions stay those of the report, which `parent` counts in.
    """
    rows = [
        {
            "id": assignment.id,
            "position": position,
            "parent": span.parent if span.parent is not None and 0 <= span.parent < len(spans) else None,
            "kind": span.kind.value,
            "start": span.start,
            "end": span.end,
            "nar_bytes": span.nar_bytes,
            "stored_bytes": span.stored_bytes,
            "paths": span.paths,
        }
        for position, span in enumerate(spans[:MAX_SPANS])
        if _is_storable(span)
    ]
    sql.run_many(work.connection, _SPAN, rows)
    return min(max(dropped, 0), 1 << 30) + len(spans) - len(rows)


def _is_storable(span: Span) -> bool:
    counts = (span.nar_bytes, span.stored_bytes, span.paths)
    return (
        is_stored_time(span.start)
        and is_stored_time(span.end)
        and span.start <= span.end
        and all(count is None or is_stored_integer(count) for count in counts)
    )


def _assignment(row: tuple[Any, ...]) -> Assignment:
    kind, job = split_job_key(row[1])
    return Assignment(
        id=row[0],
        job_key=row[1],
        kind=kind,
        job=job,
        worker_id=row[2],
        worker_name=row[3],
        instance_id=row[4],
        cluster_attempt=row[5],
        status=AssignmentStatus(row[6]),
        assigned_at=row[7],
        accepted_at=row[8],
        finished_at=row[9],
        last_seq=row[10],
        refused_seq=row[11],
        report_held=bool(row[12]),
        abort_reason=None if row[13] is None else AbortReason(row[13]),
        log_bytes=row[14],
        log_truncated=bool(row[15]),
        fetch_only=bool(row[16]),
    )
