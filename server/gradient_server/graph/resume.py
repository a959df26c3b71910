"""Sessions that come back, and assignments that do not (protocol.md, Lost connections).

A worker lists what it has. What it lists and still holds here is adopted, and listing is acceptance;
what it lists and does not hold is dropped. What it holds here and does not list is closed as abandoned
and goes on as a loss, unless its final report is stored. So does, after the grace, what no session
came back for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.server import AdoptedJob
from gradient_protocol.messages.worker import ResumedJob

from gradient_server.db.queries.signals import acknowledged_up_to
from gradient_server.domain.events import AbortWanted, Event
from gradient_server.domain.status import AbortReason
from gradient_server.graph import sql
from gradient_server.graph.aftermath import carry_out
from gradient_server.graph.assignments import Assignment, find_open
from gradient_server.graph.endings import lose
from gradient_server.graph.settings import GraphSettings
from gradient_server.graph.work import Work

__all__ = ["ResumeDecision", "lose_assignments", "resume"]

_OPEN_OF_WORKER = sql.statement(
    "SELECT id FROM dispatched_job WHERE worker = :worker AND finished_at IS NULL ORDER BY id"
)
_ACCEPT = sql.statement(
    "UPDATE dispatched_job SET status = 'Accepted', accepted_at = COALESCE(accepted_at, :now)"
    " WHERE id IN [ids] AND finished_at IS NULL"
)
_STARTED = sql.statement("SELECT id FROM cluster_attempt WHERE id IN [ids] AND started_at IS NOT NULL")


@dataclass(slots=True)
class ResumeDecision:
    """What `ResumeAck` says, and what follows.

    `aborts` (stored before, to be sent again after the ResumeAck) are among neither list of the
    answer. `lost_members`: members of an attempt that are not listed; their attempt's owner decides.
    """

    adopted: list[AdoptedJob] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    aborts: list[AbortWanted] = field(default_factory=list)
    lost_members: list[str] = field(default_factory=list)


def resume(
    connection: sa.Connection,
    *,
    worker_id: str,
    instance_id: str,
    running: Sequence[ResumedJob],
    now: float,
    ids: IdSource,
    settings: GraphSettings | None = None,
    peaks_mb: Mapping[str, int] | None = None,
) -> ResumeDecision:
    """Decides about everything that the worker lists and everything that it holds here.

    `peaks_mb`: the memory that builds were last seen with, by assignment; known of some.
    """
    peaks_mb = peaks_mb or {}
    work = Work(connection, now, ids, settings or GraphSettings())
    sql.lock_graph(connection)
    opened = [row[0] for row in sql.run(connection, _OPEN_OF_WORKER, {"worker": worker_id})]
    held = {a.id: a for a in find_open(work, opened) if a.instance_id == instance_id}
    decision = ResumeDecision(events=work.events)
    adopted: list[tuple[Assignment, int]] = []
    for listed in running:
        assignment = held.pop(listed.assignment_id, None)
        if assignment is None:
            decision.dropped.append(listed.assignment_id)
        elif listed.seq > assignment.last_seq and not assignment.report_held:
            # The server has stored less than it acknowledged once: a restored database.
            decision.dropped.append(listed.assignment_id)
            error = "the server's database has lost reports of it"
            _lose(work, decision, assignment, error, peaks_mb)
        else:
            adopted.append((assignment, listed.seq))
    _adopt(work, decision, adopted)
    for assignment in held.values():
        _lose(work, decision, assignment, "its worker came back without it", peaks_mb)
    carry_out(work)
    return decision


def lose_assignments(
    connection: sa.Connection,
    assignment_ids: Sequence[str],
    *,
    instance_id: str,
    now: float,
    ids: IdSource,
    settings: GraphSettings | None = None,
    error: str = "its worker was lost",
    peaks_mb: Mapping[str, int] | None = None,
) -> list[Event]:
    """Declares lost those that are still open, this instance's, and without a stored final report.

    Members of an attempt are left to the attempt's owner. `peaks_mb`: as for `resume`.
    """
    work = Work(connection, now, ids, settings or GraphSettings())
    sql.lock_graph(connection)
    for assignment in find_open(work, assignment_ids):
        if assignment.instance_id == instance_id:
            _lose(work, ResumeDecision(), assignment, error, peaks_mb or {})
    return carry_out(work)


def _adopt(work: Work, decision: ResumeDecision, adopted: Sequence[tuple[Assignment, int]]) -> None:
    if not adopted:
        return
    sql.run(
        work.connection,
        _ACCEPT,
        {"ids": sql.array(work.connection, [a.id for a, _ in adopted]), "now": work.now},
    )
    attempts = sorted({a.cluster_attempt for a, _ in adopted if a.cluster_attempt is not None})
    started: set[str] = set()
    if attempts:
        rows = sql.run(work.connection, _STARTED, {"ids": sql.array(work.connection, attempts)})
        started = {row[0] for row in rows}
    for assignment, listed_seq in adopted:
        seq = assignment.last_seq
        if assignment.cluster_attempt is not None:
            # From a refused signal on, whose refusal the worker may not have heard, it sends again.
            seq = acknowledged_up_to(work.connection, assignment.id, listed_seq, seq)
        decision.adopted.append(
            AdoptedJob(
                assignment_id=assignment.id,
                seq=seq,
                log_offset=assignment.log_bytes,
                started=assignment.cluster_attempt in started,
            )
        )
        reason = assignment.abort_reason
        if reason is not None:
            text = _abort_text(reason)
            decision.aborts.append(AbortWanted(assignment.id, assignment.worker_id, reason, text))


def _lose(
    work: Work, decision: ResumeDecision, assignment: Assignment, error: str, peaks_mb: Mapping[str, int]
) -> None:
    if assignment.report_held:
        return
    if assignment.cluster_attempt is not None:
        decision.lost_members.append(assignment.id)
        return
    lose(work, assignment, error, peaks_mb.get(assignment.id))


def _abort_text(reason: AbortReason) -> str:
    return {
        AbortReason.USER: "aborted on request",
        AbortReason.EVALUATION: "its evaluation was aborted",
        AbortReason.REVOKED: "the worker's registration was revoked",
        AbortReason.DRAINED: "the worker is drained",
        AbortReason.UNANSWERED: "the assignment was left unanswered",
        AbortReason.CLUSTER: "its cluster attempt is over",
    }[reason]
