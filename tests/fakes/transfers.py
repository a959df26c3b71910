"""The worker's real transfers, on sessions that a test opens, slows down and cuts."""

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import trio
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages import server
from gradient_protocol.messages.common import Message, NarAbort
from gradient_protocol.messages.worker import ResumedJob
from gradient_server.db.queries.registry import Registration
from gradient_worker.executor.spans import SpanLog
from gradient_worker.server_clock import ServerClock
from gradient_worker.stores.base import PathInfo
from gradient_worker.stores.directory import DirectoryStore
from gradient_worker.threads import ThreadPool
from gradient_worker.transfer import Transfers
from gradient_worker.wire import Link, Wire

from tests.fakes.worker import FakeWorker, connected_worker

__all__ = ["CutStream", "Mover", "source_path"]

_BY_TRANSFER = (server.NarStreamHeader, server.NarUnavailable, server.NarPush, NarAbort)
_BY_REQUEST = (server.UploadGrant, server.UploadCommitted)


def source_path(number: int) -> str:
    """A path that an evaluation may upload."""
    return f"{number:032d}-source"


class CutStream(trio.abc.Stream):
    """A stream that breaks once so many bytes were sent, or received; None: never."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        sent_bytes: int | None = None,
        received_bytes: int | None = None,
    ) -> None:
        self._stream = stream
        self._to_send = sent_bytes
        self._to_receive = received_bytes

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._to_send is not None:
            if len(data) > self._to_send:
                await self._stream.send_all(memoryview(data)[: self._to_send])
                await self._break()
            self._to_send -= len(data)
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._stream.receive_some(max_bytes)
        if self._to_receive is not None:
            self._to_receive -= len(data)
            if self._to_receive < 0:
                await self._break()
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def _break(self) -> None:
        await trio.aclose_forcefully(self._stream)
        raise trio.BrokenResourceError("cut")


@dataclass
class Mover:
    """A worker that moves NARs and does nothing else. `store` is a real one, below `base_dir`."""

    store: DirectoryStore
    registration: Registration
    threads: ThreadPool = field(default_factory=lambda: ThreadPool(8))
    ids: IdSource = field(default_factory=IdSource)
    link: Link = field(default_factory=Link)
    spans: SpanLog = field(default_factory=lambda: SpanLog(ServerClock(time.time, time.monotonic)))
    # What the server answered, over all sessions: where it would go on.
    offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.transfers = Transfers(link=self.link, store=self.store, threads=self.threads, ids=self.ids)

    @classmethod
    def open(cls, base_dir: Path, registration: Registration) -> Self:
        """The store below `base_dir`, which need not exist."""
        base_dir.mkdir(parents=True, exist_ok=True)
        return cls(DirectoryStore.open(base_dir), registration)

    @asynccontextmanager
    async def session(
        self, stream: trio.abc.Stream, *, running: Iterable[ResumedJob] = ()
    ) -> AsyncIterator[FakeWorker]:
        """A session that carries transfers, until the block ends."""
        async with connected_worker(
            stream,
            worker_id=self.registration.worker_id,
            tokens={self.registration.peer: self.registration.token},
            incarnation="mover",
            running=running,
        ) as worker:
            wire = Wire(worker.connection, zstd=worker.outcome.capabilities.zstd)

            def divert(message: Message) -> bool:
                if isinstance(message, server.NarStreamHeader):
                    self.offsets.append(message.offset)
                elif isinstance(message, server.UploadGrant) and isinstance(message.target, server.Relay):
                    self.offsets.append(message.target.offset)
                if isinstance(message, _BY_TRANSFER):
                    size = len(message.data) if isinstance(message, server.NarPush) else 0
                    wire.deliver(message.transfer_id, message, size)
                elif isinstance(message, _BY_REQUEST):
                    wire.deliver(message.request_id, message)
                else:
                    return False
                return True

            worker.divert = divert
            self.link.attach(wire)
            try:
                yield worker
            finally:
                self.link.detach()

    def make(self, tree: Path, number: int, candidates: Iterable[str] = ()) -> PathInfo:
        """The tree, which is moved, as a path that an evaluation may upload."""
        return self.store.register_output(source_path(number), tree, candidates)

    def make_file(self, scratch: Path, number: int, contents: bytes) -> PathInfo:
        """A file with these contents as such a path."""
        made = scratch / f"made-{number}"
        made.write_bytes(contents)
        return self.make(made, number)

    async def take_job(self, worker: FakeWorker) -> server.AssignJob:
        """An evaluation, accepted."""
        return await worker.accept(JobKind.EVAL)
