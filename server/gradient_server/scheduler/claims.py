"""What the scheduler asks of the database, and nothing else; tests answer in its place.

Whatever is returned is committed, and what follows from it comes as events, for the bus.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradient_protocol.kinds import EvalStep
from gradient_protocol.messages.shapes import Job

from gradient_server.domain.events import Event
from gradient_server.domain.job import PendingJob
from gradient_server.domain.status import AbortReason

__all__ = ["ClaimRequest", "ClaimStore", "ClaimsInDoubtError"]


class ClaimsInDoubtError(Exception):
    """Whether the claims are stored is not known: they have to be abandoned, as far as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """A decision that is to become a row. `steps`: the half of a split evaluation; None for a whole job."""

    assignment_id: str
    job_id: str
    worker_id: str
    steps: tuple[EvalStep, ...] | None = None
    missing_count: int | None = None
    missing_nar_size: int | None = None
    dependency_count: int | None = None
    score_breakdown: Mapping[str, object] | None = None


class ClaimStore(Protocol):
    """Claims, and what undoes them."""

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Job | None]:
        """All in one transaction; None where the job was not there to be claimed. ClaimsInDoubtError."""
        ...

    async def accept(self, assignment_id: str, worker_id: str) -> bool:
        """The worker took the job. False: the assignment is closed already."""
        ...

    async def reject(self, assignment_id: str, worker_id: str) -> list[Event]:
        """The worker did not take it: the job waits again, unless an abort was stored."""
        ...

    async def abandon(self, assignment_ids: Sequence[str]) -> list[Event]:
        """Claimed, and not to be sent any more."""
        ...

    async def abort(self, assignment_id: str, reason: AbortReason, text: str) -> list[Event]:
        """Stores that the assignment is to be aborted."""
        ...

    async def reload(self, job_ids: Sequence[str]) -> list[PendingJob]:
        """Those of the jobs that wait, as the database has them."""
        ...
