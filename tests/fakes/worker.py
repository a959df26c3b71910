"""A worker at the level of the protocol: it says what a worker says and builds nothing.

`FakeWorker` is a connected session that a test drives message by message; `work` answers every job
by a script of the test's choosing, for whole graphs and for benchmarks.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import trio
import zstandard
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.errors import ProtocolError, SessionClosed
from gradient_protocol.handshake import HandshakeOutcome, Rejected, handshake_as_worker
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind, ResumeState, UploadOutcome
from gradient_protocol.limits import MAX_CHUNK_DATA, PROTO_VERSION
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import Message

__all__ = ["FakeWorker", "JobScript", "RefusedError", "connected_worker", "nar_of", "work"]

M = TypeVar("M", bound=Message)
JobScript = Callable[["FakeWorker", server.AssignJob], Awaitable[None]]

BUILDS_AND_EVALUATES = shapes.Capabilities(fetch=True, eval=True, build=True, zstd=True)


class RefusedError(AssertionError):
    """The server refused the handshake; `outcome` says why."""

    def __init__(self, outcome: Rejected) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


class FakeWorker:
    """One session. What it did not expect yet stays queued in `unread`, in order."""

    def __init__(self, connection: Connection, outcome: HandshakeOutcome, ids: IdSource) -> None:
        self.connection = connection
        self.outcome = outcome
        self.ids = ids
        self.unread: list[Message] = []
        self._arrived = trio.lowlevel.ParkingLot()
        self.ended: str | None = None
        # Whether somebody else takes a message as it comes; it is not put into `unread` then.
        self.divert: Callable[[Message], bool] = lambda _: False

    def send(self, message: Message) -> None:
        """Queue a control message."""
        self.connection.send(message)

    async def expect(self, kind: type[M], *, within_secs: float = 30.0) -> M:
        """The next message of this class, whatever else came before it. AssertionError if none does."""
        return await self.expect_where(kind, lambda _: True, within_secs=within_secs)

    async def expect_where(
        self, kind: type[M], matches: Callable[[M], bool], *, within_secs: float = 30.0
    ) -> M:
        """The next message of this class that matches."""
        with trio.move_on_after(within_secs):
            while True:
                for position, message in enumerate(self.unread):
                    if isinstance(message, kind) and matches(message):
                        del self.unread[position]
                        return message
                if self.ended is not None:
                    raise AssertionError(f"no {kind.__name__}: {self.ended}; unread: {self.unread}")
                await self._arrived.park()
        raise AssertionError(f"no {kind.__name__} within {within_secs} s; unread: {self.unread}")

    async def read_forever(self) -> None:
        """Run beside everything else; ends with the session."""
        try:
            while True:
                message = await self.connection.receive()
                if not self.divert(message):
                    self.unread.append(message)
                    self._arrived.unpark_all()
        except (SessionClosed, ProtocolError) as error:
            self.ended = f"the session ended: {error!r}"
            self._arrived.unpark_all()

    def report(self, assignment_id: str, seq: int, update: shapes.JobUpdateKind) -> None:
        """A numbered update."""
        self.send(w.JobUpdate(assignment_id=assignment_id, seq=seq, update=update))

    def complete(self, assignment_id: str, seq: int) -> None:
        """The final report of a success."""
        self.send(w.JobCompleted(assignment_id=assignment_id, seq=seq, spans=[], spans_dropped=0))

    async def accept(self, kind: JobKind, *, within_secs: float = 30.0) -> server.AssignJob:
        """Ask for a job of this kind, score what is offered, and accept what comes."""
        self.send(w.RequestJob(kind=kind))
        while True:
            message = await self.expect_where(
                Message,
                lambda m: isinstance(m, server.AssignJob | server.JobOffer | server.JobListChunk),
                within_secs=within_secs,
            )
            if isinstance(message, server.AssignJob):
                self.send(w.AssignJobResponse(assignment_id=message.assignment_id, accepted=True))
                return message
            assert isinstance(message, server.JobOffer | server.JobListChunk)
            self.send(scores_of(message.candidates))

    async def upload(
        self, assignment_id: str, path: str, nar: bytes, references: Iterable[str] = ()
    ) -> server.UploadCommitted | None:
        """Upload by Relay; None if the server skips it."""
        request_id = self.ids.new()
        self.send(
            w.UploadRequest(
                request_id=request_id, assignment_id=assignment_id, path=path, size_estimate=len(nar)
            )
        )
        grant = await self.expect_where(server.UploadGrant, lambda m: m.request_id == request_id)
        if isinstance(grant.target, server.Skip):
            return None
        assert isinstance(grant.target, server.Relay)
        data = zstandard.compress(nar) if self.outcome.capabilities.zstd else nar
        await self.push(request_id, data, grant.target.offset, nar, references)
        return await self.expect_where(server.UploadCommitted, lambda m: m.request_id == request_id)

    async def push(
        self, request_id: str, data: bytes, offset: int, nar: bytes, references: Iterable[str] = ()
    ) -> None:
        """The chunks of an upload and its `UploadFinished`."""
        stream = self.connection.open_bulk(request_id, offset)
        while offset < len(data):
            chunk = data[offset : offset + MAX_CHUNK_DATA]
            end = offset + len(chunk)
            await stream.send(w.UploadChunk(request_id=request_id, offset=offset, data=chunk), end_offset=end)
            offset = end
        finished = w.UploadFinished(
            request_id=request_id,
            nar_hash=nar_hash(nar),
            nar_size=len(nar),
            file_size=len(data),
            references=list(references),
            etags=[],
        )
        await stream.send(finished, end_offset=offset)
        await stream.wait_written()
        stream.close()


def scores_of(candidates: Iterable[server.Candidate]) -> w.CandidateScores:
    """Nothing is missing."""
    return w.CandidateScores(
        scores=[
            w.CandidateScore(
                job_id=candidate.job_id, missing_count=0, missing_nar_size=0, outputs_present=False
            )
            for candidate in candidates
        ],
        is_final=True,
    )


def nar_hash(nar: bytes) -> str:
    """As the wire spells it."""
    return f"sha256:{hashlib.sha256(nar).hexdigest()}"


def nar_of(contents: bytes, *, executable: bool = False) -> bytes:
    """The NAR of one regular file."""

    def text(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data + b"\0" * (-len(data) % 8)

    words = [b"nix-archive-1", b"(", b"type", b"regular"]
    if executable:
        words += [b"executable", b""]
    words += [b"contents", contents, b")"]
    return b"".join(text(word) for word in words)


@asynccontextmanager
async def connected_worker(
    stream: trio.abc.Stream,
    *,
    worker_id: str,
    tokens: Mapping[str, str],
    name: str = "fake",
    incarnation: str | None = None,
    capabilities: shapes.Capabilities = BUILDS_AND_EVALUATES,
    builds: int = 1,
    evaluations: int = 1,
    running: Iterable[w.ResumedJob] = (),
    resume: bool = True,
    expect_resume: bool = True,
    features: Iterable[str] = (),
    zone: str | None = None,
) -> AsyncIterator[FakeWorker]:
    """Handshake, capabilities and resume over a connected stream. AssertionError if it is refused."""
    ids = IdSource()
    connection = Connection(stream, Side.WORKER)
    hello = w.InitConnection(
        version=PROTO_VERSION,
        worker_id=worker_id,
        name=name,
        incarnation=incarnation or ids.new(),
        capabilities=capabilities,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(connection.run)
        try:
            outcome = await handshake_as_worker(connection, hello, tokens)
            if not isinstance(outcome, HandshakeOutcome):
                raise RefusedError(outcome)
            fake = FakeWorker(connection, outcome, ids)
            nursery.start_soon(fake.read_forever)
            fake.send(capabilities_of(builds, evaluations, features, zone))
            if resume:
                fake.send(w.ResumeJobs(running=list(running)))
                if expect_resume:
                    await fake.expect(server.ResumeAck)
            yield fake
        finally:
            await connection.aclose(flush_secs=0.5)
            nursery.cancel_scope.cancel()


def capabilities_of(
    builds: int, evaluations: int, features: Iterable[str] = (), zone: str | None = None
) -> w.WorkerCapabilities:
    """A machine that can do anything."""
    return w.WorkerCapabilities(
        architectures=["x86_64-linux"],
        system_features=list(features),
        max_concurrent_builds=builds,
        max_concurrent_evaluations=evaluations,
        cpu_count=4,
        ram_total_mb=8192,
        build_memory=False,
        cpu_core_score=3000.0,
        zone=zone,
    )


def resumed(assignment: server.AssignJob, seq: int, state: ResumeState = ResumeState.RUNNING) -> w.ResumedJob:
    """How an assignment is listed in `ResumeJobs`."""
    return w.ResumedJob(
        assignment_id=assignment.assignment_id, job_id=assignment.job_id, state=state, seq=seq
    )


async def work(fake: FakeWorker, run_job: JobScript, kinds: Iterable[JobKind] = tuple(JobKind)) -> None:
    """Works until cancelled: scores every offer, accepts every job and runs the script on each."""
    for kind in kinds:
        fake.send(w.RequestJob(kind=kind))
    fake.send(w.RequestJobList())

    async def run(assignment: server.AssignJob) -> None:
        await run_job(fake, assignment)
        fake.send(w.RequestJob(kind=kind_of(assignment)))

    async with trio.open_nursery() as nursery:
        while True:
            message = await fake.expect_where(
                Message,
                lambda m: isinstance(m, server.AssignJob | server.JobOffer | server.JobListChunk),
                within_secs=3600,
            )
            if isinstance(message, server.AssignJob):
                fake.send(w.AssignJobResponse(assignment_id=message.assignment_id, accepted=True))
                nursery.start_soon(run, message)
            elif isinstance(message, server.JobOffer | server.JobListChunk):
                fake.send(scores_of(message.candidates))


def kind_of(assignment: server.AssignJob) -> JobKind:
    """Build or Eval."""
    return JobKind.BUILD if isinstance(assignment.job, shapes.BuildJob) else JobKind.EVAL


async def build_nothing(fake: FakeWorker, assignment: server.AssignJob, *, first_seq: int = 1) -> None:
    """A build script: every output is one small file, uploaded, reported and completed."""
    job = assignment.job
    assert isinstance(job, shapes.BuildJob)
    outputs = []
    for output in job.outputs:
        nar = nar_of(output.path.encode())
        committed = await fake.upload(assignment.assignment_id, output.path, nar)
        assert committed is None or committed.outcome is UploadOutcome.OK, committed
        outputs.append(built(output, nar))
    output_report = shapes.BuildOutput(outputs=outputs, products=[], substituted=False)
    fake.report(assignment.assignment_id, first_seq, output_report)
    fake.complete(assignment.assignment_id, first_seq + 1)
    await fake.expect_where(
        server.ReportAck, lambda m: m.assignment_id == assignment.assignment_id and m.seq == first_seq + 1
    )


def built(output: shapes.DerivationOutput, nar: bytes) -> shapes.BuiltOutput:
    """The report of one output."""
    return shapes.BuiltOutput(
        name=output.name,
        path=output.path,
        nar_hash=nar_hash(nar),
        nar_size=len(nar),
        references=[],
        contains_store_dir=False,
    )
