"""Lengths around messages: u32, big endian, then that many bytes (protocol.md, "Stream")."""

from gradient_protocol.errors import BAD_REQUEST, TOO_LARGE, ProtocolError
from gradient_protocol.limits import LENGTH_BYTES, MAX_MESSAGE_BEFORE_INIT

__all__ = ["FrameReader", "frame"]


def frame(payload: bytes) -> bytes:
    """`payload` as it stands in the stream."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


_WORTH_A_VIEW_BYTES = 4096


class FrameReader:
    """Cuts what arrives into payloads. `limit` (bytes of payload) applies to the next length read.

    It holds at most one incomplete message and the bytes that came with its beginning.
    """

    __slots__ = ("_buffer", "_start", "limit")

    def __init__(self, limit: int = MAX_MESSAGE_BEFORE_INIT) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._start = 0

    def feed(self, data: bytes | bytearray) -> None:
        """Takes the next bytes of the stream."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """The next whole message, or None until more has arrived.

        Raises ProtocolError 413 as soon as a length over the limit can be read, 400 for a length of 0.
        """
        begin = self._start + LENGTH_BYTES
        if len(self._buffer) < begin:
            return None
        length = int.from_bytes(self._buffer[self._start : begin], "big")
        if length > self.limit:
            raise ProtocolError(TOO_LARGE, f"a message of {length} bytes, at most {self.limit} are taken")
        if not length:
            raise ProtocolError(BAD_REQUEST, "an empty message")
        end = begin + length
        if len(self._buffer) < end:
            return None
        self._start = end
        if length < _WORTH_A_VIEW_BYTES:
            return bytes(self._buffer[begin:end])
        with memoryview(self._buffer) as view:  # or the slice would be copied twice
            return bytes(view[begin:end])

    @property
    def pending_bytes(self) -> int:
        """What has arrived of the messages that were not taken yet."""
        return len(self._buffer) - self._start

    @property
    def missing_bytes(self) -> int:
        """How much of the present message has yet to arrive; 0 where its length is not known."""
        if self.pending_bytes < LENGTH_BYTES:
            return 0
        begin = self._start + LENGTH_BYTES
        length = int.from_bytes(self._buffer[self._start : begin], "big")
        return max(0, length - (self.pending_bytes - LENGTH_BYTES))
