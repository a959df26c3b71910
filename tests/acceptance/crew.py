"""Workers at the level of the protocol, in the test's own process, that move between several servers.

They hold, start, upload and report as agents do, list what they have when they come back, and go where a
server sends them.
"""

import random
import time
from dataclasses import dataclass, field
from typing import Any

import trio
from gradient_protocol.address import connect, parse_address
from gradient_protocol.errors import SessionClosed
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import FailureKind, JobKind, ResumeState
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import Message

from tests.acceptance.instances import Servers
from tests.fakes.worker import FakeWorker, RefusedError, built, connected_worker, nar_of, scores_of

__all__ = ["Crew", "evaluation_of"]

REPEAT_SECS = 5.0
AGAIN_SECS = 0.3


def evaluation_of(number: int, sizes: list[int]) -> shapes.EvalResult:
    """What evaluation `number` evaluates to: clusters of these sizes, a build a member."""
    derivations, clusters = [], []
    for position, size in enumerate(sizes):
        members = [_derivation(f"e{number}-c{position}-m{member}") for member in range(size)]
        derivations += members
        clusters.append(
            shapes.Cluster(
                name=f"e{number}-c{position}",
                same_zone=False,
                retry_budget=1,
                members=[
                    shapes.ClusterMember(drv_path=one.drv_path, role="node", primary=False) for one in members
                ],
            )
        )
    return shapes.EvalResult(derivations=derivations, clusters=clusters, warnings=[], errors=[])


def _derivation(name: str) -> shapes.Derivation:
    digest = "".join(random.Random(name).choices("0123456789abcdfghijklmnpqrsvwxyz", k=32))
    return shapes.Derivation(
        drv_path=f"{digest}-{name}.drv",
        name=name,
        system="any",
        features=[],
        command=["/bin/true"],
        env={},
        outputs=[shapes.DerivationOutput(name="out", path=f"{digest}-{name}")],
        inputs=[],
        sources=[],
        prefer_local=False,
        attr=name,
    )


@dataclass
class Work:
    """An assignment at a worker, across its sessions."""

    job: server.AssignJob
    state: ResumeState
    started: trio.Event
    uploaded: bool = False
    reports: list[w.JobUpdate | w.JobCompleted | w.JobFailed] = field(default_factory=list)
    acknowledged: int = 0
    aborted: bool = False

    @property
    def kind(self) -> JobKind:
        """Which slot it takes."""
        return JobKind.BUILD if isinstance(self.job.job, shapes.BuildJob) else JobKind.EVAL


@dataclass
class Seen:
    """What all workers saw. Wall seconds, as the servers' on the same machine."""

    heard: dict[str, float] = field(default_factory=dict)  # by assignment: its StartCluster
    alone: list[str] = field(default_factory=list)  # builds that came without a cluster
    early: list[str] = field(default_factory=list)  # StartCluster for what was not held
    redirected: int = 0
    refused: int = 0


class Hand:
    """One worker: one slot of each kind."""

    def __init__(self, crew: "Crew", name: str, worker_id: str, tokens: dict[str, str], home: int) -> None:
        self.crew = crew
        self.name = name
        self.worker_id = worker_id
        self.tokens = tokens
        self.home = home
        self.work: dict[str, Work] = {}
        self.incarnation = crew.ids.new()
        self.address = crew.servers.addresses[home]

    async def run(self) -> None:
        """Connects again and again."""
        while True:
            try:
                await self._session()
            except* RefusedError as group:
                self._refused(group)
            except* (OSError, SessionClosed):
                # Cut, perhaps in the middle of a word.
                self._next()
            await trio.sleep(AGAIN_SECS * (0.5 + random.random()))

    def _refused(self, group: BaseExceptionGroup[RefusedError]) -> None:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, RefusedError)
        refused = error.outcome
        if refused.code == 421:
            assert refused.url is not None
            self.crew.seen.redirected += 1
            self.address = refused.url
        else:
            assert refused.code in (496, 503), refused
            self.crew.seen.refused += 1

    def _next(self) -> None:
        alive = [
            address
            for address, process in zip(self.crew.servers.addresses, self.crew.servers.processes, strict=True)
            if process.code is None
        ]
        if self.address not in alive:
            self.address = random.choice(alive)

    async def _session(self) -> None:
        listed = [
            w.ResumedJob(
                assignment_id=one.job.assignment_id,
                job_id=one.job.job_id,
                state=one.state,
                seq=one.acknowledged,
            )
            for one in self.work.values()
        ]
        stream = await connect(parse_address(self.address))
        async with (
            connected_worker(
                stream,
                worker_id=self.worker_id,
                tokens=self.tokens,
                name=self.name,
                incarnation=self.incarnation,
                running=listed,
                expect_resume=False,
            ) as fake,
            trio.open_nursery() as nursery,
        ):
            try:
                self._resumed(fake, await fake.expect(server.ResumeAck, within_secs=30.0), nursery)
                nursery.start_soon(self._repeat, fake)
                while fake.ended is None:
                    self._take(fake, await fake.expect_where(Message, _is_ours, within_secs=3600), nursery)
            except AssertionError:
                if fake.ended is None:
                    raise
            nursery.cancel_scope.cancel()
        self._next()

    def _resumed(self, fake: FakeWorker, ack: server.ResumeAck, nursery: trio.Nursery) -> None:
        for dropped in ack.dropped:
            self.work.pop(dropped, None)
        for adopted in ack.adopted:
            work = self.work[adopted.assignment_id]
            work.acknowledged = max(work.acknowledged, adopted.seq)
            for report in work.reports:
                if report.seq > adopted.seq:
                    fake.send(report)
            nursery.start_soon(self._do, fake, work)
        fake.send(w.RequestJobList())
        self._ask(fake)

    async def _repeat(self, fake: FakeWorker) -> None:
        for n in range(1_000_000):
            await trio.sleep(REPEAT_SECS)
            fake.send(w.WorkerMetrics(n=n, lateness_secs=0.0, cpu_usage_pct=1.0, ram_free_mb=8000))
            self._ask(fake)

    def _ask(self, fake: FakeWorker) -> None:
        busy = {one.kind for one in self.work.values() if one.state is not ResumeState.DONE}
        for kind in JobKind:
            if kind not in busy:
                fake.send(w.RequestJob(kind=kind))

    def _take(self, fake: FakeWorker, message: Message, nursery: trio.Nursery) -> None:
        if isinstance(message, server.AssignJob):
            self._assigned(fake, message, nursery)
        elif isinstance(message, server.JobOffer | server.JobListChunk):
            fake.send(scores_of(message.candidates))
        elif isinstance(message, server.StartCluster):
            self._start(message)
        elif isinstance(message, server.AbortCluster):
            for work in list(self.work.values()):
                if work.job.cluster is not None and work.job.cluster.attempt == message.attempt:
                    self._abort(fake, work)
        elif isinstance(message, server.ReportAck):
            work = self.work.get(message.assignment_id)
            if work is not None:
                work.acknowledged = max(work.acknowledged, message.seq)
                if work.state is ResumeState.DONE and work.acknowledged >= work.reports[-1].seq:
                    del self.work[message.assignment_id]

    def _assigned(self, fake: FakeWorker, message: server.AssignJob, nursery: trio.Nursery) -> None:
        if message.cluster is not None and self.home in self.crew.mute:
            return
        if message.cluster is None and isinstance(message.job, shapes.BuildJob):
            self.crew.seen.alone.append(message.job_id)
        state = ResumeState.RUNNING if message.cluster is None else ResumeState.HELD
        work = self.work[message.assignment_id] = Work(message, state, trio.Event())
        fake.send(w.AssignJobResponse(assignment_id=message.assignment_id, accepted=True))
        nursery.start_soon(self._do, fake, work)

    def _start(self, message: server.StartCluster) -> None:
        for one in self.work.values():
            if one.job.cluster is not None and one.job.cluster.attempt == message.attempt:
                if one.state is ResumeState.HELD:
                    self.crew.seen.heard[one.job.assignment_id] = time.time()
                    one.state = ResumeState.RUNNING
                    one.started.set()
                return
        self.crew.seen.early.append(f"{self.name}: {message.attempt}")

    def _abort(self, fake: FakeWorker, work: Work) -> None:
        """A held member is let go without a word; a running one confirms."""
        work.aborted = True
        if work.state is ResumeState.HELD:
            del self.work[work.job.assignment_id]
        elif work.state is ResumeState.RUNNING:
            failed = w.JobFailed(
                assignment_id=work.job.assignment_id,
                seq=len(work.reports) + 1,
                kind=FailureKind.ABORTED,
                error="",
                missing_paths=[],
                spans=[],
                spans_dropped=0,
            )
            self._report(fake, work, failed)
        self._ask(fake)

    async def _do(self, fake: FakeWorker, work: Work) -> None:
        """The job, from where it stands. A session that ends leaves the rest to the next one."""
        if work.state is ResumeState.HELD:
            await work.started.wait()
        if work.state is not ResumeState.RUNNING:
            return
        job = work.job.job
        if isinstance(job, shapes.BuildJob):
            await self.crew.go.wait()
            await trio.sleep(self.crew.work_secs)
            await self._build(fake, work, job)
        elif not work.aborted:
            number = self.crew.number_of(job)
            update = evaluation_of(number, self.crew.sizes[number])
            self._report(fake, work, w.JobUpdate(assignment_id=work.job.assignment_id, seq=1, update=update))
            self._complete(fake, work)
        self._ask(fake)

    async def _build(self, fake: FakeWorker, work: Work, job: shapes.BuildJob) -> None:
        outputs = []
        for output in job.outputs:
            nar = nar_of(output.path.encode())
            try:
                await fake.upload(work.job.assignment_id, output.path, nar)
            except AssertionError:
                if fake.ended is not None or work.aborted:
                    return
                raise
            outputs.append(built(output, nar))
        if work.aborted or work.state is not ResumeState.RUNNING:
            return
        update = shapes.BuildOutput(outputs=outputs, products=[], substituted=False)
        self._report(fake, work, w.JobUpdate(assignment_id=work.job.assignment_id, seq=1, update=update))
        self._complete(fake, work)

    def _complete(self, fake: FakeWorker, work: Work) -> None:
        done = w.JobCompleted(
            assignment_id=work.job.assignment_id, seq=len(work.reports) + 1, spans=[], spans_dropped=0
        )
        self._report(fake, work, done)

    def _report(
        self, fake: FakeWorker, work: Work, report: w.JobUpdate | w.JobCompleted | w.JobFailed
    ) -> None:
        work.reports.append(report)
        if not isinstance(report, w.JobUpdate):
            work.state = ResumeState.DONE
        fake.send(report)


def _is_ours(message: Message) -> bool:
    return isinstance(
        message,
        server.AssignJob
        | server.JobOffer
        | server.JobListChunk
        | server.StartCluster
        | server.AbortCluster
        | server.ReportAck,
    )


class Crew:
    """Workers spread over the servers, and what is evaluated by them.

    Builds wait for `go`, then take `work_secs`. Workers whose home is in `mute` leave members unanswered.
    """

    def __init__(self, servers: Servers, *, work_secs: float = 0.05) -> None:
        self.servers = servers
        self.work_secs = work_secs
        self.ids = IdSource()
        self.seen = Seen()
        self.sizes: list[list[int]] = []
        self.evaluations: list[str] = []
        self.go = trio.Event()
        self.mute: set[int] = set()
        self.hands: list[Hand] = []

    async def staff(self, count: int, nursery: trio.Nursery) -> None:
        """Registers workers by turns at all servers, and connects each to the one it was registered at."""
        for number in range(count):
            home = number % self.servers.count
            name = f"host-{number}"
            made = await trio.to_thread.run_sync(self.servers.post, home, "/workers", {"name": name})
            peer, token = made["peers_line"].split(":", 1)
            hand = Hand(self, name, made["worker_id"], {peer: token}, home)
            self.hands.append(hand)
            nursery.start_soon(hand.run)

    async def submit(self, sizes: list[int], at: int) -> None:
        """One evaluation with clusters of these sizes, through this server."""
        number = len(self.sizes)
        self.sizes.append(sizes)
        body = {
            "task": f"t{number}",
            "source": {"type": "Git", "url": f"https://example.invalid/{number}"},
        }
        answer = await trio.to_thread.run_sync(self.servers.post, at, "/evaluations", body)
        self.evaluations.append(answer["evaluation"])

    def number_of(self, job: Any) -> int:  # noqa: ANN401 - one of the wire's evaluations
        """Which submission it is."""
        return int(job.source.url.rsplit("/", 1)[1])
