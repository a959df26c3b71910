"""One outgoing transfer or log of a session: its window and its turn in the bulk lane."""

from collections.abc import Callable

import trio

from gradient_protocol.codec import encode
from gradient_protocol.errors import SessionClosed
from gradient_protocol.framing import frame
from gradient_protocol.lanes import Lanes, Window
from gradient_protocol.limits import BULK_WINDOW, MAX_CHUNK_DATA, MAX_MESSAGE
from gradient_protocol.messages.server import NarPush
from gradient_protocol.messages.worker import LogChunk, UploadChunk, UploadFinished

__all__ = ["BulkMessage", "BulkStream"]

BulkMessage = NarPush | UploadChunk | UploadFinished | LogChunk


class BulkStream:
    """Made by `Connection.open_bulk`. One task sends; any number may wait.

    Every wait ends with SessionClosed when the session does, and may be cancelled without harm.
    """

    def __init__(
        self,
        stream_id: str,
        offset: int,
        *,
        key: int,
        lanes: Lanes,
        queued: Callable[["BulkStream"], None],
        forget: Callable[[str], object],
        on_acknowledged: Callable[[int], None] | None,
    ) -> None:
        self.id = stream_id
        self.key = key  # in the lane; ids may come again, keys do not
        self._window = Window(offset)
        self._lanes = lanes
        self._queued = queued
        self._forget = forget
        self._on_acknowledged = on_acknowledged
        self._changed = trio.lowlevel.ParkingLot()
        self._in_flight = False
        self._closed = False
        self._end_reason: str | None = None

    @property
    def acknowledged(self) -> int:
        """Everything before this offset is stored at the other side."""
        return self._window.acknowledged

    async def send(self, *messages: BulkMessage, end_offset: int) -> None:
        """Queues one chunk that ends at `end_offset`; returns once it is queued, not written.

        `UploadFinished` may come along with the last chunk: they take one turn of the lane.
        Waits while over 4 MiB would be unacknowledged, or the last chunk still waits for its turn.
        Raises SessionClosed, ValueError for a chunk of the wrong size or order.
        """
        framed = b"".join(map(_framed, messages))
        if end_offset - self._window.sent > BULK_WINDOW:
            raise ValueError(f"a chunk of over {BULK_WINDOW} bytes of the stream")
        while not self._window.allows(end_offset) or self._lanes.holds(self.key):
            self._check()
            await self._changed.park()
        self._check()
        self._window.send(end_offset)
        self._lanes.put_bulk(self.key, framed)
        self._queued(self)

    async def wait_acknowledged(self, offset: int) -> None:
        """Returns once everything before `offset` is acknowledged."""
        while self._window.acknowledged < offset:
            self._check()
            await self._changed.park()

    async def wait_written(self) -> None:
        """Returns once all that was queued of this stream is on the wire."""
        while self._lanes.holds(self.key) or self._in_flight:
            self._check(even_closed=True)
            await self._changed.park()

    def close(self) -> None:
        """No more chunks, and acknowledgements are ignored from now on. What is queued still goes out."""
        if not self._closed:
            self._closed = True
            self._forget(self.id)
            self._changed.unpark_all()

    # What the connection tells it.

    def taken(self) -> None:
        """The queued chunk is being written."""
        self._in_flight = True
        self._changed.unpark_all()

    def written(self) -> None:
        """That chunk is on the wire."""
        self._in_flight = False
        self._changed.unpark_all()

    def acknowledge(self, offset: int) -> None:
        """A `BulkAck` came. Raises ProtocolError 400 for one beyond what was sent."""
        if self._window.acknowledge(offset):
            self._changed.unpark_all()
            if self._on_acknowledged is not None:
                self._on_acknowledged(offset)

    def session_ended(self, reason: str) -> None:
        """Wakes all who wait."""
        self._end_reason = reason
        self._changed.unpark_all()

    def _check(self, *, even_closed: bool = False) -> None:
        if self._end_reason is not None:
            raise SessionClosed(self._end_reason)
        if self._closed and not even_closed:
            raise SessionClosed(f"the stream {self.id} is closed")


def _framed(message: BulkMessage) -> bytes:
    if not isinstance(message, UploadFinished) and len(message.data) > MAX_CHUNK_DATA:
        raise ValueError(f"a chunk of {len(message.data)} bytes of data, at most {MAX_CHUNK_DATA} are taken")
    payload = encode(message)
    if len(payload) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(payload)} bytes, at most {MAX_MESSAGE} are taken")
    return frame(payload)
