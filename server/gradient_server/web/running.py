"""Which jobs of an evaluation run where, and how far they are, as one reader was told.

Claims and stages are no events, for the scheduler makes thousands a second: they are looked at a few
times a second instead, and what has changed since is told.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gradient_protocol.kinds import JobKind

from gradient_server.domain.events import BuildChanged
from gradient_server.domain.job import split_job_key
from gradient_server.domain.status import BuildStatus
from gradient_server.scheduler.model import Assignment, AssignmentState
from gradient_server.web.live import Live

__all__ = ["Running"]

Told = tuple[str, dict[str, Any]]


class Running:
    """By job key: the assignment and the progress that the reader knows of; what a build is asked for as."""

    def __init__(self) -> None:
        self.attrs: dict[str, str | None] = {}
        self._assignments: dict[str, str] = {}
        self._live: dict[str, Live] = {}

    def told(self, job_key: str, assignment: Assignment, live: Live) -> None:
        """The reader was told that the job runs, and how far it is."""
        if _is_sent(assignment):
            self._assignments[job_key] = assignment.assignment_id
            self._live[job_key] = live

    def changed(self, job_key: str, event: BuildChanged) -> None:
        """The reader is told of the event."""
        if event.attr is not None:
            self.attrs[job_key] = event.attr
        if event.status != BuildStatus.ASSIGNED:
            self._forget(job_key)

    def look(
        self,
        jobs: Mapping[str, str],
        by_job: Mapping[str, Assignment],
        live_of: Callable[[Assignment], Live],
    ) -> Iterator[Told]:
        """What to tell: of `jobs` (names by key) with open assignments, and of those that have none now."""
        for job_key in [key for key, known in self._assignments.items() if _current(by_job, key) != known]:
            self._forget(job_key)
            # Given back by the worker: whoever ends a build says so, and it is forgotten by then.
            is_build = split_job_key(job_key)[0] is JobKind.BUILD
            if is_build and job_key in jobs and _current(by_job, job_key) is None:
                yield self._build(job_key, jobs[job_key], BuildStatus.QUEUED, None)
        for job_key, assignment in by_job.items():
            if job_key not in jobs or not _is_sent(assignment):
                continue
            is_build = assignment.kind is JobKind.BUILD
            if job_key not in self._assignments:
                self._assignments[job_key] = assignment.assignment_id
                if is_build:
                    yield self._build(job_key, jobs[job_key], BuildStatus.ASSIGNED, assignment.worker_name)
            live = live_of(assignment)
            if live.stage is not None and self._live.get(job_key) != live:
                self._live[job_key] = live
                worker = assignment.worker_name
                data = {"worker": worker, "stage": live.stage, "done": live.done, "total": live.total}
                if is_build:
                    yield "stage", {"id": split_job_key(job_key)[1], "name": jobs[job_key], **data}
                else:
                    yield "evaluating", data

    def _build(self, job_key: str, name: str, status: BuildStatus, worker: str | None) -> Told:
        data = {
            "id": split_job_key(job_key)[1],
            "name": name,
            "attr": self.attrs.get(job_key),
            "status": str(status),
            "worker": worker,
            "error": None,
        }
        return "build", data

    def _forget(self, job_key: str) -> None:
        self._assignments.pop(job_key, None)
        self._live.pop(job_key, None)


def _is_sent(assignment: Assignment) -> bool:
    return assignment.state is not AssignmentState.CLAIMING


def _current(by_job: Mapping[str, Assignment], job_key: str) -> str | None:
    assignment = by_job.get(job_key)
    return assignment.assignment_id if assignment is not None and _is_sent(assignment) else None
