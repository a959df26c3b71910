"""Cluster jobs without sockets and without a database: a `World` with a runner and its store in memory.

`settle` does what the loops do until nothing is left to do, so that tests decide when.
"""

from dataclasses import replace

from gradient_protocol.messages.server import AbortCluster, AssignJob, StartCluster
from gradient_protocol.messages.worker import AssignJobResponse
from gradient_server.cluster.runner import ClusterRunner
from gradient_server.cluster.settings import ClusterSettings
from gradient_server.cluster.verdict import MemberState
from gradient_server.domain.cluster import ClusterInfo, MemberInfo
from gradient_server.domain.events import ClusterQueued
from gradient_server.domain.status import ClusterStatus

from tests.fakes.cluster_store import FakeClusterStore
from tests.fakes.scheduler import START, World, build

__all__ = ["ClusterWorld", "cluster_info"]


def cluster_info(name: str, members: int = 2, **changes: object) -> ClusterInfo:
    """A cluster of builds `NAME-0`, ...; the first member is the `server`, the others are clients."""
    info = ClusterInfo(
        id=name,
        project="p",
        name=name,
        same_zone=False,
        prioritized=False,
        created_at=START,
        status=ClusterStatus.QUEUED,
        attempts=0,
        retry_budget=1,
        members=tuple(
            MemberInfo(
                job_key=f"build:{name}-{number}",
                role="client" if number else "server",
                index=max(number - 1, 0),
            )
            for number in range(members)
        ),
    )
    return replace(info, **changes)


class ClusterWorld(World):
    """A scheduler with the runner as its desk for members."""

    cluster_settings: ClusterSettings = ClusterSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clusters = FakeClusterStore(self.store, self.clock)
        self.runner = ClusterRunner(
            scheduler=self.scheduler,
            store=self.clusters,
            bus=self.bus,
            clock=self.clock,
            ids=self.scheduler.dispatcher._ids,
            settings=self.cluster_settings,
        )

    async def restarted(self) -> "ClusterWorld":
        """The server died and was started again: memory is gone, the database stays, nobody is connected."""
        after = type(self)(policy=self.policy, settings=self.settings, seed=self.seed + 1)
        after.clock.passed = self.clock.passed
        after.store.__dict__.update(queued=self.store.queued, open=self.store.open, jobs=self.store.jobs)
        rows = after.clusters
        rows.clusters, rows.attempts, rows.pending = (
            self.clusters.clusters,
            self.clusters.attempts,
            self.clusters.pending,
        )
        for cluster_id in rows.clusters:
            for attempt in rows.open_attempts(cluster_id):
                # It takes itself over: what had not started is closed.
                await rows.fail_prepare(attempt.id, "the server stopped before the start")
        await after.runner.load()
        after.scheduler.load(list(after.store.queued.values()))
        return after

    def submit(self, info: ClusterInfo, **changes: object) -> ClusterInfo:
        """The cluster and all its members are queued."""
        self.clusters.clusters[info.id] = info
        self.bus.publish([ClusterQueued(info)])
        for member in info.members:
            self.queue(build(member.job_key.removeprefix("build:"), cluster=info.id, **changes))
        return info

    async def single(self, name: str) -> None:
        """A single job is queued, and every worker has scored it."""
        self.queue(build(name))
        await self.settle()
        for worker_id in self.outboxes:
            self.score(worker_id, f"build:{name}")
        await self.settle()

    async def drain_work(self) -> None:
        """Every transaction that was asked for, one after another."""
        while self.runner.executor.has_work:
            await self.runner.executor.work_one()
        await self.runner.loader.load_wanted()
        await self.runner.reserver.rows.write()

    async def drain_lookups(self) -> None:
        """Jobs and clusters that were to be loaded, and rows that were to be written."""
        while self.scheduler.loops.has_look_ups:
            await self.scheduler.loops.look_up_batch()
        await self.runner.loader.load_wanted()
        await self.runner.reserver.rows.write()

    async def plan(self) -> None:
        """One pass of the planner, and what follows from it."""
        await self.settle()
        self.runner.passes.run_one()
        await self.drain_work()
        await self.settle()

    async def later(self, seconds: float) -> None:
        """Time passes; idle workers repeat their wish, as they do every 10 s; then a pass."""
        self.clock.passed += seconds
        for worker in list(self.scheduler.pool):
            for kind, slots in worker.slots.items():
                if slots.wish:
                    self.scheduler.request_job(worker.id, kind)
        await self.plan()

    def assignment(self, worker_id: str) -> AssignJob:
        """Takes out the one AssignJob that was sent to the worker."""
        (assigned,) = self.assigned(worker_id)
        return assigned

    async def reply(self, worker_id: str, message: AssignJob, *, accepted: bool = True) -> None:
        """The worker answers."""
        response = AssignJobResponse(assignment_id=message.assignment_id, accepted=accepted, reason="no")
        self.scheduler.answer_arrived(worker_id, response)
        await self.scheduler.assignment_answered(worker_id, response)
        await self.drain_work()

    async def report(self, assignment_id: str, state: MemberState) -> None:
        """A member's final report is stored."""
        self.bus.publish(self.clusters.report(assignment_id, state))
        await self.drain_work()

    async def start(self, *worker_ids: str) -> dict[str, AssignJob]:
        """Plans, and lets all of these accept; their assignments."""
        await self.plan()
        assigned = {worker_id: self.assignment(worker_id) for worker_id in worker_ids}
        for worker_id, message in assigned.items():
            await self.reply(worker_id, message)
        return assigned

    def starts(self, worker_id: str) -> list[StartCluster]:
        """Takes out what was sent."""
        return self.outboxes[worker_id].take(StartCluster)

    def aborts(self, worker_id: str) -> list[AbortCluster]:
        """Takes out what was sent."""
        return self.outboxes[worker_id].take(AbortCluster)
