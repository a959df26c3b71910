"""How far a running job is, as its worker said last: of its session, and of no database."""

from dataclasses import dataclass

from gradient_server.net.services import Services
from gradient_server.scheduler.model import Assignment

__all__ = ["Live", "live_of_assignment", "live_of_job"]


@dataclass(frozen=True, slots=True)
class Live:
    """`done` of `total`: inputs fetched, outputs uploaded, builds found; None while unknown.

    `stage`: of a build or of an evaluation, None before its first.
    """

    stage: str | None = None
    done: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        counted = f"{self.done} of {self.total}" if self.total is not None else ""
        return f"{self.stage or ''} {counted}".strip()


def live_of_job(services: Services, job_key: str) -> Live:
    """Of a job by its key; nothing is known of one that runs nowhere."""
    assignment = services.scheduler.pool.by_job.get(job_key)
    return Live() if assignment is None else live_of_assignment(services, assignment)


def live_of_assignment(services: Services, assignment: Assignment) -> Live:
    """Of an open assignment. May be called from any thread."""
    stage = None if assignment.stage is None else str(assignment.stage)
    session = services.sessions.get(assignment.worker_id)
    held = None if session is None else session.held(assignment.assignment_id)
    if held is None:
        return Live(stage)
    if held.eval_stage is not None:
        stage = str(held.eval_stage)
    done, total = held.progress or (None, None)
    return Live(stage, done, total)
