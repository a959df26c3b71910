"""Answers to assignments, and jobs that a worker could not read."""

import sqlalchemy as sa
import structlog
from gradient_protocol.messages.worker import AssignJobResponse

from gradient_server.domain.events import Event
from gradient_server.graph.reports import fail_unreadable_job
from gradient_server.net.services import Services
from gradient_server.net.session import RefusedJob, Session

__all__ = ["answer_assignment", "job_refused"]

log = structlog.get_logger(__name__)


async def answer_assignment(services: Services, session: Session, message: AssignJobResponse) -> None:
    """Accepted or not; committed before any report of the assignment is applied."""
    if session.held(message.assignment_id) is None:
        return
    await services.scheduler.assignment_answered(session.worker_id, message)


async def job_refused(services: Services, session: Session, item: RefusedJob) -> None:
    """The job fails Permanent; a cluster member counts as rejected (protocol.md, Reports)."""
    held = session.held(item.assignment_id)
    if held is None:
        return
    log.warning("a worker cannot read its job", assignment=item.assignment_id, reason=item.reason)
    if held.is_member:
        services.clusters.unreadable(item.assignment_id, item.reason)
        return

    def fail(connection: sa.Connection) -> tuple[None, list[Event]]:
        return None, fail_unreadable_job(
            connection,
            worker_id=session.worker_id,
            instance_id=services.instance_id,
            assignment_id=item.assignment_id,
            reason=item.reason,
            now=services.clock.now(),
            ids=services.ids,
            settings=services.graph_settings,
        )

    await services.transact(fail)
