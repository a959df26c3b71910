"""A server at the level of the protocol, over memory streams: it answers a real agent, and decides nothing.

`FakeServer.sessions` gives a FakeSession for each connection that the agent makes. Heartbeats, uploads,
downloads, logs and reports are answered as a server would; what a test waits for, it takes with
`expect`. Anything automatic can be switched off by name (`session.automatic`).
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import trio
import trio.testing
import zstandard
from gradient_protocol.address import Address, UnixAddress, open_listeners
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.errors import SessionClosed
from gradient_protocol.handshake import Refusal, Rejected, Verification, handshake_as_server
from gradient_protocol.kinds import Compression, ResumeState, UploadOutcome
from gradient_protocol.limits import MAX_CHUNK_DATA
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import BulkAck, Message

__all__ = ["FakeServer", "FakeSession", "Stored"]

M = TypeVar("M", bound=Message)
TOKEN = "token"
PEER = "peer"
NOTHING_SECS = 0.3


@dataclass(frozen=True, slots=True)
class Stored:
    """A NAR as the server holds it: compressed."""

    nar: bytes
    references: tuple[str, ...] = ()

    @property
    def nar_hash(self) -> str:
        return "sha256:" + hashlib.sha256(self.nar).hexdigest()

    @property
    def nar_size(self) -> int:
        return len(self.nar)


@dataclass
class _Upload:
    request: w.UploadRequest
    data: bytearray = field(default_factory=bytearray)


class FakeServer:
    """All sessions of one agent. `paths`: what is stored, by store path."""

    def __init__(self) -> None:
        self.paths: dict[str, Stored] = {}
        self.logs: dict[str, bytearray] = {}
        self.reports: dict[str, list[Message]] = {}
        self.uploads: dict[str, _Upload] = {}
        self.refusal: Refusal | None = None
        self.refuse_connections = 0
        self.refuse_signals: str | None = None
        self._dialled, self.sessions_in = trio.open_memory_channel[trio.abc.Stream](100)

    async def dial(self, address: Address) -> trio.abc.Stream:
        """What the agent connects with."""
        del address
        if self.refuse_connections:
            self.refuse_connections -= 1
            raise ConnectionRefusedError("refused")
        ours, theirs = trio.testing.memory_stream_pair()
        await self._dialled.send(ours)
        return theirs

    async def listen(
        self, socket: Path, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Take connections on a Unix socket, for agents in processes of their own."""
        (listener,) = await open_listeners(UnixAddress(socket))
        task_status.started()
        await self.accept_from(listener)

    async def accept_from(self, listener: trio.abc.Listener[trio.abc.Stream]) -> None:
        """Take connections from a listener."""
        async with listener:
            while True:
                await self._dialled.send(await listener.accept())

    async def session(self, nursery: trio.Nursery, *, resume: bool = True) -> "FakeSession":
        """The agent's next connection, after its handshake and, with `resume`, its ResumeAck."""
        stream = await self.sessions_in.receive()
        session = FakeSession(self, stream)
        await nursery.start(session.run)
        if resume:
            await session.resume()
        return session

    def begin_upload(self, request: w.UploadRequest, data: bytes) -> None:
        """The server holds this much of an upload already."""
        self.uploads[request.request_id] = _Upload(request, bytearray(data))

    async def peers_of(self, hello: w.InitConnection) -> tuple[str, ...] | Refusal:
        return self.refusal or (PEER,)

    async def verify(self, hello: w.InitConnection, tokens: object) -> Verification | Refusal:
        assert isinstance(tokens, dict)
        if tokens.get(PEER) == TOKEN:
            return Verification((PEER,), {})
        return Verification((), {PEER: "wrong token"})


class FakeSession:
    """One connection. `messages`: everything the agent said that was not answered automatically."""

    def __init__(self, owner: FakeServer, stream: trio.abc.Stream) -> None:
        self.owner = owner
        self.connection = Connection(stream, Side.SERVER)
        self.automatic = {"heartbeat", "reports", "logs", "uploads", "downloads"}
        self.messages: list[Message] = []
        self.log_chunks: list[w.LogChunk] = []
        self.beats: list[w.WorkerMetrics] = []
        self._stream = stream
        self.rejected: Rejected | None = None
        self.closed = trio.Event()
        self._changed = trio.Event()
        self.scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self.connection.run)
                    everything = shapes.Capabilities(fetch=True, eval=True, build=True, zstd=True)
                    outcome = await handshake_as_server(
                        self.connection,
                        self.owner,
                        capabilities=everything,
                        instance="fake",
                        clock=time.time,
                    )
                    if isinstance(outcome, Rejected):
                        self.rejected = outcome
                        await self.connection.aclose(flush_secs=1)
                        task_status.started()
                        nursery.cancel_scope.cancel()
                        return
                    task_status.started()
                    await self._read()
                    nursery.cancel_scope.cancel()
            finally:
                self.closed.set()
                with trio.CancelScope(shield=True):
                    await self.connection.aclose()

    async def _read(self) -> None:
        while True:
            try:
                message = await self.connection.receive()
                if not await self._answer(message):
                    self.messages.append(message)
            except SessionClosed:
                return
            finally:
                self._changed.set()
                self._changed = trio.Event()

    def send(self, message: Message) -> None:
        self.connection.send(message)

    async def resume(self, **log_offsets: int) -> w.ResumeJobs:
        """Take the agent's introduction and adopt everything it lists."""
        await self.expect(w.WorkerCapabilities)
        listed = await self.expect(w.ResumeJobs)
        adopted = [
            server.AdoptedJob(
                assignment_id=one.assignment_id,
                seq=len(self.owner.reports.get(one.assignment_id, [])),
                log_offset=len(self.owner.logs.get(one.assignment_id, b"")),
                started=one.state is ResumeState.RUNNING,
            )
            for one in listed.running
        ]
        self.send(server.ResumeAck(adopted=adopted, dropped=[]))
        await self.expect(w.RequestJobList)
        return listed

    async def expect(
        self, kind: type[M], matches: Callable[[M], bool] = lambda _: True, *, within_secs: float = 30
    ) -> M:
        """The first message of this class (that matches), which is taken from `messages`."""
        with trio.fail_after(within_secs):
            while True:
                for index, message in enumerate(self.messages):
                    if isinstance(message, kind) and matches(message):
                        return self.messages.pop(index)  # type: ignore[return-value]  # of `kind`
                if self.closed.is_set():
                    raise AssertionError(f"closed before {kind.__name__}; left: {self.messages}")
                await self._changed.wait()

    async def expect_any(self, *kinds: type[Message]) -> Message:
        """The first message of any of these classes."""
        while True:
            for index, message in enumerate(self.messages):
                if isinstance(message, kinds):
                    return self.messages.pop(index)
            await self._changed.wait()

    async def expect_beat(self) -> w.WorkerMetrics:
        """The last heartbeat that was answered."""
        with trio.fail_after(10):
            while not self.beats:
                await self._changed.wait()
        return self.beats[-1]

    async def raw(self, data: bytes) -> None:
        """Send bytes that no connection would; nothing else may be on its way."""
        await trio.testing.wait_all_tasks_blocked()
        await self._stream.send_all(data)

    async def expect_none(self, kind: type[Message], *, for_secs: float = NOTHING_SECS) -> None:
        """Nothing of this class comes."""
        await trio.sleep(for_secs)
        assert not [message for message in self.messages if isinstance(message, kind)]

    async def _answer(self, message: Message) -> bool:
        match message:
            case w.WorkerMetrics() if "heartbeat" in self.automatic:
                self.beats.append(message)
                self.send(server.HeartbeatAck(n=message.n, server_time=time.time()))
            case w.LogChunk() if "logs" in self.automatic:
                self._store_log(message)
            case w.JobUpdate(seq=int()) | w.JobCompleted() | w.JobFailed() | w.ClusterSignalReport():
                self._store_report(message)
                return False
            case w.UploadRequest() | w.UploadChunk() | w.UploadFinished() | w.UploadCancel():
                if "uploads" not in self.automatic:
                    return False
                self._upload(message)
                return False
            case w.NarRequest() if "downloads" in self.automatic:
                await self.serve(message)
            case _:
                return False
        return True

    def _store_report(
        self, message: w.JobUpdate | w.JobCompleted | w.JobFailed | w.ClusterSignalReport
    ) -> None:
        if "reports" not in self.automatic:
            return
        kept = self.owner.reports.setdefault(message.assignment_id, [])
        assert message.seq is not None
        assert message.seq <= len(kept) + 1, "a gap in seq"
        if message.seq == len(kept) + 1:
            kept.append(message)
        refused = self.owner.refuse_signals if isinstance(message, w.ClusterSignalReport) else None
        self.send(server.ReportAck(assignment_id=message.assignment_id, seq=message.seq, refused=refused))

    def _store_log(self, chunk: w.LogChunk) -> None:
        log = self.owner.logs.setdefault(chunk.assignment_id, bytearray())
        data = zstandard.ZstdDecompressor().decompress(chunk.data, max_output_size=MAX_CHUNK_DATA)
        assert chunk.offset <= len(log), "a gap in the log"
        if chunk.offset == len(log):
            log += data
        self.log_chunks.append(chunk)
        self.send(BulkAck(id=chunk.assignment_id, offset=len(log)))

    def _upload(self, message: Message) -> None:
        match message:
            case w.UploadRequest():
                held = self.owner.uploads.setdefault(message.request_id, _Upload(message))
                target: server.UploadTarget = server.Relay(offset=len(held.data))
                if message.path in self.owner.paths:
                    target = server.Skip()
                self.send(server.UploadGrant(request_id=message.request_id, target=target))
            case w.UploadChunk():
                held = self.owner.uploads[message.request_id]
                assert message.offset == len(held.data)
                held.data += message.data
                self.send(BulkAck(id=message.request_id, offset=len(held.data)))
            case w.UploadFinished():
                held = self.owner.uploads[message.request_id]
                nar = zstandard.ZstdDecompressor().decompressobj().decompress(bytes(held.data))
                stored = Stored(nar, tuple(message.references))
                assert (stored.nar_hash, len(nar)) == (message.nar_hash, message.nar_size)
                self.owner.paths[held.request.path] = stored
                committed = server.UploadCommitted(request_id=message.request_id, outcome=UploadOutcome.OK)
                self.send(committed)

    async def serve(self, request: w.NarRequest) -> None:
        stored = self.owner.paths.get(request.path)
        if stored is None:
            self.send(server.NarUnavailable(transfer_id=request.transfer_id, reason="not held"))
            return
        data = zstandard.compress(stored.nar)
        self.send(self.header(request, stored, file_size=len(data)))
        stream = self.connection.open_bulk(request.transfer_id)
        for begin in range(0, len(data), MAX_CHUNK_DATA):
            part = data[begin : begin + MAX_CHUNK_DATA]
            end = begin + len(part)
            push = server.NarPush(
                transfer_id=request.transfer_id, offset=begin, data=part, last=end == len(data)
            )
            await stream.send(push, end_offset=end)
        stream.close()

    @staticmethod
    def header(request: w.NarRequest, stored: Stored, *, file_size: int) -> server.NarStreamHeader:
        return server.NarStreamHeader(
            transfer_id=request.transfer_id,
            path=request.path,
            nar_hash=stored.nar_hash,
            nar_size=stored.nar_size,
            file_size=file_size,
            compression=Compression.ZSTD,
            references=list(stored.references),
            offset=0,
        )
