"""Aborts on their way to the workers: stored first, sent now and after each resume, reaped at last.

An abort that is not confirmed within 300 s closes its assignment as abandoned (protocol.md, "Lost
connections").
"""

from typing import Final

import sqlalchemy as sa
from gradient_protocol.messages.server import AbortJob

from gradient_server.db.tables import dispatched_job, worker
from gradient_server.domain.events import AbortWanted, Event
from gradient_server.domain.status import AbortReason
from gradient_server.graph.aborts import abort_assignments, reap_unconfirmed, unconfirmed_aborts
from gradient_server.net.services import Services

__all__ = ["UNCONFIRMED_SECS", "end_drains", "reap", "send_abort"]

UNCONFIRMED_SECS: Final = 300.0


def send_abort(services: Services, event: AbortWanted) -> None:
    """Tell the worker, if it is there; if not, it is told after its `ResumeAck`."""
    session = services.sessions.resumed(event.worker_id)
    if session is not None:
        session.send(AbortJob(assignment_id=event.assignment_id, reason=event.text))


def reap(services: Services, connection: sa.Connection) -> tuple[int, list[Event]]:
    """Closes what no worker has confirmed in time; how many."""
    now = services.clock.now()
    unconfirmed = unconfirmed_aborts(connection, services.instance_id, now - UNCONFIRMED_SECS)
    if not unconfirmed:
        return 0, []
    return len(unconfirmed), reap_unconfirmed(
        connection, unconfirmed, now=now, ids=services.ids, settings=services.graph_settings
    )


def end_drains(services: Services, connection: sa.Connection) -> tuple[int, list[Event]]:
    """Aborts what still runs past the deadline of its worker's drain; how many."""
    now = services.clock.now()
    row = dispatched_job.c
    late = connection.scalars(
        sa.select(row.id)
        .join(worker, worker.c.id == row.worker)
        .where(
            row.finished_at.is_(None),
            row.abort_requested_at.is_(None),
            row.instance == services.instance_id,
            worker.c.draining_deadline <= now,
        )
    ).all()
    if not late:
        return 0, []
    return len(late), abort_assignments(
        connection, late, AbortReason.DRAINED, now=now, ids=services.ids, text="the worker is drained"
    )
