"""What one sender has queued: the control lane, the bulk lane, the window of a stream.

Pure: no waiting and no stream. `connection` writes what `Lanes.take` gives and tells `bulk` what
happened. The rules (protocol.md, "Lanes and flow"):

- control goes first; order holds within a lane, and within a stream of the bulk lane;
- at most 256 KiB of bulk is taken between two looks at the control lane (one frame at least, for a
  frame cannot be cut);
- the bulk lane holds one frame a stream and serves the streams in turn, so a stream whose window
  is closed is passed over because it has nothing here;
- at most 4 MiB of a stream is unacknowledged.
"""

from collections import deque
from dataclasses import dataclass

from gradient_protocol.errors import BAD_REQUEST, ProtocolError
from gradient_protocol.limits import BULK_QUANTUM, BULK_WINDOW, CONTROL_LIMIT, CONTROL_ROOM

__all__ = ["Batch", "Lanes", "Window"]


@dataclass(frozen=True, slots=True)
class Batch:
    """What to write before the next look: all of it control, or all of it bulk.

    `streams` are the keys of those whose frames are in `data`, in order.
    """

    data: bytes
    control_bytes: int = 0
    streams: tuple[int, ...] = ()


class Lanes:
    """The two lanes of one sender. Frames are complete, with their lengths."""

    __slots__ = ("_bulk", "_control", "_in_flight_bytes", "_queued_bytes")

    def __init__(self) -> None:
        self._control: deque[bytes] = deque()
        self._queued_bytes = 0
        self._in_flight_bytes = 0
        self._bulk: dict[int, bytes] = {}  # in the order of their turns

    @property
    def control_bytes(self) -> int:
        """Control bytes that are not written yet, those that were taken last included."""
        return self._queued_bytes + self._in_flight_bytes

    @property
    def has_room(self) -> bool:
        """Whether reports, candidates and forwarded signals may enter."""
        return self.control_bytes < CONTROL_ROOM

    @property
    def is_overflowing(self) -> bool:
        """Whether the session has to end."""
        return self.control_bytes > CONTROL_LIMIT

    def put_control(self, frame: bytes) -> None:
        """Queues one control message."""
        self._control.append(frame)
        self._queued_bytes += len(frame)

    def holds(self, stream: int) -> bool:
        """Whether a frame of this stream waits for its turn."""
        return stream in self._bulk

    def put_bulk(self, stream: int, frame: bytes) -> None:
        """Queues a stream's next frame, behind the other streams' turns."""
        if stream in self._bulk:
            raise ValueError("the bulk lane holds a frame of this stream already")
        self._bulk[stream] = frame

    def take(self) -> Batch | None:
        """The next bytes to write, or None when both lanes are empty. `written` must follow."""
        if self._control:
            return self._take_control()
        if self._bulk:
            return self._take_bulk()
        return None

    def written(self, batch: Batch) -> None:
        """The batch is on the wire."""
        self._in_flight_bytes -= batch.control_bytes

    def _take_control(self) -> Batch:
        frames = [self._control.popleft()]
        size = len(frames[0])
        while self._control and size + len(self._control[0]) <= BULK_QUANTUM:
            frames.append(self._control.popleft())
            size += len(frames[-1])
        self._queued_bytes -= size
        self._in_flight_bytes += size
        return Batch(frames[0] if len(frames) == 1 else b"".join(frames), control_bytes=size)

    def _take_bulk(self) -> Batch:
        streams: list[int] = []
        size = 0
        for stream, frame in self._bulk.items():
            if streams and size + len(frame) > BULK_QUANTUM:
                break
            streams.append(stream)
            size += len(frame)
        frames = [self._bulk.pop(stream) for stream in streams]
        return Batch(frames[0] if len(frames) == 1 else b"".join(frames), streams=tuple(streams))


class Window:
    """How far one stream was sent and how far it is acknowledged, as offsets in bytes."""

    __slots__ = ("acknowledged", "sent")

    def __init__(self, offset: int) -> None:
        self.acknowledged = offset
        self.sent = offset

    def allows(self, end_offset: int) -> bool:
        """Whether a chunk that ends at `end_offset` may be sent now."""
        return end_offset - self.acknowledged <= BULK_WINDOW

    def send(self, end_offset: int) -> None:
        """A chunk that ends at `end_offset` is on its way."""
        if end_offset < self.sent:
            raise ValueError(f"a chunk that ends at {end_offset} after one that ended at {self.sent}")
        self.sent = end_offset

    def acknowledge(self, offset: int) -> bool:
        """Takes a `BulkAck`; whether it says anything new. ProtocolError 400 beyond what was sent."""
        if offset > self.sent:
            raise ProtocolError(BAD_REQUEST, f"BulkAck of {offset}, only {self.sent} was sent")
        if offset <= self.acknowledged:
            return False
        self.acknowledged = offset
        return True
