"""A peer that knows nothing but the specification: raw frames through the `msgpack` package.

It shares no code with `gradient_protocol`, so that two implementations hold each other.
"""

from collections.abc import Collection
from typing import Any

import msgpack
import trio
import zstandard

__all__ = ["Closed", "Fields", "RawPeer", "nested"]

Fields = dict[str, Any]

PATIENCE_SECS = 10.0
_MAX_FRAME = 4 * 1024 * 1024


class Closed(Exception):  # noqa: N818 - an outcome that checks ask for
    """The other side closed the stream."""


def nested(depth: int) -> object:
    """Arrays in arrays."""
    value: object = None
    for _ in range(depth):
        value = [value]
    return value


class RawPeer:
    """One end of a session. Every wait is bounded by `patience_secs` and fails with what was heard."""

    def __init__(self, stream: trio.abc.Stream, patience_secs: float = PATIENCE_SECS) -> None:
        self.stream = stream
        self.patience_secs = patience_secs
        self.heard: list[str] = []
        self._buffer = bytearray()

    # Sending

    async def send(self, kind: str, /, **fields: object) -> None:
        """One message. A field `from_` travels as `from`."""
        await self.send_payload(self.payload(kind, **fields))

    @staticmethod
    def payload(kind: str, /, **fields: object) -> bytes:
        """One encoded message."""
        body = {name.removesuffix("_"): value for name, value in fields.items()}
        return msgpack.packb({"type": kind, **body})

    async def send_payload(self, payload: bytes) -> None:
        """Any bytes as one frame."""
        await self.send_bytes(len(payload).to_bytes(4, "big") + payload)

    async def send_bytes(self, data: bytes) -> None:
        """Any bytes. A peer that closes meanwhile is none of the sender's concern."""
        try:
            with trio.fail_after(self.patience_secs):
                await self.stream.send_all(data)
        except trio.BrokenResourceError:
            return

    # Receiving

    async def receive(self) -> Fields:
        """The next message, `Zstd` unwrapped. Raises Closed."""
        with trio.move_on_after(self.patience_secs):
            payload = await self._exactly(int.from_bytes(await self._exactly(4), "big"))
            message = self._unpack(payload)
            if message["type"] == "Zstd":
                with zstandard.ZstdDecompressor().stream_reader(message["data"]) as reader:
                    message = self._unpack(reader.read(_MAX_FRAME))
                assert message["type"] != "Zstd", "Zstd inside Zstd"
            self.heard.append(message["type"])
            return message
        raise AssertionError(f"nothing within {self.patience_secs:g} s after {self.heard[-10:]}")

    @staticmethod
    def _unpack(payload: bytes) -> Fields:
        try:
            message = msgpack.unpackb(payload)
        except (ValueError, msgpack.UnpackException) as error:
            raise AssertionError(f"not MessagePack: {payload[:40].hex()}: {error}") from error
        assert isinstance(message, dict), f"a message is a map, this is {message!r}"
        assert isinstance(message.get("type"), str), f"a message without its type: {message!r}"
        return message

    async def _exactly(self, size: int) -> bytes:
        assert size <= _MAX_FRAME, f"a frame of {size} bytes"
        while len(self._buffer) < size:
            try:
                data = await self.stream.receive_some()
            except trio.BrokenResourceError:
                data = b""
            if not data:
                raise Closed(f"closed after {self.heard[-10:]}")
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def expect(self, *kinds: str, passing: Collection[str] = ()) -> Fields:
        """The next message that is not one of `passing`; it must be one of `kinds`."""
        deadline = trio.current_time() + self.patience_secs
        while trio.current_time() < deadline:
            message = await self.receive()
            if message["type"] in kinds:
                return message
            assert message["type"] in passing, f"{message} where {kinds} is due"
        raise AssertionError(f"no {kinds} within {self.patience_secs:g} s, only {self.heard[-10:]}")

    async def wait_for(self, *kinds: str) -> Fields:
        """The next message of these kinds, whatever else comes before. `Error` and `Reject` are no else."""
        deadline = trio.current_time() + self.patience_secs
        while trio.current_time() < deadline:
            message = await self.receive()
            if message["type"] in kinds:
                return message
            assert message["type"] not in ("Error", "Reject"), f"{message} where {kinds} is due"
        raise AssertionError(f"no {kinds} within {self.patience_secs:g} s, only {self.heard[-10:]}")

    async def expect_end(self, code: int, kinds: Collection[str] = ("Error",)) -> Fields:
        """The session's end with this code: the message that says so, then the close."""
        message = await self.wait_for(*kinds, "Error", "Reject")
        assert message["type"] in kinds, message
        assert message["code"] == code, message
        assert isinstance(message["reason"], str)
        assert message["reason"]
        await self.expect_close()
        return message

    async def expect_close(self) -> None:
        """The other side closes, whatever it still says."""
        deadline = trio.current_time() + self.patience_secs
        while trio.current_time() < deadline:
            try:
                await self.receive()
            except Closed:
                return
        raise AssertionError(f"not closed within {self.patience_secs:g} s after {self.heard[-10:]}")

    async def silence(self, kinds: Collection[str], secs: float) -> None:
        """None of these kinds arrives for so long."""
        with trio.move_on_after(secs):
            while True:
                message = await self.receive()
                assert message["type"] not in kinds, f"{message} is out of turn"
