"""One upload on one session: an UploadRequest, the bytes, and the commit."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

import trio
from gradient_protocol.errors import SessionClosed
from gradient_protocol.kinds import SpanKind, UploadOutcome
from gradient_protocol.limits import MAX_CHUNK_DATA, TRANSFER_STALL_SECS
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import (
    Relay,
    Skip,
    UploadCommitted,
    UploadGrant,
)
from gradient_protocol.messages.worker import (
    UploadCancel,
    UploadChunk,
    UploadFinished,
    UploadRequest,
)
from gradient_protocol.nar import NarError, compress

from gradient_worker.executor.spans import SpanLog
from gradient_worker.race import race
from gradient_worker.stores.base import PathInfo, Store
from gradient_worker.threads import Threads
from gradient_worker.timing import GRANT_WAIT_SECS
from gradient_worker.transfer.outcomes import Again, Refused, Uploaded
from gradient_worker.wire import Mailbox, Wire

__all__ = ["Upload"]

_CHUNKS_AT_ONCE: Final = 4
"""Of one trip to a thread: about 1 MiB, some ten milliseconds of compression."""


class Upload:
    """One UploadRequest on one session."""

    def __init__(
        self,
        wire: Wire,
        *,
        store: Store,
        threads: Threads,
        request_id: str,
        assignment_id: str,
        info: PathInfo,
        spans: SpanLog,
    ) -> None:
        self._wire = wire
        self._store = store
        self._threads = threads
        self._id = request_id
        self._assignment_id = assignment_id
        self._info = info
        self._spans = spans
        self._sent = 0
        self._over = False
        self._compress_span: int | None = None

    async def run(self) -> Uploaded | Refused | Again:
        mailbox = self._wire.open(self._id)
        try:
            self._wire.send(
                UploadRequest(
                    request_id=self._id,
                    assignment_id=self._assignment_id,
                    path=self._info.path,
                    size_estimate=self._info.nar_size,
                )
            )
            return await self._negotiate(mailbox)
        finally:
            mailbox.close()
            if not self._over:
                self._cancel()

    def _cancel(self) -> None:
        with contextlib.suppress(SessionClosed):  # its end frees the upload slot just as well
            self._wire.send(UploadCancel(request_id=self._id))

    async def _negotiate(self, mailbox: Mailbox[Message]) -> Uploaded | Refused | Again:
        asked_at = self._spans.now()
        grant: Message | None = None
        with trio.move_on_after(GRANT_WAIT_SECS):
            grant = await mailbox.receive()
        granted_at = self._spans.now()
        self._spans.add(SpanKind.UPLOAD_WAIT, asked_at, end=granted_at)
        if grant is None:
            return Again.STALLED
        if isinstance(grant, UploadCommitted):
            return self._committed(grant, granted_at)
        if not isinstance(grant, UploadGrant):
            return Refused(self._info.path, "the server answered the upload with something else")
        match grant.target:
            case Skip():
                self._over = True
                return Uploaded(self._info, pushed=False, granted_at=granted_at)
            case Relay(offset=0) if (pieces := self._store.take_packed(self._info)) is not None:
                return await self._relay_at_once(mailbox, pieces, granted_at)
            case Relay(offset=offset):
                return await self._relay(mailbox, offset, granted_at)
            case other:
                name = type(other).__name__
                return Refused(self._info.path, f"this worker cannot upload by {name} yet; use Relay")

    async def _relay(
        self, mailbox: Mailbox[Message], offset: int, granted_at: float
    ) -> Uploaded | Refused | Again:
        packed, chunks = trio.open_memory_channel[list[bytes]](0)
        outcome = await race(
            # The server may refuse half-way, so its answer is awaited beside the pushing.
            lambda: self._answer(mailbox, granted_at),
            lambda: self._pack(offset, packed),
            lambda: self._push(offset, chunks),
        )
        self._note_push(outcome, granted_at)
        return outcome

    async def _relay_at_once(
        self, mailbox: Mailbox[Message], pieces: Sequence[bytes], granted_at: float
    ) -> Uploaded | Refused | Again:
        """What is small needs no thread, no task and no second packing: one write, one answer."""
        started = self._spans.now()
        data = b"".join(compress(pieces) if self._wire.zstd else pieces)
        self._note_packed(started, len(data))
        chunk = UploadChunk(request_id=self._id, offset=0, data=data)
        outcome: Uploaded | Refused | Again = Again.STALLED
        with contextlib.closing(self._wire.connection.open_bulk(self._id)) as stream:
            await stream.send(chunk, self._finished(len(data)), end_offset=len(data))
            with trio.move_on_after(GRANT_WAIT_SECS):
                outcome = await self._answer(mailbox, granted_at)
        self._note_push(outcome, granted_at)
        return outcome

    async def _answer(self, mailbox: Mailbox[Message], granted_at: float) -> Uploaded | Refused | Again:
        message = await mailbox.receive()
        if isinstance(message, UploadCommitted):
            return self._committed(message, granted_at)
        return Refused(self._info.path, "the server answered the upload with something else")

    def _note_packed(self, started: float, stored_bytes: int) -> None:
        self._sent = stored_bytes
        self._compress_span = self._spans.add(
            SpanKind.COMPRESS, started, nar_bytes=self._info.nar_size, stored_bytes=stored_bytes, paths=1
        )

    def _note_push(self, outcome: Uploaded | Refused | Again, granted_at: float) -> None:
        if isinstance(outcome, Uploaded):
            self._spans.add(
                SpanKind.NAR_PUSH,
                granted_at,
                parent=self._compress_span,
                nar_bytes=self._info.nar_size,
                stored_bytes=self._sent,
                paths=1,
            )

    async def _pack(self, offset: int, to: trio.MemorySendChannel[list[bytes]]) -> NoReturn:
        """Pack and compress what comes next while the last is sent; one trip to a thread ahead of it."""
        source = _NarSource(self._store, self._info.path, skip=offset, zstd=self._wire.zstd)
        async with to:
            while not source.ended:
                chunks = await self._threads.run(source.read)
                if chunks:
                    await to.send(chunks)
        await trio.sleep_forever()  # whoever sends it says how it ended
        raise AssertionError

    async def _push(self, offset: int, packed: trio.MemoryReceiveChannel[list[bytes]]) -> Again:
        """Send everything from `offset` on, then wait; returns only when it went nowhere."""
        started = self._spans.now()
        stream = self._wire.connection.open_bulk(self._id, offset=offset)
        try:
            position = offset
            async for chunks in packed:
                for chunk in chunks:
                    message = UploadChunk(request_id=self._id, offset=position, data=chunk)
                    position += len(chunk)
                    with trio.move_on_after(TRANSFER_STALL_SECS) as patience:
                        await stream.send(message, end_offset=position)
                    if patience.cancelled_caught:
                        return Again.STALLED
            self._note_packed(started, position)
            await stream.send(self._finished(position), end_offset=position)
            await trio.sleep(GRANT_WAIT_SECS)  # the wait for the commit has no deadline on progress
            return Again.STALLED
        finally:
            stream.close()

    def _finished(self, file_size: int) -> UploadFinished:
        return UploadFinished(
            request_id=self._id,
            nar_hash=self._info.nar_hash,
            nar_size=self._info.nar_size,
            file_size=file_size,
            references=list(self._info.references),
            etags=[],
        )

    def _committed(self, answer: UploadCommitted, granted_at: float) -> Uploaded | Refused | Again:
        self._over = True
        match answer.outcome:
            case UploadOutcome.OK:
                return Uploaded(self._info, pushed=True, granted_at=granted_at)
            case UploadOutcome.RETRY:
                return Again.RETRY
            case UploadOutcome.REJECTED:
                return Refused(self._info.path, answer.reason or "the server gave no reason")


class _NarSource:
    """The bytes of one upload as they travel, from `skip` on, in chunks of the wire's size.

    `read` belongs in a thread. `ended`: it has given all there is; a small upload costs one thread.
    """

    def __init__(self, store: Store, path: str, *, skip: int, zstd: bool) -> None:
        packed = store.pack(path)
        self._chunks: Iterator[bytes] = compress(packed) if zstd else packed
        self._rest = bytearray()
        self._skip = skip
        self.ended = False

    def read(self) -> list[bytes]:
        """The next chunks, up to `_CHUNKS_AT_ONCE`; none where there is no more.

        NarError where there is less than `skip`.
        """
        while self._skip:
            size = len(self._take(min(self._skip, MAX_CHUNK_DATA)))
            if not size:
                raise NarError(f"the server claims {self._skip} bytes more than this upload has")
            self._skip -= size
        chunks: list[bytes] = []
        while len(chunks) < _CHUNKS_AT_ONCE and not self.ended:
            chunk = self._take(MAX_CHUNK_DATA)
            if chunk:
                chunks.append(chunk)
        return chunks

    def _take(self, limit: int) -> bytes:
        while len(self._rest) < limit and not self.ended:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._rest += chunk
        data = bytes(self._rest[:limit])
        del self._rest[:limit]
        self.ended = len(data) < limit
        return data
