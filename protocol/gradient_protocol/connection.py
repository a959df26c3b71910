"""One session's stream: messages in, two lanes out (protocol.md, "Stream" and "Lanes and flow").

A session has two tasks on it. The owner loops over `receive`; `run`, started in the session's
nursery, writes. Everybody else calls `send`, which never waits, or sends through a `BulkStream`.
What ends the session, whichever task meets it first, is kept as one line, and every later call
raises SessionClosed with it. The owner calls `aclose` on every path.
"""

from collections.abc import Callable
from contextlib import suppress

import trio

from gradient_protocol.at_once import read_when_ready, write_at_once
from gradient_protocol.bulk import BulkMessage, BulkStream
from gradient_protocol.codec import Decoder, Side, encode
from gradient_protocol.envelope import unwrap, wrap
from gradient_protocol.errors import BAD_REQUEST, ProtocolError, SessionClosed
from gradient_protocol.framing import FrameReader, frame
from gradient_protocol.lanes import Batch, Lanes
from gradient_protocol.limits import (
    CONTROL_LIMIT,
    MAX_MESSAGE,
    MAX_MESSAGE_BEFORE_INIT,
    WRITE_STALL_SECS,
    ZSTD_THRESHOLD,
)
from gradient_protocol.messages.common import BulkAck, Message, Zstd

__all__ = ["BulkMessage", "BulkStream", "Connection"]

_RECEIVE_BYTES = 64 * 1024
_RECEIVE_LARGE_BYTES = 256 * 1024  # for the rest of a message that is known to be large
_WRITE_BYTES = 64 * 1024  # progress is judged by pieces of this size
_LAST_WORDS_SECS = 1.0  # how long a peer that takes nothing more is still listened to
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)


class Connection:
    """One session's stream. `receive` has one caller; `send` may be called from anywhere."""

    def __init__(self, stream: trio.abc.Stream, side: Side) -> None:
        """`side` is who we are."""
        self.side = side
        self.last_received: float = trio.current_time()  # of the last message, trio's clock
        self._stream = stream
        self._decoder = Decoder(side.other)
        self._frames = FrameReader()
        self._lanes = Lanes()
        self._bulk: dict[str, BulkStream] = {}  # those that take acknowledgements
        self._unwritten: dict[int, BulkStream] = {}  # by key: those with a chunk queued or in flight
        self._next_key = 0
        self._writer_wakes = trio.lowlevel.ParkingLot()
        self._control_drained = trio.lowlevel.ParkingLot()
        self._max_message = MAX_MESSAGE_BEFORE_INIT
        self._zstd = False
        self._end_reason: str | None = None
        self._reader_done = trio.Event()
        self._writer_scope = trio.CancelScope()
        self._writer_done: trio.Event | None = None  # None: no writer runs
        self._write_began: float | None = None  # trio's clock, at the last progress; None between writes
        self._peer_is_gone = False
        self._lingering = False

    # Receiving

    async def receive(self) -> Message:
        """The next message; `Zstd` is unwrapped, `BulkAck` consumed.

        Raises SessionClosed; ProtocolError as `Decoder.decode`, after which only a
        ReportContentError or JobContentError leaves the connection usable.
        """
        while True:
            payload = self._frames.next_payload()
            if payload is None:
                await self._receive_some()
                continue
            self.last_received = trio.current_time()
            message = self._decoder.decode(payload)
            if type(message) is Zstd:
                message = self._unwrap(message)
            if type(message) is BulkAck:
                stream = self._bulk.get(message.id)
                if stream is not None:
                    stream.acknowledge(message.offset)
                continue
            return message

    def _unwrap(self, envelope: Zstd) -> Message:
        if not self._zstd:
            raise ProtocolError(BAD_REQUEST, "Zstd before InitAck, or without the common capability")
        message = self._decoder.decode(unwrap(envelope))
        if type(message) is Zstd:
            raise ProtocolError(BAD_REQUEST, "Zstd inside Zstd")
        return message

    async def _receive_some(self) -> None:
        large = self._frames.missing_bytes > _RECEIVE_BYTES
        try:
            data = await read_when_ready(self._stream, _RECEIVE_LARGE_BYTES if large else _RECEIVE_BYTES)
        except _BROKEN as error:
            self._reader_done.set()
            self._end("the connection broke" if isinstance(error, trio.BrokenResourceError) else "closed")
            raise self._closed() from None
        if not data:
            self._reader_done.set()
            cut = " in the middle of a message" if self._frames.pending_bytes else ""
            self._end(f"the peer closed the connection{cut}")
            raise self._closed()
        self._frames.feed(data)

    # Sending

    def send(self, message: Message) -> None:
        """Queues a control message. Raises SessionClosed once the session has ended.

        Over 16 MiB of queued control the session ends; the next call says so. ValueError for a
        message that the peer's limits would refuse.
        """
        if self._end_reason is not None:
            raise self._closed()
        payload = encode(message)
        if len(payload) > self._max_message:
            kind = type(message).__name__
            raise ValueError(f"{kind} of {len(payload)} bytes, at most {self._max_message} are taken")
        if self._zstd and len(payload) > ZSTD_THRESHOLD:
            payload = wrap(payload)
        self._lanes.put_control(frame(payload))
        if self._lanes.is_overflowing:
            self._end(f"over {CONTROL_LIMIT} bytes of control messages were waiting to be written")
        self._writer_wakes.unpark()

    def enable(self, *, zstd: bool) -> None:
        """`InitAck` was sent or received: from now on 4 MiB a message; `zstd` if both sides have it."""
        self._frames.limit = self._max_message = MAX_MESSAGE
        self._zstd = zstd

    @property
    def pending_control_bytes(self) -> int:
        """Control bytes that are not on the wire yet."""
        return self._lanes.control_bytes

    @property
    def control_has_room(self) -> bool:
        """Whether reports, candidates and forwarded signals may be sent (under 4 MiB waits)."""
        return self._lanes.has_room

    async def control_room(self) -> None:
        """Returns once the control lane has room. No checkpoint between that and the caller's `send`.

        Raises SessionClosed.
        """
        while True:
            if self._end_reason is not None:
                raise self._closed()
            if self._lanes.has_room:
                return
            await self._control_drained.park()

    def open_bulk(
        self, stream_id: str, offset: int = 0, on_acknowledged: Callable[[int], None] | None = None
    ) -> BulkStream:
        """A transfer, request or log, by the id that its `BulkAck`s bear, going on from `offset`.

        `on_acknowledged` is called from within `receive` with each higher offset.
        Raises SessionClosed, ValueError if the id is open.
        """
        if self._end_reason is not None:
            raise self._closed()
        if stream_id in self._bulk:
            raise ValueError(f"the stream {stream_id} is open already")
        self._next_key += 1
        stream = BulkStream(
            stream_id,
            offset,
            key=self._next_key,
            lanes=self._lanes,
            queued=self._bulk_queued,
            forget=self._bulk.pop,
            on_acknowledged=on_acknowledged,
        )
        self._bulk[stream_id] = stream
        return stream

    def _bulk_queued(self, stream: BulkStream) -> None:
        self._unwritten[stream.key] = stream
        self._writer_wakes.unpark()

    # Writing

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Writes until the session ends, then returns; `receive` and `send` say why it ended."""
        self._writer_done = trio.Event()
        task_status.started()
        try:
            with self._writer_scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch_progress)
                    await self._write_lanes()
                    nursery.cancel_scope.cancel()
            if self._peer_is_gone:
                # Its last words, an `Error` most likely, may still be on their way.
                with trio.move_on_after(_LAST_WORDS_SECS):
                    await self._reader_done.wait()
        finally:
            self._writer_done.set()
            self._writer_done = None
            if self._write_began is not None:
                self._end("the writer was canceled in the middle of a message")
            if self._end_reason is not None and not self._lingering:
                await trio.aclose_forcefully(self._stream)

    async def _write_lanes(self) -> None:
        try:
            while self._end_reason is None:
                batch = self._lanes.take()
                if batch is None:
                    await self._writer_wakes.park()
                else:
                    await self._write(batch)
        except _BROKEN:
            self._peer_is_gone = True
            self._end("the connection broke")

    async def _watch_progress(self) -> None:
        """Ends the session at 30 s without progress. A scope around every write would cost more than it."""
        while True:
            began = self._write_began
            now = trio.current_time()
            due = WRITE_STALL_SECS + (now if began is None else began)
            if now >= due:
                self._end(f"a write made no progress for {WRITE_STALL_SECS:g} s")
                return
            await trio.sleep_until(due)

    async def _write(self, batch: Batch) -> None:
        streams = [self._unwritten[key] for key in batch.streams]
        for stream in streams:
            stream.taken()
        await self._write_all(batch.data)
        self._lanes.written(batch)
        for stream in streams:
            stream.written()
            if not self._lanes.holds(stream.key):
                del self._unwritten[stream.key]
        if batch.control_bytes and self._lanes.has_room:
            self._control_drained.unpark_all()

    async def _write_all(self, data: bytes) -> None:
        """Leaves `_write_began` set when it fails: what is on the wire then ends nowhere."""
        self._write_began = trio.current_time()
        done = write_at_once(self._stream, data)
        if done < len(data):
            view = memoryview(data)
            for begin in range(done, len(data), _WRITE_BYTES):
                await self._stream.send_all(view[begin : begin + _WRITE_BYTES])
                self._write_began = trio.current_time()
        self._write_began = None

    # Ending

    @property
    def closed_reason(self) -> str | None:
        """Why the session ended, None while it lives."""
        return self._end_reason

    async def aclose(self, *, flush_secs: float = 0.0) -> None:
        """Ends the session. With `flush_secs`, control that is queued goes out first, for so long.

        To be called on every path, from the task that receives; safe to repeat, and under cancellation.
        """
        if flush_secs > 0 and self._end_reason is None:
            with trio.move_on_after(flush_secs, shield=True), suppress(*_BROKEN, trio.BusyResourceError):
                await self._flush()
                await self._linger()
        self._end("closed")
        await trio.aclose_forcefully(self._stream)

    async def _flush(self) -> None:
        while self._lanes.control_bytes and self._end_reason is None:
            if self._writer_done is not None:
                await self._control_drained.park()
            elif (batch := self._lanes.take()) is not None:
                await self._write(batch)

    async def _linger(self) -> None:
        """Reads on until the peer has closed: a close with unread bytes would destroy our last words."""
        if self._end_reason is not None:
            return
        self._lingering = True
        self._end("closed")
        if self._writer_done is not None:
            await self._writer_done.wait()
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            await self._stream.send_eof()
        with trio.move_on_after(_LAST_WORDS_SECS):
            while await self._stream.receive_some(_RECEIVE_BYTES):
                pass

    def _end(self, reason: str) -> None:
        """The first reason stands; wakes all who wait."""
        if self._end_reason is not None:
            return
        self._end_reason = reason
        self._writer_scope.cancel()
        for stream in [*self._bulk.values(), *self._unwritten.values()]:
            stream.session_ended(reason)
        self._writer_wakes.unpark_all()
        self._control_drained.unpark_all()

    def _closed(self) -> SessionClosed:
        return SessionClosed(self._end_reason or "closed")
