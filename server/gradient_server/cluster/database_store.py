"""The real `ClusterStore`: each method one transaction of the database."""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.shapes import Job

from gradient_server.clock import Clock
from gradient_server.cluster.store import MemberClaim
from gradient_server.cluster.verdict import Verdict
from gradient_server.db.queries.claims import Claim, accept_assignment
from gradient_server.db.queries.clusters import (
    ClusterClaim,
    claim_cluster,
    note_survivors_ended,
    start_cluster_attempt,
)
from gradient_server.db.queries.reservations import (
    Reservation,
    clear_reservation,
    release_reservation,
    take_reservation,
    update_reservation,
)
from gradient_server.db.queries.signals import StoredSignal, signals_after
from gradient_server.db.runner import Database
from gradient_server.db.tables import worker
from gradient_server.domain.cluster import ClusterInfo
from gradient_server.domain.events import Event
from gradient_server.graph.cluster_load import load_clusters
from gradient_server.graph.jobs import load_job
from gradient_server.graph.prepares import fail_prepare
from gradient_server.graph.settings import GraphSettings
from gradient_server.graph.settle import settle_verdict
from gradient_server.scheduler.claim_store import LoadJob

__all__ = ["DatabaseClusterStore"]


class DatabaseClusterStore:
    """Names its instance in everything that it writes."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock,
        ids: IdSource,
        instance_id: str,
        graph_settings: GraphSettings | None = None,
        load_job: LoadJob = load_job,
    ) -> None:
        self._database = database
        self._clock = clock
        self._ids = ids
        self._instance_id = instance_id
        self._graph_settings = graph_settings or GraphSettings()
        self._load_job = load_job

    @property
    def instance_id(self) -> str:
        """The server instance that owns the attempts."""
        return self._instance_id

    @property
    def is_shared(self) -> bool:
        """SQLite has one instance, held by a lock file."""
        return self._database.dialect == "postgresql"

    async def load(self, cluster_ids: Sequence[str] | None) -> list[ClusterInfo]:
        """Clusters with their members and open attempts; None: all that have not ended."""
        return await self._database.read(lambda connection: load_clusters(connection, cluster_ids))

    async def worker_names(self, worker_ids: Sequence[str]) -> dict[str, str]:
        """Names by id, of those that are known."""
        if not worker_ids:
            return {}
        query = sa.select(worker.c.id, worker.c.name).where(worker.c.id.in_(worker_ids))
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return {row.id: row.name for row in rows}

    async def claim(
        self, attempt_id: str, cluster_id: str, members: Sequence[MemberClaim]
    ) -> list[Job] | None:
        """`claim_cluster`, with the wire's jobs of the members; None: nothing was written."""
        now = self._clock.now()
        claim = ClusterClaim(
            attempt_id=attempt_id,
            cluster_id=cluster_id,
            instance_id=self._instance_id,
            members=[self._claim(attempt_id, one) for one in members],
        )

        def work(connection: sa.Connection) -> list[Job] | None:
            if not claim_cluster(connection, claim, now=now):
                return None
            return [self._load_job(connection, one.member.job_key) for one in members]

        return await self._database.run(work)

    def _claim(self, attempt_id: str, one: MemberClaim) -> Claim:
        return Claim(
            assignment_id=one.assignment_id,
            job_key=one.member.job_key,
            worker_id=one.worker_id,
            instance_id=self._instance_id,
            cluster_attempt=attempt_id,
            cluster_role=one.member.role,
            cluster_index=one.member.index,
            missing_nar_size=one.missing_nar_size,
            dependency_count=one.dependency_count,
        )

    async def start(self, attempt_id: str, seats: Sequence[tuple[str, str]]) -> bool:
        """Every acceptance, as (assignment, worker), and `start_cluster_attempt`, in one transaction."""
        now = self._clock.now()

        def work(connection: sa.Connection) -> bool:
            # By id, as all who lock several rows do.
            for assignment_id, worker_id in sorted(seats):
                accept_assignment(
                    connection, assignment_id, worker_id, now=now, instance_id=self._instance_id
                )
            return start_cluster_attempt(connection, attempt_id, self._instance_id, now=now)

        return await self._database.run(work)

    async def fail_prepare(self, attempt_id: str, reason: str) -> list[Event]:
        """Closes the attempt as PrepareFailed and queues its members again, if it is open still."""
        now = self._clock.now()

        def work(connection: sa.Connection) -> list[Event]:
            _, events = fail_prepare(connection, attempt_id, reason, now=now, instance_id=self._instance_id)
            return events

        return await self._database.run(work)

    async def settle(self, attempt_id: str, lost: Mapping[str, str]) -> tuple[Verdict | None, list[Event]]:
        """The verdict and all that follows; None: undecided yet, or closed before. `lost`: why, by id."""
        now = self._clock.now()

        def work(connection: sa.Connection) -> tuple[Verdict | None, list[Event]]:
            settlement = settle_verdict(
                connection,
                attempt_id,
                instance_id=self._instance_id,
                now=now,
                ids=self._ids,
                settings=self._graph_settings,
                lost=lost,
            )
            return (None, []) if settlement is None else (settlement.verdict, settlement.events)

        return await self._database.run(work)

    async def survivors_ended(self, attempt_id: str) -> None:
        """Nobody waits for members of the closed attempt any more."""
        await self._database.run(lambda connection: note_survivors_ended(connection, attempt_id))

    async def signals_after(
        self, attempt_id: str, n: int, role: str, index: int, *, limit: int
    ) -> list[StoredSignal]:
        """What is meant for a member after number `n`, in order."""
        return await self._database.read(
            lambda connection: signals_after(connection, attempt_id, n, role, index, limit=limit)
        )

    async def reserve(self, cluster_id: str, seats: Mapping[str, str], reserved_at: float) -> bool:
        """Takes the pool's one reservation, or moves it to other seats. False: another holds it."""
        wanted = Reservation(
            cluster_id=cluster_id, instance_id=self._instance_id, reserved_at=reserved_at, seats=seats
        )
        return await self._database.run(
            lambda connection: (
                update_reservation(connection, cluster_id, self._instance_id, seats)
                or take_reservation(connection, wanted)
            )
        )

    async def release_reservation(self, cluster_id: str) -> None:
        """Gives it back."""
        await self._database.run(
            lambda connection: release_reservation(connection, cluster_id, self._instance_id)
        )

    async def clear_reservation(self) -> None:
        """At start-up: whatever this instance had reserved."""
        await self._database.run(lambda connection: clear_reservation(connection, self._instance_id))
