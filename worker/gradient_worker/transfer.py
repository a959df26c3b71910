"""Moves NARs between the store and the server (protocol.md, "Transfers").

A download that the session's end cut is asked for again on the next session. An upload goes on under
the same request id from the offset that the server grants: its bytes are made anew, for the same
store path compresses to the same bytes, and those the server has are not sent again. Packing,
compression and hashing run in threads, a few hundred KiB at a time, never a whole NAR in memory.
"""

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog
import trio
from gradient_protocol.errors import SessionClosed
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import SpanKind, UploadOutcome
from gradient_protocol.limits import BULK_ACK_EVERY, MAX_CHUNK_DATA, TRANSFER_STALL_SECS
from gradient_protocol.messages.common import BulkAck, Message, NarAbort
from gradient_protocol.messages.server import (
    NarPush,
    NarStreamHeader,
    NarUnavailable,
    Relay,
    Skip,
    UploadCommitted,
    UploadGrant,
)
from gradient_protocol.messages.worker import (
    NarRequest,
    UploadCancel,
    UploadChunk,
    UploadFinished,
    UploadRequest,
)
from gradient_protocol.nar import NarError, compress

from gradient_worker.executor.spans import SpanLog
from gradient_worker.race import race
from gradient_worker.stores.base import NarReceiver, PathInfo, Store
from gradient_worker.threads import Threads
from gradient_worker.timing import GRANT_WAIT_SECS
from gradient_worker.wire import Link, Mailbox, Wire

__all__ = ["Downloaded", "Lost", "Refused", "Stalled", "Transfers", "Uploaded"]

MAX_TRIES: Final = 3
"""Of one transfer that stalls, arrives damaged or is to start again; a lost session is no try."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Downloaded:
    """The path is in the store. Sizes in bytes; `stored_bytes` as it travelled."""

    info: PathInfo
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The server does not have the path (`damaged`: has it, but not what it says it is)."""

    path: str
    reason: str
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Stalled:
    """No byte moved for 60 s, however often it was tried."""

    path: str


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The server holds the path. `pushed`: bytes travelled for it; `granted_at` on the server's clock."""

    info: PathInfo
    pushed: bool
    granted_at: float


@dataclass(frozen=True, slots=True)
class Refused:
    """The server does not take the path, or this worker cannot send it as asked."""

    path: str
    reason: str


class _Again(enum.Enum):
    STALLED = "no byte moved for a minute"
    RETRY = "the server asked to start again"


class Transfers:
    """Downloads and uploads over whatever session there is."""

    def __init__(self, *, link: Link, store: Store, threads: Threads, ids: IdSource) -> None:
        self._link = link
        self._store = store
        self._threads = threads
        self._ids = ids

    async def download(
        self, assignment_id: str, path: str, nar_hash: str | None, spans: SpanLog
    ) -> Downloaded | Lost | Stalled:
        """Fetch a path into the store. `nar_hash`: what the job says it must be, where it says so."""
        last: Lost | Stalled = Stalled(path)
        for _ in range(MAX_TRIES):
            started = spans.now()
            outcome = await self._download_on_some_wire(assignment_id, path, nar_hash)
            if isinstance(outcome, Downloaded):
                info = outcome.info
                spans.add(
                    SpanKind.NAR_FETCH,
                    started,
                    nar_bytes=info.nar_size,
                    stored_bytes=outcome.stored_bytes,
                    paths=1,
                )
                return outcome
            last = outcome
            if isinstance(outcome, Lost) and not outcome.damaged:
                return outcome
            logger.warning("download failed", path=path, outcome=repr(outcome))
        return last

    async def _download_on_some_wire(
        self, assignment_id: str, path: str, nar_hash: str | None
    ) -> Downloaded | Lost | Stalled:
        while True:
            wire = await self._link.wire()
            try:
                transfer_id = self._ids.new()
                mailbox = wire.open(transfer_id)
                try:
                    request = NarRequest(
                        transfer_id=transfer_id, assignment_id=assignment_id, path=path, offset=0
                    )
                    wire.send(request)
                    download = _Download(
                        self, wire, mailbox=mailbox, transfer_id=transfer_id, path=path, nar_hash=nar_hash
                    )
                    return await download.run()
                finally:
                    mailbox.close()
            except SessionClosed:
                await trio.lowlevel.checkpoint()

    async def upload(self, assignment_id: str, info: PathInfo, spans: SpanLog) -> Uploaded | Refused:
        """Send a path of the store to the server, until it is committed or skipped."""
        for _ in range(MAX_TRIES):
            request_id = self._ids.new()
            outcome = await self._upload_on_some_wire(request_id, assignment_id, info, spans)
            if not isinstance(outcome, _Again):
                return outcome
            logger.warning("upload starts again", path=info.path, why=outcome.value)
        return Refused(info.path, f"not uploaded in {MAX_TRIES} tries")

    async def _upload_on_some_wire(
        self, request_id: str, assignment_id: str, info: PathInfo, spans: SpanLog
    ) -> "Uploaded | Refused | _Again":
        zstd: bool | None = None
        while True:
            wire = await self._link.wire()
            if zstd is not None and wire.zstd is not zstd:
                return _Again.RETRY  # the bytes of one request id never change
            zstd = wire.zstd
            upload = _Upload(
                self, wire, request_id=request_id, assignment_id=assignment_id, info=info, spans=spans
            )
            try:
                return await upload.run()
            except SessionClosed:
                await trio.lowlevel.checkpoint()

    @property
    def store(self) -> Store:
        """Where paths come from and go to."""
        return self._store

    @property
    def threads(self) -> Threads:
        """Where packing and unpacking run."""
        return self._threads


class _Download:
    """One NarRequest and what answers it."""

    def __init__(
        self,
        transfers: Transfers,
        wire: Wire,
        *,
        mailbox: Mailbox[Message],
        transfer_id: str,
        path: str,
        nar_hash: str | None,
    ) -> None:
        self._transfers = transfers
        self._wire = wire
        self._mailbox = mailbox
        self._id = transfer_id
        self._path = path
        self._nar_hash = nar_hash

    async def run(self) -> Downloaded | Lost | Stalled:
        header: Message | None = None
        with trio.move_on_after(GRANT_WAIT_SECS):
            header = await self._mailbox.receive()
        if header is None:
            return self._abort_stalled()
        if isinstance(header, NarUnavailable | NarAbort):
            return Lost(self._path, header.reason)
        if not isinstance(header, NarStreamHeader) or header.path != self._path or header.offset:
            return self._abort_damaged("the server answered with something else")
        if self._nar_hash is not None and header.nar_hash != self._nar_hash:
            return self._abort_damaged("the server holds other contents than the job names")
        threads, store = self._transfers.threads, self._transfers.store
        receiver = await threads.run(
            lambda: store.receive(
                header.path, header.nar_hash, header.nar_size, tuple(header.references), header.compression
            )
        )
        done = False
        try:
            outcome = await self._take_in(receiver)
            done = isinstance(outcome, Downloaded)
            return outcome
        except NarError as error:
            return self._abort_damaged(str(error))
        finally:
            if not done:
                with trio.CancelScope(shield=True):
                    await threads.run(receiver.abort)

    async def _take_in(self, receiver: NarReceiver) -> Downloaded | Lost | Stalled:
        received = acknowledged = 0
        last = False
        while not last:
            batch = await self._next_batch()
            if batch is None:
                return self._abort_stalled()
            if not all(isinstance(push, NarPush) for push in batch):
                return Lost(self._path, "the server broke the transfer off", damaged=True)
            pushes = [push for push in batch if isinstance(push, NarPush)]
            for push in pushes:
                if push.offset != received:
                    return self._abort_damaged(f"a chunk at {push.offset} where {received} was due")
                received += len(push.data)
            last = pushes[-1].last
            await self._transfers.threads.run(partial(_feed, receiver, pushes))
            if last or received - acknowledged >= BULK_ACK_EVERY:
                self._mailbox.acknowledged(received - acknowledged)
                acknowledged = received
                self._wire.send(BulkAck(id=self._id, offset=received))
        info = await self._transfers.threads.run(receiver.commit)
        return Downloaded(info, received)

    async def _next_batch(self) -> list[Message] | None:
        """What came since, at most what one acknowledgement covers; None when nothing came for 60 s."""
        batch: list[Message] = []
        with trio.move_on_after(TRANSFER_STALL_SECS):
            batch.append(await self._mailbox.receive())
        size = 0
        while batch and size < BULK_ACK_EVERY:
            push = batch[-1]
            if not isinstance(push, NarPush) or push.last:
                break
            size += len(push.data)
            more = self._mailbox.receive_nowait()
            if more is None:
                break
            batch.append(more)
        return batch or None

    def _abort_stalled(self) -> Stalled:
        self._wire.send(NarAbort(transfer_id=self._id, reason="no progress"))
        return Stalled(self._path)

    def _abort_damaged(self, reason: str) -> Lost:
        self._wire.send(NarAbort(transfer_id=self._id, reason=reason))
        return Lost(self._path, reason, damaged=True)


def _feed(receiver: NarReceiver, pushes: list[NarPush]) -> None:
    for push in pushes:
        receiver.feed(push.data)


class _Upload:
    """One UploadRequest on one session."""

    def __init__(
        self,
        transfers: Transfers,
        wire: Wire,
        *,
        request_id: str,
        assignment_id: str,
        info: PathInfo,
        spans: SpanLog,
    ) -> None:
        self._transfers = transfers
        self._wire = wire
        self._id = request_id
        self._assignment_id = assignment_id
        self._info = info
        self._spans = spans
        self._sent = 0
        self._over = False
        self._compress_span: int | None = None

    async def run(self) -> Uploaded | Refused | _Again:
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

    async def _negotiate(self, mailbox: Mailbox[Message]) -> Uploaded | Refused | _Again:
        asked_at = self._spans.now()
        grant: Message | None = None
        with trio.move_on_after(GRANT_WAIT_SECS):
            grant = await mailbox.receive()
        granted_at = self._spans.now()
        self._spans.add(SpanKind.UPLOAD_WAIT, asked_at, end=granted_at)
        if grant is None:
            return _Again.STALLED
        if isinstance(grant, UploadCommitted):
            return self._committed(grant, granted_at)
        if not isinstance(grant, UploadGrant):
            return Refused(self._info.path, "the server answered the upload with something else")
        match grant.target:
            case Skip():
                self._over = True
                return Uploaded(self._info, pushed=False, granted_at=granted_at)
            case Relay(offset=offset):
                return await self._relay(mailbox, offset, granted_at)
            case other:
                name = type(other).__name__
                return Refused(self._info.path, f"this worker cannot upload by {name} yet; use Relay")

    async def _relay(
        self, mailbox: Mailbox[Message], offset: int, granted_at: float
    ) -> Uploaded | Refused | _Again:
        async def answer() -> Uploaded | Refused | _Again:
            # The server may refuse half-way, so its answer is awaited beside the pushing.
            message = await mailbox.receive()
            if isinstance(message, UploadCommitted):
                return self._committed(message, granted_at)
            return Refused(self._info.path, "the server answered the upload with something else")

        outcome = await race(answer, lambda: self._push(offset))
        if isinstance(outcome, Uploaded):
            self._spans.add(
                SpanKind.NAR_PUSH,
                granted_at,
                parent=self._compress_span,
                nar_bytes=self._info.nar_size,
                stored_bytes=self._sent,
                paths=1,
            )
        return outcome

    async def _push(self, offset: int) -> _Again:
        """Send everything from `offset` on, then wait; returns only when it went nowhere."""
        threads = self._transfers.threads
        started = self._spans.now()
        source = _NarSource(self._transfers.store, self._info.path, zstd=self._wire.zstd)
        stream = self._wire.connection.open_bulk(self._id, offset=offset)
        try:
            position = await threads.run(lambda: source.skip(offset))
            while chunk := await threads.run(source.read):
                message = UploadChunk(request_id=self._id, offset=position, data=chunk)
                position += len(chunk)
                with trio.move_on_after(TRANSFER_STALL_SECS) as patience:
                    await stream.send(message, end_offset=position)
                if patience.cancelled_caught:
                    return _Again.STALLED
            self._sent = position
            self._compress_span = self._spans.add(
                SpanKind.COMPRESS, started, nar_bytes=self._info.nar_size, stored_bytes=position, paths=1
            )
            await stream.send(self._finished(position), end_offset=position)
            await trio.sleep(GRANT_WAIT_SECS)  # the wait for the commit has no deadline on progress
            return _Again.STALLED
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

    def _committed(self, answer: UploadCommitted, granted_at: float) -> Uploaded | Refused | _Again:
        self._over = True
        match answer.outcome:
            case UploadOutcome.OK:
                return Uploaded(self._info, pushed=True, granted_at=granted_at)
            case UploadOutcome.RETRY:
                return _Again.RETRY
            case UploadOutcome.REJECTED:
                return Refused(self._info.path, answer.reason or "the server gave no reason")


class _NarSource:
    """The bytes of one upload as they travel, in chunks of the wire's size. Used in threads."""

    def __init__(self, store: Store, path: str, *, zstd: bool) -> None:
        packed = store.pack(path)
        self._chunks: Iterator[bytes] = compress(packed) if zstd else packed
        self._rest = bytearray()

    def read(self, limit: int = MAX_CHUNK_DATA) -> bytes:
        """The next chunk; only the last is shorter than `limit`; b"" at the end."""
        while len(self._rest) < limit:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._rest += chunk
        data = bytes(self._rest[:limit])
        del self._rest[:limit]
        return data

    def skip(self, size: int) -> int:
        """Leave out what the server has. Returns the position; raises where there is not that much."""
        left = size
        while left:
            data = self.read(min(left, MAX_CHUNK_DATA))
            if not data:
                raise NarError(f"the server claims {size} bytes of an upload that is shorter")
            left -= len(data)
        return size
