"""Where the scheduler ends and cluster jobs begin.

Members of clusters are no candidates: the scheduler tells a `MemberDesk` of them and of the workers,
and asks it which seats are reserved. Their assignments are in the pool like any other, marked with
their attempt, so that slots are counted once; only the desk opens and ends them.
"""

from collections.abc import Sequence
from typing import Protocol

from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.worker import AssignJobResponse, CandidateScore

from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.model import Assignment
from gradient_server.scheduler.worker import Worker

__all__ = ["MemberDesk", "NoMembers"]


class MemberDesk(Protocol):
    """Whoever starts clusters. All of it is synchronous."""

    def arrived(self, job: PendingJob) -> None:
        """A member can start, as far as it alone goes."""
        ...

    def left(self, job_key: str) -> None:
        """A member that had arrived cannot start any more."""
        ...

    def answered(self, assignment: Assignment, response: AssignJobResponse) -> None:
        """The worker answered a member's AssignJob."""
        ...

    def unanswered(self, assignment: Assignment, reason: str) -> None:
        """It did not answer for 30 s of a living session."""
        ...

    def abort_wanted(self, assignment_id: str) -> None:
        """An abort of a member's assignment is stored."""
        ...

    def worker_changed(self, worker: Worker) -> None:
        """A session is live, or capabilities, projects or draining have changed."""
        ...

    def worker_disconnected(self, worker_id: str) -> None:
        """A session ended."""
        ...

    def worker_lost(self, worker_id: str) -> None:
        """The grace after it is over."""
        ...

    def slot_idle(self, worker_id: str, kind: JobKind) -> None:
        """A worker asked and found nothing."""
        ...

    def list_requested(self, worker: Worker) -> None:
        """The worker begins its cache of candidates anew."""
        ...

    def scored(self, worker_id: str, scores: Sequence[CandidateScore]) -> None:
        """The worker scored candidates, members among them."""
        ...

    def backfill_secs(self, worker_id: str, kind: JobKind) -> float | None:
        """None: the worker's seat is not reserved. Else how long a single job may take there; 0: none."""
        ...


class NoMembers:
    """A desk for a server without cluster jobs, and for tests of the rest."""

    def arrived(self, job: PendingJob) -> None:
        """Waits in the tracker."""

    def left(self, job_key: str) -> None:
        """Nobody waited for it."""

    def answered(self, assignment: Assignment, response: AssignJobResponse) -> None:
        """Nothing was assigned."""

    def unanswered(self, assignment: Assignment, reason: str) -> None:
        """Nothing was assigned."""

    def abort_wanted(self, assignment_id: str) -> None:
        """Nothing was assigned."""

    def worker_changed(self, worker: Worker) -> None:
        """No seat changes."""

    def worker_disconnected(self, worker_id: str) -> None:
        """No seat is lost."""

    def worker_lost(self, worker_id: str) -> None:
        """No member is lost."""

    def slot_idle(self, worker_id: str, kind: JobKind) -> None:
        """Nobody waits for it."""

    def list_requested(self, worker: Worker) -> None:
        """No member was offered."""

    def scored(self, worker_id: str, scores: Sequence[CandidateScore]) -> None:
        """No member was offered."""

    def backfill_secs(self, worker_id: str, kind: JobKind) -> float | None:
        """Nothing is reserved."""
        del worker_id, kind
        return None
