"""One download, over as many sessions as it takes (protocol.md, "Transfers", "Lost connections").

What was received is decompressed, hashed and unpacked as it comes, so nothing of it has to be kept
to go on: the next session is asked from the first byte that was not taken in. An answer that is not
about the same bytes (another hash, size or compression) starts it from 0 again.
"""

import contextlib
from collections.abc import Sequence
from functools import partial

import trio
from gradient_protocol.errors import SessionClosed
from gradient_protocol.ids import IdSource
from gradient_protocol.limits import BULK_ACK_EVERY, TRANSFER_STALL_SECS
from gradient_protocol.messages.common import BulkAck, Message, NarAbort
from gradient_protocol.messages.server import NarPush, NarStreamHeader, NarUnavailable
from gradient_protocol.messages.worker import NarRequest
from gradient_protocol.nar import NarError

from gradient_worker.stores.base import NarReceiver, PathInfo, Store, StoreError
from gradient_worker.threads import Threads
from gradient_worker.timing import GRANT_WAIT_SECS
from gradient_worker.transfer.outcomes import Downloaded, Lost, Stalled
from gradient_worker.wire import Mailbox, Wire

__all__ = ["Download"]


class Download:
    """`run_on` each session until it returns; then `aclose`, on every path.

    `received`: bytes as they travelled that were taken in, over all sessions.
    """

    def __init__(
        self,
        *,
        store: Store,
        threads: Threads,
        ids: IdSource,
        assignment_id: str,
        path: str,
        nar_hash: str | None,
    ) -> None:
        self._store = store
        self._threads = threads
        self._ids = ids
        self._assignment_id = assignment_id
        self.path = path
        self._nar_hash = nar_hash
        self._header: NarStreamHeader | None = None
        self._receiver: NarReceiver | None = None
        self.received = 0

    async def run_on(self, wire: Wire) -> Downloaded | Lost | Stalled:
        """Ask for the rest, and take it in. Raises SessionClosed: go on with the next session."""
        transfer_id = self._ids.new()
        mailbox = wire.open(transfer_id)
        try:
            request = NarRequest(
                transfer_id=transfer_id,
                assignment_id=self._assignment_id,
                path=self.path,
                offset=self.received,
            )
            wire.send(request)
            return await _Session(self, wire, mailbox, transfer_id).run()
        finally:
            mailbox.close()

    async def aclose(self) -> None:
        """Remove what was unpacked of a download that came to nothing."""
        receiver, self._receiver = self._receiver, None
        self._header = None
        self.received = 0
        if receiver is not None:
            with trio.CancelScope(shield=True):
                await self._threads.run(receiver.abort)

    # What a session of it does

    def wrong(self, header: Message) -> str | None:
        """Why this answer is none to what was asked; None for one that is."""
        if (
            not isinstance(header, NarStreamHeader)
            or header.path != self.path
            or header.offset != self.received
        ):
            return "the server answered with something else"
        if self._nar_hash is not None and header.nar_hash != self._nar_hash:
            return "the server holds other contents than the job names"
        if self._header is not None and _bytes_of(self._header) != _bytes_of(header):
            return "the server holds other bytes than those it began to send"
        return None

    async def begin(self, header: NarStreamHeader) -> None:
        """Make a place to unpack to, unless this goes on. NarError for a header that names no archive."""
        if self._receiver is not None:
            return
        receive = partial(
            self._store.receive,
            header.path,
            header.nar_hash,
            header.nar_size,
            tuple(header.references),
            header.compression,
        )
        try:
            self._receiver = await self._threads.run(receive)
        except StoreError as error:
            raise NarError(f"the server names no valid archive: {error}") from error
        self._header = header

    async def take_in(self, pushes: Sequence[NarPush]) -> None:
        """The next bytes, which must be those from `received` on. NarError, OSError, of the disk."""
        end = self.received
        for push in pushes:
            if push.offset != end:
                raise NarError(f"a chunk at {push.offset} where {end} was due")
            end += len(push.data)
        assert self._receiver is not None
        # The session may end while they are taken in; the next one must not send them again.
        self.received = end
        await self._threads.run(partial(_feed, self._receiver, pushes))

    async def commit(self) -> PathInfo:
        """All has come: verify it and make the path valid. NarError, OSError, StoreError."""
        assert self._receiver is not None
        info = await self._threads.run(self._receiver.commit)
        self._receiver = None
        return info


class _Session:
    """What one session brings of a download."""

    def __init__(self, download: Download, wire: Wire, mailbox: Mailbox[Message], transfer_id: str) -> None:
        self._download = download
        self._wire = wire
        self._mailbox = mailbox
        self._id = transfer_id
        self._path = download.path

    async def run(self) -> Downloaded | Lost | Stalled:
        header: Message | None = None
        with trio.move_on_after(GRANT_WAIT_SECS):
            header = await self._mailbox.receive()
        if header is None:
            return self._stalled()
        if isinstance(header, NarUnavailable):
            return Lost(self._path, header.reason)
        if isinstance(header, NarAbort):
            return Stalled(self._path, f"the server broke it off: {header.reason}")
        wrong = self._download.wrong(header)
        if wrong is not None:
            return self._damaged(wrong)
        assert isinstance(header, NarStreamHeader)
        try:
            await self._download.begin(header)
            return await self._receive()
        except NarError as error:
            return self._damaged(str(error))
        except OSError as error:
            reason = f"{self._path} cannot be stored on this worker: {error.strerror or error}"
            self._abort(reason)
            raise StoreError(reason) from error
        except (StoreError, trio.Cancelled) as error:
            self._abort(str(error) if isinstance(error, StoreError) else "no longer wanted")
            raise

    async def _receive(self) -> Downloaded | Lost | Stalled:
        acknowledged = self._download.received
        last = False
        while not last:
            batch = await self._next_batch()
            if batch is None:
                return self._stalled()
            broken_off = next((one for one in batch if not isinstance(one, NarPush)), None)
            if broken_off is not None:
                why = broken_off.reason if isinstance(broken_off, NarAbort | NarUnavailable) else "no reason"
                return Stalled(self._path, f"the server broke it off: {why}")
            pushes = [push for push in batch if isinstance(push, NarPush)]
            last = pushes[-1].last
            await self._download.take_in(pushes)
            received = self._download.received
            if last or received - acknowledged >= BULK_ACK_EVERY:
                self._mailbox.acknowledged(received - acknowledged)
                acknowledged = received
                self._tell(BulkAck(id=self._id, offset=received))
        return Downloaded(await self._download.commit(), self._download.received)

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

    def _stalled(self) -> Stalled:
        self._abort("no progress")
        return Stalled(self._path, f"no byte came for {TRANSFER_STALL_SECS:g} s")

    def _damaged(self, reason: str) -> Lost:
        self._abort(reason)
        return Lost(self._path, reason, damaged=True)

    def _abort(self, reason: str) -> None:
        self._tell(NarAbort(transfer_id=self._id, reason=reason))

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(SessionClosed):  # what is waited for next says so, if anything is
            self._wire.send(message)


def _bytes_of(header: NarStreamHeader) -> tuple[object, ...]:
    return header.nar_hash, header.nar_size, header.file_size, header.compression


def _feed(receiver: NarReceiver, pushes: Sequence[NarPush]) -> None:
    for push in pushes:
        receiver.feed(push.data)
