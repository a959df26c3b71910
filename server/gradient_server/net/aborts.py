"""Aborts on their way to the workers: stored first, sent now and after each resume, reaped at last.

An abort that is not confirmed within 300 s closes its assignment as abandoned (protocol.md, "Lost
connections").
"""

from functools import partial
from typing import Final

import sqlalchemy as sa
import trio
from gradient_protocol.messages.server import AbortJob

from gradient_server.db.tables import dispatched_job, worker
from gradient_server.domain.events import AbortWanted, Event
from gradient_server.domain.status import AbortReason
from gradient_server.graph.aborts import abort_assignments, reap_unconfirmed, unconfirmed_aborts
from gradient_server.net.services import Services

__all__ = ["UNCONFIRMED_SECS", "reap_forever", "send_abort"]

UNCONFIRMED_SECS: Final = 300.0
_LOOK_EVERY_SECS: Final = 5.0


def send_abort(services: Services, event: AbortWanted) -> None:
    """Tell the worker, if it is there; if not, it is told after its `ResumeAck`."""
    session = services.sessions.resumed(event.worker_id)
    if session is not None:
        session.send(AbortJob(assignment_id=event.assignment_id, reason=event.text))


async def reap_forever(
    services: Services, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Close what no worker has confirmed in time, and abort what runs past the deadline of a drain."""
    task_status.started()
    while True:
        await trio.sleep(_LOOK_EVERY_SECS)
        await services.transact(partial(_reap, services))
        await services.transact(partial(_end_drains, services))


def _reap(services: Services, connection: sa.Connection) -> tuple[None, list[Event]]:
    now = services.clock.now()
    unconfirmed = unconfirmed_aborts(connection, services.instance_id, now - UNCONFIRMED_SECS)
    if not unconfirmed:
        return None, []
    return None, reap_unconfirmed(
        connection, unconfirmed, now=now, ids=services.ids, settings=services.graph_settings
    )


def _end_drains(services: Services, connection: sa.Connection) -> tuple[None, list[Event]]:
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
        return None, []
    return None, abort_assignments(
        connection, late, AbortReason.DRAINED, now=now, ids=services.ids, text="the worker is drained"
    )
