"""Which builds of an evaluation run where, and in which stage, as one reader was told.

Claims and stages are no events, for the scheduler makes thousands a second: they are looked at a few
times a second instead, and what has changed since is told.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gradient_protocol.kinds import JobKind

from gradient_server.domain.events import BuildChanged
from gradient_server.domain.job import split_job_key
from gradient_server.domain.status import BuildStatus
from gradient_server.scheduler.model import Assignment, AssignmentState

__all__ = ["Running"]

Told = tuple[str, dict[str, Any]]


class Running:
    """By job key: the assignment and the stage that the reader knows of, and what a build is asked for as."""

    def __init__(self) -> None:
        self.attrs: dict[str, str | None] = {}
        self._assignments: dict[str, str] = {}
        self._stages: dict[str, str] = {}

    def told(self, job_key: str, assignment: Assignment | None) -> None:
        """The reader was told that the job runs. None: by whom is not known here (yet)."""
        if assignment is not None:
            self._assignments[job_key] = assignment.assignment_id
            if assignment.stage is not None:
                self._stages[job_key] = str(assignment.stage)

    def changed(self, job_key: str, event: BuildChanged) -> None:
        """The reader is told of the event."""
        if event.attr is not None:
            self.attrs[job_key] = event.attr
        if event.status != BuildStatus.ASSIGNED:
            self._forget(job_key)

    def look(self, jobs: Mapping[str, str], by_job: Mapping[str, Assignment]) -> Iterator[Told]:
        """What to tell: of `jobs` (names by key) with open assignments, and of those that have none now."""
        for job_key in [key for key, known in self._assignments.items() if _current(by_job, key) != known]:
            self._forget(job_key)
            # Given back by the worker: whoever ends a build says so, and it is forgotten by then.
            if job_key in jobs and _current(by_job, job_key) is None:
                yield self._build(job_key, jobs[job_key], BuildStatus.QUEUED, None)
        for job_key, assignment in by_job.items():
            if job_key not in jobs or assignment.kind is not JobKind.BUILD or not _is_sent(assignment):
                continue
            if job_key not in self._assignments:
                self._assignments[job_key] = assignment.assignment_id
                yield self._build(job_key, jobs[job_key], BuildStatus.ASSIGNED, assignment.worker_name)
            if assignment.stage is not None and self._stages.get(job_key) != assignment.stage:
                self._stages[job_key] = str(assignment.stage)
                build = split_job_key(job_key)[1]
                worker, stage = assignment.worker_name, str(assignment.stage)
                yield "stage", {"id": build, "name": jobs[job_key], "worker": worker, "stage": stage}

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
        self._stages.pop(job_key, None)


def _is_sent(assignment: Assignment) -> bool:
    return assignment.state is not AssignmentState.CLAIMING


def _current(by_job: Mapping[str, Assignment], job_key: str) -> str | None:
    assignment = by_job.get(job_key)
    return assignment.assignment_id if assignment is not None and _is_sent(assignment) else None
