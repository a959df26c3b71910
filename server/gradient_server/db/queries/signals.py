"""An attempt's signals: stored with their place in its one order, read by who they are meant for
(protocol.md, "Signals")."""

import json
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from gradient_server.db.hot import HotStatement, execute_text

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "MAX_SIGNALS",
    "MAX_SIGNAL_BYTES",
    "StoredSignal",
    "acknowledged_up_to",
    "append_signal",
    "delete_old_signals",
    "note_refused_signal",
    "refused_signal",
    "signals_after",
]

MAX_PAYLOAD_BYTES: Final = 64 * 1024
MAX_SIGNALS: Final = 10_000
MAX_SIGNAL_BYTES: Final = 8 * 1024 * 1024
# A worker has at most 8 unacknowledged reports of an assignment: older ones are not sent again.
_REFUSALS_KEPT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSignal:
    """A signal of an attempt, `n` from 1. `to_index` None: every member of `to_role`; both None: all."""

    n: int
    sender_role: str
    sender_index: int
    topic: str
    payload: bytes
    to_role: str | None = None
    to_index: int | None = None


# One statement decides whether it still fits and which number it gets; the row's lock is the order.
_TAKE_NUMBER = HotStatement(
    """
UPDATE cluster_attempt SET signal_count = signal_count + 1, signal_bytes = signal_bytes + :size
WHERE id = :attempt AND started_at IS NOT NULL AND finished_at IS NULL
    AND signal_count < :max_signals AND signal_bytes + :size <= :max_bytes
RETURNING signal_count
"""
)
_INSERT = HotStatement(
    """
INSERT INTO cluster_signal
    (cluster_attempt, n, sender_role, sender_index, to_role, to_index, topic, payload, created_at)
VALUES (:attempt, :n, :role, :position, :to_role, :to_index, :topic, :payload, :now)
"""
)


def append_signal(
    connection: sa.Connection,
    attempt_id: str,
    *,
    sender: tuple[str, int],
    to_role: str | None,
    to_index: int | None,
    topic: str,
    payload: bytes,
    now: float,
) -> int | None:
    """Its `n`; None where the attempt is not started or over, or has as much as it may have."""
    limits = {"size": len(payload), "max_signals": MAX_SIGNALS, "max_bytes": MAX_SIGNAL_BYTES}
    taken = execute_text(connection, _TAKE_NUMBER, {"attempt": attempt_id, **limits})
    if not taken:
        return None
    n = int(taken[0][0])
    parameters = {
        "attempt": attempt_id,
        "n": n,
        "role": sender[0],
        "position": sender[1],
        "to_role": to_role,
        "to_index": to_index,
        "topic": topic,
        "payload": payload,
        "now": now,
    }
    execute_text(connection, _INSERT, parameters)
    return n


_AFTER = HotStatement(
    """
SELECT n, sender_role, sender_index, topic, payload, to_role, to_index FROM cluster_signal
WHERE cluster_attempt = :attempt AND n > :n
    AND NOT (sender_role = :role AND sender_index = :position)
    AND (to_role IS NULL OR (to_role = :role AND (to_index IS NULL OR to_index = :position)))
ORDER BY n LIMIT :many
"""
)


def signals_after(
    connection: sa.Connection, attempt_id: str, n: int, role: str, index: int, *, limit: int = MAX_SIGNALS
) -> list[StoredSignal]:
    """What is meant for the member `role`:`index` after number `n`, in order; at most `limit` of them."""
    parameters = {"attempt": attempt_id, "n": n, "role": role, "position": index, "many": limit}
    return [
        StoredSignal(
            n=row[0],
            sender_role=row[1],
            sender_index=row[2],
            topic=row[3],
            payload=bytes(row[4]),
            to_role=row[5],
            to_index=row[6],
        )
        for row in execute_text(connection, _AFTER, parameters)
    ]


_REFUSED = HotStatement("SELECT refused_signals FROM dispatched_job WHERE id = :assignment")
_NOTE_REFUSED = HotStatement(
    "UPDATE dispatched_job SET refused_signals = :refused WHERE id = :assignment",
    "UPDATE dispatched_job SET refused_signals = CAST(:refused AS JSON) WHERE id = :assignment",
)


def refused_signal(connection: sa.Connection, assignment_id: str, seq: int) -> str | None:
    """Why the signal under this number was refused, None if it was not (or long ago)."""
    return _refusals(connection, assignment_id).get(str(seq))


def acknowledged_up_to(connection: sa.Connection, assignment_id: str, after: int, last_seq: int) -> int:
    """How far reports after `after` may be acknowledged at once: a refusal needs an answer of its own."""
    refused = [int(seq) for seq in _refusals(connection, assignment_id) if after < int(seq) <= last_seq]
    return min(refused, default=last_seq + 1) - 1


def note_refused_signal(connection: sa.Connection, assignment_id: str, seq: int, reason: str) -> None:
    """Remembers it: the answer may get lost with the session, and the signal come again."""
    refusals = {**_refusals(connection, assignment_id), str(seq): reason}
    kept = dict(list(refusals.items())[-_REFUSALS_KEPT:])
    execute_text(connection, _NOTE_REFUSED, {"assignment": assignment_id, "refused": json.dumps(kept)})


def _refusals(connection: sa.Connection, assignment_id: str) -> dict[str, str]:
    rows = execute_text(connection, _REFUSED, {"assignment": assignment_id})
    value: Any = rows[0][0] if rows else None
    return (json.loads(value) if isinstance(value, str) else value) or {}


_DELETE_OLD = HotStatement(
    "DELETE FROM cluster_signal WHERE cluster_attempt IN"
    " (SELECT id FROM cluster_attempt WHERE finished_at < :before AND signal_count > 0)"
)


def delete_old_signals(connection: sa.Connection, *, finished_before: float) -> None:
    """The signals of attempts that ended before this wall time: nobody can receive them any more."""
    execute_text(connection, _DELETE_OLD, {"before": finished_before})
