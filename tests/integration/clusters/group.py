"""A pool with clusters: what the cluster's runner would do to the database, one call each."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
import trio
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.shapes import Cluster, ClusterMember, Derivation, SignalTarget
from gradient_protocol.messages.worker import ClusterSignalReport
from gradient_server.db.queries import uploads
from gradient_server.db.queries.claims import Claim, accept_assignment
from gradient_server.db.queries.clusters import ClusterClaim, claim_cluster, start_cluster_attempt
from gradient_server.domain.cluster import ClusterInfo
from gradient_server.domain.events import Event
from gradient_server.graph.cluster_load import load_clusters
from gradient_server.graph.prepares import fail_prepare
from gradient_server.graph.reports import ReportOutcome
from gradient_server.graph.settle import settle_verdict
from gradient_server.graph.verdicts import Settlement

from tests.fixtures.graph import store_path
from tests.integration.graph.pool import INSTANCE, Pool, derivation, hash_of, object_of

__all__ = ["INSTANCE", "ClusterPool", "Group", "cluster", "members", "race"]


def cluster(
    *names: str,
    primary: str | None = None,
    retry_budget: int = 1,
    same_zone: bool = False,
    name: str = "group",
    pins: Mapping[str, str] | None = None,
) -> Cluster:
    """A cluster of the builds of these names; the primary's role is `server`, all others' `client`."""
    pinned = pins or {}
    return Cluster(
        name=name,
        same_zone=same_zone,
        retry_budget=retry_budget,
        members=[
            ClusterMember(
                drv_path=store_path(f"{member}.drv"),
                role="server" if member == primary else "client",
                primary=member == primary,
                pin=pinned.get(member),
            )
            for member in names
        ],
    )


def members(*names: str) -> list[Derivation]:
    """Derivations of these names that need nothing."""
    return [derivation(name) for name in names]


@dataclass
class Group:
    """A claimed attempt: assignments and workers by the member's job key."""

    attempt: str
    cluster: str
    assignments: dict[str, str]


class ClusterPool(Pool):
    """Members are named by their derivation; each sits on a worker `on-<name>`."""

    async def with_cluster(self, *derivations: Derivation, cluster: Cluster, **fields: Any) -> str:  # noqa: ANN401 - many types
        """The evaluation that made it."""
        evaluation = await self.submit(**fields)
        await self.evaluate(evaluation, derivations, clusters=[cluster])
        return evaluation

    async def infos(self, ids: Sequence[str] | None = None) -> list[ClusterInfo]:
        return await self.database.read(lambda c: load_clusters(c, ids))

    async def cluster_id(self) -> str:
        """The newest cluster."""
        return str(await self.scalar("SELECT id FROM cluster_job ORDER BY created_at DESC, id DESC LIMIT 1"))

    async def cluster_status(self, cluster_id: str | None = None) -> str:
        wanted = cluster_id or await self.cluster_id()
        return str(await self.scalar("SELECT status FROM cluster_job WHERE id = :id", id=wanted))

    async def attempts(self) -> list[tuple[Any, ...]]:
        """(outcome, whether it started) of every attempt, the oldest first."""

        def do(connection: sa.Connection) -> list[tuple[Any, ...]]:
            text = "SELECT outcome, started_at IS NOT NULL FROM cluster_attempt ORDER BY created_at, id"
            return [(row[0], bool(row[1])) for row in connection.execute(sa.text(text))]

        return await self.run(do)

    async def claim_of(self, cluster_id: str | None = None) -> ClusterClaim:
        """The claim of a whole cluster, each member on a worker of its own."""
        [info] = await self.infos([cluster_id or await self.cluster_id()])
        attempt = self.ids.new()
        claims = []
        for member in info.members:
            worker = await self.worker(f"on-{member.job_key}")
            claims.append(
                Claim(
                    assignment_id=self.ids.new(),
                    job_key=member.job_key,
                    worker_id=worker,
                    instance_id=INSTANCE,
                    cluster_attempt=attempt,
                    cluster_role=member.role,
                    cluster_index=member.index,
                )
            )
        return ClusterClaim(attempt_id=attempt, cluster_id=info.id, instance_id=INSTANCE, members=claims)

    async def hold_group(self, cluster_id: str | None = None) -> Group:
        """Claims the cluster; every member accepts."""
        self.clock.advance(1)
        claim = await self.claim_of(cluster_id)
        assert await self.run(lambda c: claim_cluster(c, claim, now=self.clock.now()))

        def accept(connection: sa.Connection) -> None:
            for member in claim.members:
                assert accept_assignment(
                    connection, member.assignment_id, member.worker_id, now=self.clock.now()
                )

        await self.run(accept)
        for member in claim.members:
            self.queued.pop(member.job_key, None)
        assignments = {member.job_key: member.assignment_id for member in claim.members}
        return Group(claim.attempt_id, claim.cluster_id, assignments)

    async def start_group(self, cluster_id: str | None = None) -> Group:
        """The same, and the attempt starts."""
        group = await self.hold_group(cluster_id)
        assert await self.start(group)
        return group

    async def start(self, group: Group, instance: str = INSTANCE) -> bool:
        return await self.run(
            lambda c: start_cluster_attempt(c, group.attempt, instance, now=self.clock.now())
        )

    async def assignment(self, group: Group, name: str) -> tuple[str, str]:
        """The assignment of a member, and its worker's name."""
        key = await self.key(name)
        return group.assignments[key], f"on-{key}"

    async def succeeds(self, group: Group, name: str, *, upload: bool = True) -> ReportOutcome:
        """The member reports what it made, uploads it and completes."""
        assignment, worker = await self.assignment(group, name)
        job = await self.job(await self.key(name))
        await self.output(assignment, job, worker)
        if upload:
            for output in job.outputs:  # type: ignore[union-attr]  # it is a build
                await self.upload(assignment, output.path)
        return await self.complete(assignment, worker)

    async def fails(
        self,
        group: Group,
        name: str,
        kind: FailureKind = FailureKind.PERMANENT,
        **fields: Any,  # noqa: ANN401 - many types
    ) -> ReportOutcome:
        assignment, worker = await self.assignment(group, name)
        return await self.fail(assignment, kind, worker=worker, **fields)

    async def upload(self, assignment: str, path: str) -> None:
        """A finished upload that waits for the verdict."""
        request = self.ids.new()

        def do(connection: sa.Connection) -> None:
            now = self.clock.now()
            started = uploads.start_upload(
                connection,
                request=request,
                worker="w",
                assignment=assignment,
                path=path,
                lease_until=now + 300,
                now=now,
            )
            assert started is not None
            uploads.finish_upload(
                connection,
                request,
                nar_hash=hash_of(path),
                nar_size=100,
                object_name=object_of(request),
                file_size=50,
                compression="zstd",
                references=[],
            )

        await self.run(do)

    async def settle(self, group: Group, lost: Mapping[str, str] | None = None) -> Settlement | None:
        settlement = await self.run(
            lambda c: settle_verdict(
                c,
                group.attempt,
                instance_id=INSTANCE,
                now=self.clock.now(),
                ids=self.ids,
                settings=self.settings,
                lost=lost,
            )
        )
        if settlement is not None:
            self.publish(settlement.events)
        return settlement

    async def verdict(self, group: Group, lost: Mapping[str, str] | None = None) -> str | None:
        settlement = await self.settle(group, lost)
        return None if settlement is None else settlement.verdict.value

    async def fail_prepare(self, group: Group, reason: str = "a member rejected") -> tuple[bool, list[Event]]:
        failed, events = await self.run(
            lambda c: fail_prepare(c, group.attempt, reason, now=self.clock.now(), instance_id=INSTANCE)
        )
        self.publish(events)
        return failed, events

    async def signal(
        self,
        group: Group,
        name: str,
        topic: str = "address",
        payload: bytes = b"here",
        to: SignalTarget | None = None,
        **fields: Any,  # noqa: ANN401 - many types
    ) -> ReportOutcome:
        assignment, worker = await self.assignment(group, name)
        message = ClusterSignalReport(
            assignment_id=assignment,
            seq=fields.pop("seq", None) or self.next_seq(assignment),
            attempt=fields.pop("attempt", group.attempt),
            topic=topic,
            payload=payload,
            to=to,
        )
        return await self.report(message, worker)  # type: ignore[arg-type]  # any numbered report

    async def open_rows(self) -> int:
        return int(await self.scalar("SELECT COUNT(*) FROM dispatched_job WHERE finished_at IS NULL"))


async def race(pool: ClusterPool, *contenders: Callable[[sa.Connection], object]) -> list[object]:
    """All at once: on PostgreSQL each is inside its transaction before the first goes on."""
    barrier = threading.Barrier(len(contenders) if pool.database.dialect == "postgresql" else 1)
    answers: list[object] = [None] * len(contenders)

    async def contend(place: int, fn: Callable[[sa.Connection], object]) -> None:
        tries: list[int] = []

        def attempt(connection: sa.Connection) -> object:
            if not tries:
                tries.append(1)
                barrier.wait(10)
            return fn(connection)

        answers[place] = await pool.run(attempt)

    async with trio.open_nursery() as nursery:
        for place, contender in enumerate(contenders):
            nursery.start_soon(contend, place, contender)
    return answers
