"""Ships a build's log from its spool file to the server (protocol.md, "Lanes and flow").

A build never waits for its log: the runner writes the spool, `LogShipper` follows it, and what the
window or a lost connection holds back waits in the file. The final report of a job goes out once
`settled`: everything is written to the present session, or no BulkAck came for 60 s.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgpack
import structlog
import trio
import zstandard
from gradient_protocol.connection import BulkStream
from gradient_protocol.errors import SessionClosed
from gradient_protocol.limits import AHEAD_OF_LOG_SECS
from gradient_protocol.messages.worker import LogChunk

from gradient_worker.log_plan import Gap, LogBudget, LogLayout, LogPlan, SpoolPart
from gradient_worker.threads import Threads
from gradient_worker.timing import LOG_POLL_SECS
from gradient_worker.wakeup import Wakeup
from gradient_worker.wire import Link, Wire

__all__ = ["LogLimits", "LogShipper"]

LOG_CHUNK_BYTES: Final = 240 * 1024
"""Under the 255 KiB of a chunk by more than zstd adds to what cannot be compressed."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LogLimits:
    """`worker.log.*`: how much of a build's output becomes its log."""

    burst_bytes_per_min: int
    sustained_bytes_per_hour: int


class LogShipper:
    """The log of one assignment. `settled_changed` is called when a final report may go out."""

    def __init__(
        self,
        assignment_id: str,
        spool: Path,
        *,
        limits: LogLimits,
        link: Link,
        threads: Threads,
        acknowledged: Callable[[int], None],
        settled_changed: Callable[[], None],
        offset: int = 0,
    ) -> None:
        self._assignment_id = assignment_id
        self._spool = spool
        self._gaps_file = spool.with_name("log.gaps")
        budget = LogBudget(limits.burst_bytes_per_min, limits.sustained_bytes_per_hour, trio.current_time())
        self._plan = LogPlan(budget, LogLayout(_read_gaps(self._gaps_file)))
        self._link = link
        self._threads = threads
        self._on_acknowledged = acknowledged
        self._settled_changed = settled_changed
        self._offset = self._acknowledged = offset
        self._ended = False
        self._poke = Wakeup()
        self._grown = Wakeup()
        self._settled_wire: Wire | None = None
        self._last_ack = trio.current_time()

    def settled(self, wire: Wire) -> bool:
        """Whether the final report may go out on this session."""
        return self._settled_wire is wire or (self._ended and self._acknowledged >= self._plan.length)

    def resume(self, log_offset: int) -> None:
        """A ResumeAck: the server holds the log up to here."""
        self._offset = self._acknowledged = log_offset
        self._settled_wire = None

    def end(self, discarded_bytes: int = 0) -> None:
        """The build is over: the spool does not grow any more. `discarded_bytes` never reached it."""
        if self._ended:
            return
        self._look(ended=True, discarded_bytes=discarded_bytes)
        self._ended = True
        self._last_ack = trio.current_time()
        self._poke.set()
        self._grown.set()

    async def run(self) -> None:
        """Follow the spool and ship it, session after session, until cancelled."""
        await self._look_later()
        if self._ended and not self._plan.length:
            return  # most short builds say nothing
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ship_always)
            while not self._ended:
                self._look(ended=False)
                self._grown.set()
                await self._look_later()
            await self._lose_patience()

    async def _look_later(self) -> None:
        with trio.move_on_after(LOG_POLL_SECS):
            await self._poke.wait()

    def _look(self, *, ended: bool, discarded_bytes: int = 0) -> None:
        """Plan what was written since. A gap is kept before anything behind it is sent."""
        gaps = [self._plan.advance(_size(self._spool), trio.current_time(), ended=ended)]
        if ended:
            gaps.append(self._plan.close(discarded_bytes))
        try:
            for gap in gaps:
                if gap is not None:
                    _append_gap(self._gaps_file, gap)
        except OSError as error:  # costs the next agent a log that fits, and this one nothing
            logger.error("a gap of the log is not kept", file=str(self._gaps_file), error=str(error))

    async def _ship_always(self) -> None:
        while True:
            wire = await self._link.wire()
            await self._ship_or_give_up(wire)
            await wire.ended.wait()

    async def _ship_or_give_up(self, wire: Wire) -> None:
        try:
            await self._ship(wire)
        except SessionClosed:
            logger.debug("the log waits for the next session", assignment_id=self._assignment_id)
        except OSError as error:
            logger.error("the log cannot be read", assignment_id=self._assignment_id, error=str(error))
            self._settle(wire)

    async def _ship(self, wire: Wire) -> None:
        self._last_ack = trio.current_time()
        stream: BulkStream | None = None
        try:
            while True:
                if self._offset < self._plan.length:
                    stream = stream or self._open(wire)
                    await self._send_chunk(wire, stream)
                elif self._ended:
                    break
                else:
                    await self._grown.wait()
            if stream is not None:
                await stream.wait_written()
            self._settle(wire)
            await wire.ended.wait()  # acknowledgements come in on the stream until then
        finally:
            if stream is not None:
                stream.close()

    def _open(self, wire: Wire) -> BulkStream:
        return wire.connection.open_bulk(
            self._assignment_id, offset=self._offset, on_acknowledged=self._acknowledge
        )

    def _acknowledge(self, offset: int) -> None:
        self._last_ack = trio.current_time()
        self._acknowledged = offset
        self._on_acknowledged(offset)

    async def _send_chunk(self, wire: Wire, stream: BulkStream) -> None:
        offset, limit = self._offset, min(LOG_CHUNK_BYTES, self._plan.length - self._offset)
        length, data = await self._threads.run(lambda: self._read(offset, limit, compress=wire.zstd))
        chunk = LogChunk(assignment_id=self._assignment_id, offset=offset, data=data)
        await stream.send(chunk, end_offset=offset + length)
        self._offset = offset + length

    def _read(self, offset: int, limit: int, *, compress: bool) -> tuple[int, bytes]:
        part = self._plan.layout.part(offset, limit)
        if isinstance(part, SpoolPart):
            with self._spool.open("rb") as spool:
                data = os.pread(spool.fileno(), part.length, part.start)
            if not data:
                raise OSError(f"{self._spool} became shorter")
        else:
            data = part.data
        return len(data), zstandard.ZstdCompressor(level=3).compress(data) if compress else data

    async def _lose_patience(self) -> None:
        # The report must not wait for ever for a log that the server cannot take.
        while True:
            await trio.sleep_until(self._last_ack + AHEAD_OF_LOG_SECS)
            wire = self._link.current
            if trio.current_time() < self._last_ack + AHEAD_OF_LOG_SECS:
                continue
            self._last_ack = trio.current_time()
            if wire is not None and self._settled_wire is not wire:
                logger.warning("the final report goes ahead of the log", assignment_id=self._assignment_id)
                self._settle(wire)

    def _settle(self, wire: Wire) -> None:
        self._settled_wire = wire
        self._settled_changed()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _read_gaps(file: Path) -> list[Gap]:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.error("the gaps of a log cannot be read", file=str(file), error=str(error))
        return []
    gaps: list[Gap] = []
    whole_bytes = 0
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    with contextlib.suppress(ValueError, msgpack.UnpackException):  # what is behind is cut off below
        for record in unpacker:
            gaps.append(_gap_of(record))
            whole_bytes = unpacker.tell()
    if whole_bytes < len(data):
        logger.warning("the gaps of a log end in the middle", file=str(file), kept=len(gaps))
        with contextlib.suppress(OSError):  # then the next agent finds it as this one did
            os.truncate(file, whole_bytes)
    return gaps


def _gap_of(record: object) -> Gap:
    match record:
        case [int(at), int(skipped), bytes(text)]:
            return Gap(at, skipped, text)
    raise ValueError("no record of a gap")


def _append_gap(file: Path, gap: Gap) -> None:
    """Whole or not at all: what comes behind half a record could not be read. OSError."""
    with file.open("ab", buffering=0) as opened:
        size = opened.seek(0, os.SEEK_END)
        rest = memoryview(msgpack.packb((gap.at, gap.skipped, gap.text)))
        try:
            while rest:
                rest = rest[opened.write(rest) :]
        except OSError:
            opened.truncate(size)
            raise
