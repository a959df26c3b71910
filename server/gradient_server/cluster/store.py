"""What cluster jobs ask of the database, and nothing else; tests answer in its place.

Whatever is returned is committed, and what follows from it comes as events, for the bus.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradient_protocol.messages.shapes import Job

from gradient_server.cluster.verdict import Verdict
from gradient_server.db.queries.signals import StoredSignal
from gradient_server.domain.cluster import ClusterInfo, MemberInfo
from gradient_server.domain.events import Event

__all__ = ["ClusterStore", "MemberClaim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberClaim:
    """A seat that is to become a row."""

    assignment_id: str
    member: MemberInfo
    worker_id: str
    missing_nar_size: int | None = None
    dependency_count: int | None = None


class ClusterStore(Protocol):
    """Each method is one transaction."""

    @property
    def instance_id(self) -> str:
        """The server instance that owns the attempts."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether other instances may write the same database."""
        ...

    async def load(self, cluster_ids: Sequence[str] | None) -> list[ClusterInfo]:
        """Clusters with their members and open attempts; None: all that have not ended."""
        ...

    async def worker_names(self, worker_ids: Sequence[str]) -> dict[str, str]:
        """Names by id, of those that are known."""
        ...

    async def claim(
        self, attempt_id: str, cluster_id: str, members: Sequence[MemberClaim]
    ) -> list[Job] | None:
        """`claim_cluster`, with the wire's jobs of the members; None: nothing was written."""
        ...

    async def start(self, attempt_id: str, seats: Sequence[tuple[str, str]]) -> bool:
        """Every acceptance, as (assignment, worker), and `start_cluster_attempt`; False: nothing of it."""
        ...

    async def fail_prepare(self, attempt_id: str, reason: str) -> list[Event]:
        """Closes the attempt as PrepareFailed and queues its members again, if it is open still."""
        ...

    async def settle(self, attempt_id: str, lost: Mapping[str, str]) -> tuple[Verdict | None, list[Event]]:
        """The verdict and all that follows; None: undecided yet, or closed before. `lost`: why, by id."""
        ...

    async def survivors_ended(self, attempt_id: str) -> None:
        """Nobody waits for members of the closed attempt any more."""
        ...

    async def signals_after(
        self, attempt_id: str, n: int, role: str, index: int, *, limit: int
    ) -> list[StoredSignal]:
        """What is meant for a member after number `n`, in order."""
        ...

    async def reserve(self, cluster_id: str, seats: Mapping[str, str], reserved_at: float) -> bool:
        """Takes the pool's one reservation, or moves it to other seats. False: another holds it."""
        ...

    async def release_reservation(self, cluster_id: str) -> None:
        """Gives it back."""
        ...

    async def clear_reservation(self) -> None:
        """At start-up: whatever this instance had reserved."""
        ...
