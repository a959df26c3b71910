"""NARs on their way to workers (protocol.md, Transfers).

A request waits for one of `nar.maxConcurrentDownloads` slots, fairly between the sessions; then a
task of the session reads the object in a thread and feeds the bulk lane, whose window and turns
hold it to the worker's pace.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Final

import structlog
import trio
import zstandard
from gradient_protocol.connection import BulkStream
from gradient_protocol.errors import ProtocolError, SessionClosed
from gradient_protocol.kinds import Compression
from gradient_protocol.limits import MAX_CHUNK_DATA, TRANSFER_STALL_SECS
from gradient_protocol.messages.common import NarAbort
from gradient_protocol.messages.server import NarPush, NarStreamHeader, NarUnavailable
from gradient_protocol.messages.worker import NarRequest

from gradient_server.db.queries.cached_paths import CachedPath, get_paths
from gradient_server.storage.nar_store import LocalNarStore, StorageError
from gradient_server.storage.slots import FairSlots

if TYPE_CHECKING:
    from gradient_server.net.services import Services
    from gradient_server.net.session import Session

__all__ = ["Downloads"]

log = structlog.get_logger(__name__)

# Requests of one session that wait for a slot; a worker asks for a few at a time.
_MAX_WAITING: Final = 10_000
# One trip to a thread reads this much, and the lane takes it in pieces.
_READ_BYTES: Final = 4 * MAX_CHUNK_DATA


@dataclass(slots=True, eq=False)
class _Download:
    """One request, from its arrival to its end."""

    session: "Session"
    request: NarRequest
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Downloads:
    """All downloads of the server. Ids are a session's own."""

    def __init__(self, services: "Services") -> None:
        self._services = services
        self._slots: FairSlots[Session, _Download] = FairSlots(services.settings.nar_max_concurrent_downloads)
        self._by_session: dict[Session, dict[str, _Download]] = {}
        self._disk = trio.CapacityLimiter(4)
        # For /metrics: bytes as they travelled.
        self.bytes_sent = 0

    @property
    def running(self) -> int:
        """Slots in use."""
        return self._slots.running

    def request(self, session: "Session", message: NarRequest) -> None:
        """Puts a request in line. One of an assignment that the worker does not have is ignored.

        ProtocolError 400 for a transfer id that is in use, 413 for too many at once.
        """
        if session.held(message.assignment_id) is None:
            return
        own = self._by_session.setdefault(session, {})
        if message.transfer_id in own:
            raise ProtocolError(400, f"the transfer {message.transfer_id} is under way already")
        if len(own) >= _MAX_WAITING:
            raise ProtocolError(413, f"more than {_MAX_WAITING} downloads at once")
        download = own[message.transfer_id] = _Download(session, message)
        self._slots.ask(session, download)
        self._start()

    def abort(self, session: "Session", transfer_id: str) -> None:
        """The worker does not want it any more."""
        download = self._by_session.get(session, {}).get(transfer_id)
        if download is not None:
            download.scope.cancel()
            self._forget(download)

    def session_ended(self, session: "Session") -> None:
        """Downloads end with the session; those that run were ended by its nursery."""
        for download in list(self._by_session.pop(session, {}).values()):
            self._slots.release(session, download)
        self._start()

    def _start(self) -> None:
        for _, download in self._slots.start():
            download.session.start_soon(partial(self._run, download))

    def _forget(self, download: _Download) -> None:
        own = self._by_session.get(download.session, {})
        if own.get(download.request.transfer_id) is download:
            del own[download.request.transfer_id]
            if not own:
                del self._by_session[download.session]
        self._slots.release(download.session, download)
        self._start()

    async def _run(self, download: _Download) -> None:
        try:
            with download.scope:
                await self._send(download)
        except SessionClosed:
            log.debug("a download ended with its session", transfer=download.request.transfer_id)
        finally:
            self._forget(download)

    async def _send(self, download: _Download) -> None:
        session, request = download.session, download.request
        held = await self._services.database.read(lambda connection: get_paths(connection, [request.path]))
        entry = held.get(request.path)
        if entry is None:
            self._unavailable(download, "the server does not hold this path")
            return
        plain = entry.compression is Compression.ZSTD and not session.capabilities.zstd
        total = entry.nar_size if plain else entry.file_size
        if not 0 <= request.offset <= total:
            self._unavailable(download, f"the offset is beyond the {total} bytes that travel")
            return
        open_reader = partial(_open, self._services.nar_store, entry, request.offset, plain=plain)
        try:
            reader = await trio.to_thread.run_sync(open_reader, limiter=self._disk)
        except (StorageError, OSError, zstandard.ZstdError) as error:
            log.error("an object cannot be read", path=request.path, object=entry.object, error=str(error))
            self._unavailable(download, "the server cannot read this path")
            return
        try:
            session.send(_header(entry, request, plain=plain, total=total))
            stream = session.connection.open_bulk(request.transfer_id, request.offset)
            try:
                await self._push(download, stream, reader, total)
            except (OSError, zstandard.ZstdError) as error:
                self._abort(download, f"the server cannot read this path: {error}")
            finally:
                stream.close()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(reader.close, limiter=self._disk)

    async def _push(self, download: _Download, stream: BulkStream, reader: BinaryIO, total: int) -> None:
        """The bytes from where the reader stands; `last` marks the end, and may stand alone."""
        transfer_id = download.request.transfer_id
        offset = download.request.offset
        data = b"?"
        while data:
            data = await trio.to_thread.run_sync(reader.read, _READ_BYTES, limiter=self._disk)
            for begin in range(0, len(data), MAX_CHUNK_DATA) if data else (0,):
                chunk = data[begin : begin + MAX_CHUNK_DATA]
                end = offset + len(chunk)
                if end > total or (not data and end < total):
                    self._abort(download, "the object does not have the size that is recorded")
                    return
                push = NarPush(transfer_id=transfer_id, offset=offset, data=chunk, last=end == total)
                with trio.move_on_after(TRANSFER_STALL_SECS) as patience:
                    await stream.send(push, end_offset=end)
                if patience.cancelled_caught:
                    self._abort(download, f"nothing was acknowledged for {TRANSFER_STALL_SECS:g} s")
                    return
                self.bytes_sent += len(chunk)
                offset = end
                if push.last:
                    return

    def _abort(self, download: _Download, reason: str) -> None:
        log.warning("a download is given up", path=download.request.path, reason=reason)
        download.session.send(NarAbort(transfer_id=download.request.transfer_id, reason=reason))

    def _unavailable(self, download: _Download, reason: str) -> None:
        download.session.send(NarUnavailable(transfer_id=download.request.transfer_id, reason=reason))


def _header(entry: CachedPath, request: NarRequest, *, plain: bool, total: int) -> NarStreamHeader:
    return NarStreamHeader(
        transfer_id=request.transfer_id,
        path=entry.path,
        nar_hash=entry.nar_hash,
        nar_size=entry.nar_size,
        file_size=total,
        compression=Compression.NONE if plain else entry.compression,
        references=list(entry.references),
        offset=request.offset,
    )


def _open(store: LocalNarStore, entry: CachedPath, offset: int, *, plain: bool) -> BinaryIO:
    """The bytes that travel, from `offset` on; decompressed for a worker without zstd."""
    if not plain:
        return store.open_reader(entry.object, offset)
    file = store.open_reader(entry.object)
    try:
        reader: BinaryIO = zstandard.ZstdDecompressor().stream_reader(file, closefd=True)
        while offset:
            offset -= len(reader.read(min(offset, _READ_BYTES))) or offset
    except BaseException:
        file.close()
        raise
    return reader
