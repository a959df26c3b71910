"""A running server, protocol-level workers, and clusters of builds for them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
from gradient_protocol.kinds import FailureKind, JobKind
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_server.db.queries.registry import Registration
from gradient_server.db.runner import Database

from tests.fakes.pool import Pool, running_pool
from tests.fakes.worker import FakeWorker, build_nothing, connected_worker
from tests.fixtures.derivations import derivation

__all__ = ["Scene", "running_scene"]


@dataclass
class Scene:
    """`workers` by name, each with one build slot."""

    pool: Pool
    stack: AsyncExitStack
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    registered: dict[str, Registration] = field(default_factory=dict)

    async def connect(
        self,
        name: str,
        *,
        running: Sequence[w.ResumedJob] = (),
        evaluations: int = 0,
        zone: str | None = None,
        expect_resume: bool = True,
    ) -> FakeWorker:
        """A worker, registered at its first time, until the scene ends."""
        return await self.stack.enter_async_context(
            self.session(
                name, running=running, evaluations=evaluations, zone=zone, expect_resume=expect_resume
            )
        )

    @asynccontextmanager
    async def session(
        self,
        name: str,
        *,
        running: Sequence[w.ResumedJob] = (),
        evaluations: int = 0,
        zone: str | None = None,
        expect_resume: bool = True,
    ) -> AsyncIterator[FakeWorker]:
        """The same, for as long as the block lasts."""
        if name not in self.registered:
            self.registered[name] = await self.pool.register(name)
        registered = self.registered[name]
        with trio.move_on_after(5):
            # A session of before has ended here; the server may not have noticed yet.
            while self.pool.services.sessions.get(registered.worker_id) is not None:
                await trio.sleep(0.01)
        async with connected_worker(
            await self.pool.stream(),
            worker_id=registered.worker_id,
            tokens={registered.peer: registered.token},
            name=name,
            running=running,
            evaluations=evaluations,
            zone=zone,
            expect_resume=expect_resume,
        ) as worker:
            self.workers[name] = worker
            yield worker

    async def submit(
        self,
        name: str,
        members: Sequence[tuple[str, bool]],
        *,
        same_zone: bool = False,
        retry_budget: int = 1,
        pins: Sequence[str | None] | None = None,
    ) -> str:
        """A cluster of builds, one for each (role, primary), by an evaluation; its id."""
        derivations = [
            derivation(named := f"{name}-{number}-1.0", attr=named) for number in range(len(members))
        ]
        cluster = shapes.Cluster(
            name=name,
            same_zone=same_zone,
            retry_budget=retry_budget,
            members=[
                shapes.ClusterMember(
                    drv_path=one.drv_path,
                    role=role,
                    primary=primary,
                    pin=None if pins is None else pins[number],
                )
                for number, (one, (role, primary)) in enumerate(zip(derivations, members, strict=True))
            ],
        )
        await self.pool.submit()
        async with self.session("evaluator", evaluations=1) as evaluator:
            job = await evaluator.accept(JobKind.EVAL)
            evaluator.report(
                job.assignment_id,
                1,
                shapes.EvalResult(derivations=derivations, clusters=[cluster], warnings=[], errors=[]),
            )
            evaluator.complete(job.assignment_id, 2)
            await evaluator.expect_where(server.ReportAck, lambda ack: ack.seq == 2)
        found = await self.pool.scalar(
            "SELECT id FROM cluster_job WHERE name = :name ORDER BY created_at DESC LIMIT 1", name=name
        )
        assert isinstance(found, str)
        return found

    def ask(self, *names: str) -> None:
        """These workers have a free slot."""
        for name in names:
            self.workers[name].send(w.RequestJob(kind=JobKind.BUILD))

    async def assigned(self, *names: str) -> dict[str, server.AssignJob]:
        """What each of these was assigned."""
        return {name: await self.workers[name].expect(server.AssignJob) for name in names}

    def accept(self, assigned: dict[str, server.AssignJob]) -> None:
        """All of them hold their job."""
        for name, one in assigned.items():
            self.workers[name].send(w.AssignJobResponse(assignment_id=one.assignment_id, accepted=True))

    async def started(self, *names: str) -> dict[str, server.StartCluster]:
        """The StartCluster of each."""
        return {name: await self.workers[name].expect(server.StartCluster) for name in names}

    async def run(self, *names: str) -> dict[str, server.AssignJob]:
        """Ask, hold, start."""
        self.ask(*names)
        assigned = await self.assigned(*names)
        self.accept(assigned)
        await self.started(*names)
        return assigned

    def signal(
        self,
        name: str,
        assigned: server.AssignJob,
        *,
        seq: int,
        topic: str = "up",
        payload: bytes = b"",
        attempt: str | None = None,
    ) -> None:
        """A member says something to all others."""
        assert assigned.cluster is not None
        self.workers[name].send(
            w.ClusterSignalReport(
                assignment_id=assigned.assignment_id,
                seq=seq,
                attempt=attempt or assigned.cluster.attempt,
                topic=topic,
                payload=payload,
            )
        )

    async def succeed(self, name: str, assigned: server.AssignJob, *, seq: int = 1) -> None:
        """The member's build succeeds; its reports begin with this number."""
        await build_nothing(self.workers[name], assigned, first_seq=seq)

    def fail(self, name: str, assigned: server.AssignJob, *, seq: int = 1, kind: str = "Permanent") -> None:
        """The member's build fails."""
        self.workers[name].send(
            w.JobFailed(
                assignment_id=assigned.assignment_id,
                seq=seq,
                kind=FailureKind(kind),
                error="exit status 1",
                missing_paths=[],
                spans=[],
                spans_dropped=0,
            )
        )

    async def until_cluster(self, cluster: str, status: str) -> None:
        """The cluster has this status."""
        await self.pool.until("SELECT status FROM cluster_job WHERE id = :id", status, id=cluster)


@asynccontextmanager
async def running_scene(database: Database, base_dir: Path, **flags: object) -> AsyncIterator[Scene]:
    """A server without workers."""
    async with running_pool(database, base_dir, **flags) as pool, AsyncExitStack() as stack:
        yield Scene(pool, stack)


async def nothing_more(worker: FakeWorker, *kinds: type, within_secs: float = 0.2) -> None:
    """No message of these classes comes for a while."""
    await trio.sleep(within_secs)
    found = [message for message in worker.unread if isinstance(message, kinds)]
    assert found == []
