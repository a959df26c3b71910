"""Connections in memory that know the frames they carry, and break at the one that a test names.

A frame is named by who sends it, its message and how many of these came before it: `b> JobUpdate
BuildOutput #1` is the first BuildOutput that worker `b` sends, `b< AssignJob #2` the second AssignJob
that it is sent. Every frame passes whole, so a connection breaks before one, within it or after it and
nowhere else.
"""

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgpack
import trio
import trio.testing
import zstandard
from gradient_protocol.address import Address
from gradient_worker.connector import Dial

__all__ = ["Cut", "Network", "When", "describe", "take_frames"]

_LENGTH_BYTES = 4


class When(enum.Enum):
    """Where a connection breaks: what the receiver has of the frame."""

    BEFORE = "before"
    WITHIN = "within"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Cut:
    """One break, at the named frame."""

    step: str
    when: When

    def __str__(self) -> str:
        return f"{self.when.value} {self.step}"


@dataclass
class Network:
    """One server and its workers. `steps`: the frames since `begin`, in the order of their passing."""

    steps: list[str] = field(default_factory=list)
    sessions: Counter[str] = field(default_factory=Counter)
    """Connections that workers made, by name."""

    def __post_init__(self) -> None:
        self._dialled, self._arriving = trio.open_memory_channel[trio.abc.Stream](100)
        self._open: dict[str, _Line] = {}
        self._seen: Counter[str] = Counter()
        self._cut: Cut | None = None

    def begin(self, cut: Cut | None) -> None:
        """Every connection breaks, so that the steps begin with a handshake; frames count from here on."""
        self.steps.clear()
        self._seen.clear()
        self._cut = cut
        for name in list(self._open):
            self.drop(name)

    def drop(self, name: str) -> None:
        """This worker's connection breaks now, at both ends."""
        line = self._open.pop(name, None)
        if line is not None:
            line.break_now()

    @property
    def was_cut(self) -> bool:
        """Whether the frame came that the connection was to break at."""
        return self._cut is None

    async def dial(self, name: str) -> trio.abc.Stream:
        """A worker connects."""
        ours, theirs = trio.testing.memory_stream_pair()
        await self._dialled.send(theirs)
        self.sessions[name] += 1
        line = self._open[name] = _Line(self, name, ours)
        return line

    def dialler(self, name: str) -> Dial:
        """What this worker's agent connects with."""

        async def dial(_address: Address) -> trio.abc.Stream:
            return await self.dial(name)

        return dial

    def listener(self) -> trio.abc.Listener[trio.abc.Stream]:
        """What the server accepts from."""
        return _Listener(self._arriving)

    def passes(self, direction: str, frame: bytes) -> When | None:
        """Count a frame; where the connection breaks at it, None for not at all."""
        name = f"{direction} {describe(frame)}"
        self._seen[name] += 1
        step = f"{name} #{self._seen[name]}"
        self.steps.append(step)
        if self._cut is None or self._cut.step != step:
            return None
        when, self._cut = self._cut.when, None
        return when


class _Listener(trio.abc.Listener[trio.abc.Stream]):
    def __init__(self, arriving: trio.MemoryReceiveChannel[trio.abc.Stream]) -> None:
        self._arriving = arriving

    async def accept(self) -> trio.abc.Stream:
        return await self._arriving.receive()

    async def aclose(self) -> None:
        self._arriving.close()


class _Line(trio.abc.Stream):
    """A worker's end of its connection."""

    def __init__(
        self,
        network: Network,
        name: str,
        stream: trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream],
    ) -> None:
        self._network = network
        self._name = name
        self._stream = stream
        self._to_send = bytearray()
        self._received = bytearray()
        self._whole = bytearray()
        self._broken = False

    def break_now(self) -> None:
        """What the peer was sent it can still read."""
        self._broken = True
        self._stream.send_stream.close()
        self._stream.receive_stream.close()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self._to_send += data
        for frame in take_frames(self._to_send):
            self._check()
            when = self._network.passes(f"{self._name}>", frame)
            passing = {When.BEFORE: b"", When.WITHIN: frame[: len(frame) // 2]}.get(when, frame)  # type: ignore[call-overload]  # None is no cut
            await self._stream.send_all(passing)
            if when is not None:
                self.break_now()
        self._check()

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while not self._whole:
            await self._receive_frame()
        data = bytes(self._whole[:max_bytes])
        del self._whole[: len(data)]
        return data

    async def _receive_frame(self) -> None:
        for frame in take_frames(self._received):
            when = self._network.passes(f"{self._name}<", frame)
            if when is When.AFTER:
                self._whole += frame
            elif when is When.WITHIN:
                self._whole += frame[: len(frame) // 2]
            else:
                self._whole += frame if when is None else b""
            if when is not None:
                self.break_now()
            if self._whole:
                return
        self._check()
        try:
            data = await self._stream.receive_some()
        except trio.ClosedResourceError:
            raise trio.BrokenResourceError("cut") from None
        if not data:
            raise trio.BrokenResourceError("the server closed the connection")
        self._received += data

    def _check(self) -> None:
        if self._broken:
            raise trio.BrokenResourceError("cut")

    async def aclose(self) -> None:
        await self._stream.aclose()


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Take whole frames off the beginning of `buffer`."""
    while len(buffer) >= _LENGTH_BYTES:
        end = _LENGTH_BYTES + int.from_bytes(buffer[:_LENGTH_BYTES], "big")
        if len(buffer) < end:
            return
        frame = bytes(buffer[:end])
        del buffer[:end]
        yield frame


def describe(frame: bytes) -> str:
    """A frame's message and, of an update, its kind."""
    message = msgpack.unpackb(frame[_LENGTH_BYTES:], strict_map_key=False)
    if message["type"] == "Zstd":
        return "Zstd " + describe(bytes(_LENGTH_BYTES) + _decompressed(message["data"]))
    if message["type"] == "JobUpdate":
        return f"JobUpdate {message['update']['type']}"
    return str(message["type"])


def _decompressed(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)
