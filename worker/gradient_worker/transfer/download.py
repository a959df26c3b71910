"""One download: a NarRequest and what answers it."""

from functools import partial

import trio
from gradient_protocol.limits import BULK_ACK_EVERY, TRANSFER_STALL_SECS
from gradient_protocol.messages.common import BulkAck, Message, NarAbort
from gradient_protocol.messages.server import (
    NarPush,
    NarStreamHeader,
    NarUnavailable,
)
from gradient_protocol.nar import NarError

from gradient_worker.stores.base import NarReceiver, Store
from gradient_worker.threads import Threads
from gradient_worker.timing import GRANT_WAIT_SECS
from gradient_worker.transfer.outcomes import Downloaded, Lost, Stalled
from gradient_worker.wire import Mailbox, Wire

__all__ = ["Download"]


class Download:
    """One NarRequest and what answers it."""

    def __init__(
        self,
        wire: Wire,
        *,
        store: Store,
        threads: Threads,
        mailbox: Mailbox[Message],
        transfer_id: str,
        path: str,
        nar_hash: str | None,
    ) -> None:
        self._wire = wire
        self._store = store
        self._threads = threads
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
        if isinstance(header, NarUnavailable):
            return Lost(self._path, header.reason)
        if isinstance(header, NarAbort):
            return Stalled(self._path, f"the server broke it off: {header.reason}")
        if not isinstance(header, NarStreamHeader) or header.path != self._path or header.offset:
            return self._abort_damaged("the server answered with something else")
        if self._nar_hash is not None and header.nar_hash != self._nar_hash:
            return self._abort_damaged("the server holds other contents than the job names")
        threads, store = self._threads, self._store
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
            broken_off = next((one for one in batch if not isinstance(one, NarPush)), None)
            if broken_off is not None:
                why = broken_off.reason if isinstance(broken_off, NarAbort | NarUnavailable) else "no reason"
                return Stalled(self._path, f"the server broke it off: {why}")
            pushes = [push for push in batch if isinstance(push, NarPush)]
            for push in pushes:
                if push.offset != received:
                    return self._abort_damaged(f"a chunk at {push.offset} where {received} was due")
                received += len(push.data)
            last = pushes[-1].last
            await self._threads.run(partial(_feed, receiver, pushes))
            if last or received - acknowledged >= BULK_ACK_EVERY:
                self._mailbox.acknowledged(received - acknowledged)
                acknowledged = received
                self._wire.send(BulkAck(id=self._id, offset=received))
        info = await self._threads.run(receiver.commit)
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
        return Stalled(self._path, f"no byte came for {TRANSFER_STALL_SECS:g} s")

    def _abort_damaged(self, reason: str) -> Lost:
        self._wire.send(NarAbort(transfer_id=self._id, reason=reason))
        return Lost(self._path, reason, damaged=True)


def _feed(receiver: NarReceiver, pushes: list[NarPush]) -> None:
    for push in pushes:
        receiver.feed(push.data)
