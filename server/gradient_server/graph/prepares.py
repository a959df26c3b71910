"""A prepare that failed: nothing of it is left but a closed attempt (cluster-jobs.md, Prepare and Start).

No retry budget and no attempt of a member's job is used; the jobs are Queued again, and what a held
member reported never reaches them.
"""

import sqlalchemy as sa

from gradient_server.db.queries.clusters import close_open_attempt
from gradient_server.db.queries.uploads import drop_waiting_uploads
from gradient_server.domain.events import AssignmentClosed, Event, JobQueued, ObjectUnused
from gradient_server.domain.status import AttemptOutcome
from gradient_server.graph.jobs import load_pending

__all__ = ["fail_prepare"]


def fail_prepare(
    connection: sa.Connection,
    attempt_id: str,
    reason: str,
    *,
    now: float,
    instance_id: str | None = None,
) -> tuple[bool, list[Event]]:
    """Closes the attempt as PrepareFailed, its members' jobs Queued again. (False, []) if it is not
    open, was started, or is another instance's. `reason` is one line for people.
    """
    closed = close_open_attempt(
        connection,
        attempt_id,
        AttemptOutcome.PREPARE_FAILED,
        now=now,
        instance_id=instance_id,
        reason=reason,
    )
    if closed is None:
        return False, []
    events: list[Event] = [
        AssignmentClosed(one.assignment_id, one.job_key, one.kind, one.worker_id) for one in closed
    ]
    # A worker that sent something of a job that it only held: nobody takes it.
    dropped = drop_waiting_uploads(connection, [one.assignment_id for one in closed])
    events.extend(ObjectUnused(name) for name in dropped)
    waiting = [one.job_key for one in closed if one.requeued]
    if waiting:
        events.extend(JobQueued(job) for job in load_pending(connection, waiting, now))
    return True, events
