"""Reports of members: they wait, whole, for the verdict of their attempt (protocol.md, Reports).

Each final report, and each loss, gets its place in the attempt's order, for the first deciding one
wins (cluster-jobs.md, Recovery). A member whose report is stored can no longer be lost.
"""

from typing import Final

import msgspec
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.shapes import BuildOutput
from gradient_protocol.messages.worker import JobCompleted, JobFailed, JobUpdate

from gradient_server.domain.events import MemberReported
from gradient_server.graph import sql
from gradient_server.graph.assignments import Assignment
from gradient_server.graph.build_outputs import check_build_output
from gradient_server.graph.work import Work

__all__ = ["hold_final", "hold_output", "lose_member", "read_output", "read_report"]

_NEXT: Final = sql.statement(
    "UPDATE cluster_attempt SET report_count = report_count + 1 WHERE id = :id RETURNING report_count"
)
_HOLD: Final = sql.statement(
    "UPDATE dispatched_job SET last_seq = :seq, held_report = :report, held_order = :place WHERE id = :id"
)
_LOSE: Final = sql.statement(
    "UPDATE dispatched_job SET held_report = :report, held_order = :place, lost_at = :now"
    " WHERE id = :id AND finished_at IS NULL AND held_report IS NULL"
)
_HOLD_OUTPUT: Final = sql.statement(
    "UPDATE dispatched_job SET last_seq = :seq, held_output = :report WHERE id = :id"
)
_REPORT: Final = msgspec.msgpack.Decoder(JobCompleted | JobFailed)
_OUTPUT: Final = msgspec.msgpack.Decoder(JobUpdate)


def hold_final(work: Work, assignment: Assignment, message: JobCompleted | JobFailed) -> None:
    """Stores a member's final report and tells whoever decides its attempt."""
    assert assignment.cluster_attempt is not None
    parameters = {
        "id": assignment.id,
        "seq": message.seq,
        "report": msgspec.msgpack.encode(message),
        "place": _place(work, assignment.cluster_attempt),
    }
    sql.run(work.connection, _HOLD, parameters)
    work.events.append(MemberReported(assignment.cluster_attempt, assignment.id))


def hold_output(work: Work, assignment: Assignment, message: JobUpdate) -> str | None:
    """Stores a member's BuildOutput. The reason if its content is refused."""
    update = message.update
    if not isinstance(update, BuildOutput):
        return f"a build has no {type(update).__name__}"
    reason = check_build_output(work, assignment, update)
    if reason is None:
        report = msgspec.msgpack.encode(message)
        sql.run(work.connection, _HOLD_OUTPUT, {"id": assignment.id, "seq": message.seq, "report": report})
    return reason


def lose_member(work: Work, assignment: Assignment, error: str) -> None:
    """Declares a member of an open attempt lost, unless its report is stored: a failure like any other."""
    if assignment.cluster_attempt is None or assignment.report_held:
        return
    stand_in = JobFailed(
        assignment_id=assignment.id,
        seq=assignment.last_seq + 1,
        kind=FailureKind.TRANSIENT,
        error=error,
        missing_paths=[],
        spans=[],
        spans_dropped=0,
    )
    parameters = {
        "id": assignment.id,
        "report": msgspec.msgpack.encode(stand_in),
        "place": _place(work, assignment.cluster_attempt),
        "now": work.now,
    }
    sql.run(work.connection, _LOSE, parameters)


def read_report(stored: bytes) -> JobCompleted | JobFailed:
    """A held report as it was stored."""
    return _REPORT.decode(stored)


def read_output(stored: bytes) -> BuildOutput:
    """A held BuildOutput as it was stored."""
    update = _OUTPUT.decode(stored).update
    if not isinstance(update, BuildOutput):
        raise TypeError(f"a {type(update).__name__} was stored as a BuildOutput")
    return update


def _place(work: Work, attempt: str) -> int:
    return int(sql.run(work.connection, _NEXT, {"id": attempt})[0][0])
