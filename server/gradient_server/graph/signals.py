"""Signals between members: who may send what, and to whom (protocol.md, Signals).

Outside a started attempt, from a non-member or to one who is none, a signal is dropped: acknowledged,
and counted. Beyond the limits it is refused, so that its sender's `send` fails. All others get their
place in the attempt's one order.
"""

from typing import Final

import sqlalchemy as sa
from gradient_protocol.messages.worker import ClusterSignalReport

from gradient_server.db.queries.signals import (
    MAX_PAYLOAD_BYTES,
    MAX_SIGNAL_BYTES,
    MAX_SIGNALS,
    StoredSignal,
    append_signal,
    note_refused_signal,
    signals_after,
)
from gradient_server.domain.events import SignalDropped, SignalStored
from gradient_server.graph import sql
from gradient_server.graph.assignments import Assignment
from gradient_server.graph.work import Work

__all__ = ["signals_for", "store_signal"]

BARRIER_TOPIC: Final = "gradient.barrier"
_RESERVED: Final = "gradient."
_MAX_TOPIC_CHARACTERS: Final = 255

_SENDER = sql.statement(
    "SELECT a.cluster_role, a.cluster_index, t.started_at IS NOT NULL FROM dispatched_job a"
    " JOIN cluster_attempt t ON t.id = a.cluster_attempt WHERE a.id = :id AND t.finished_at IS NULL"
)
_IS_MEMBER = sql.statement(
    "SELECT 1 FROM dispatched_job WHERE cluster_attempt = :attempt AND cluster_role = :role"
    " AND (:position IS NULL OR cluster_index = :position) LIMIT 1",
    "SELECT 1 FROM dispatched_job WHERE cluster_attempt = :attempt AND cluster_role = :role"
    " AND (CAST(:position AS INTEGER) IS NULL OR cluster_index = :position) LIMIT 1",
)
_ADDRESS = sql.statement(
    "SELECT cluster_attempt, cluster_role, cluster_index FROM dispatched_job WHERE id = :id"
)


def store_signal(work: Work, assignment: Assignment, report: ClusterSignalReport) -> str | None:
    """Stores the signal, or drops it. The reason where it is refused: the sender is told."""
    rows = sql.run(work.connection, _SENDER, {"id": assignment.id})
    if not rows or not rows[0][2] or report.attempt != assignment.cluster_attempt:
        _drop(work, assignment, report, "its attempt is not started, or over")
        return None
    role, index, _ = rows[0]
    reason = _refusal(report)
    if reason is None:
        target = report.to
        if target is not None:
            wanted = {"attempt": report.attempt, "role": target.role, "position": target.index}
            if not sql.run(work.connection, _IS_MEMBER, wanted):
                _drop(work, assignment, report, "its receiver is no member")
                return None
        n = append_signal(
            work.connection,
            report.attempt,
            sender=(role, index),
            to_role=None if target is None else target.role,
            to_index=None if target is None else target.index,
            topic=report.topic,
            payload=report.payload,
            now=work.now,
        )
        if n is not None:
            work.events.append(SignalStored(report.attempt, n))
            return None
        mib = MAX_SIGNAL_BYTES // (1024 * 1024)
        reason = f"the attempt has sent its {MAX_SIGNALS} signals or {mib} MiB of payloads"
    note_refused_signal(work.connection, assignment.id, report.seq, reason)
    return reason


def signals_for(
    connection: sa.Connection, assignment_id: str, n: int, *, limit: int = 1_000
) -> list[StoredSignal]:
    """What is meant for the member that has this assignment, after `n`: where a resume goes on."""
    rows = sql.run(connection, _ADDRESS, {"id": assignment_id})
    if not rows or rows[0][0] is None:
        return []
    attempt, role, index = rows[0]
    return signals_after(connection, attempt, n, role, index, limit=limit)


def _refusal(report: ClusterSignalReport) -> str | None:
    if len(report.payload) > MAX_PAYLOAD_BYTES:
        return f"a payload has at most {MAX_PAYLOAD_BYTES // 1024} KiB"
    if not 0 < len(report.topic) <= _MAX_TOPIC_CHARACTERS:
        return f"a topic has 1 to {_MAX_TOPIC_CHARACTERS} characters"
    if report.topic.startswith(_RESERVED) and report.topic != BARRIER_TOPIC:
        return f"topics that begin with {_RESERVED!r} are reserved"
    if report.topic == BARRIER_TOPIC and report.to is not None:
        return "a barrier is for all members"
    return None


def _drop(work: Work, assignment: Assignment, report: ClusterSignalReport, reason: str) -> None:
    work.events.append(SignalDropped(report.attempt, assignment.id, reason))
