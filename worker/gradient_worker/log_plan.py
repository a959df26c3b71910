"""Which bytes of a build's spooled output become its log, and where they stand in it.

A build may write faster than the limits of `worker.log.burstBytesPerMin` and `sustainedBytesPerHour`
allow. It is never stopped and never waits: what is over the limits is left out, one line in its place
says how much, and the end of the output is kept whatever the limits say, for it tells why a build
failed. So the log is the spool with gaps, each replaced by a line:

    spool   |######|.....left out.....|#######|
    log     |######|<line>|#######|

Offsets in the log are what travels (LogChunk). A resume names such an offset, so a gap once made must
stay as it is: gaps are plain values that the shell keeps in a file. Pure.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Gap", "LogBudget", "LogLayout", "LogPlan", "SpoolPart", "TextPart"]

TAIL_BYTES: Final = 16 * 1024
"""The end of the output that is kept beyond the limits."""

RESUME_BYTES: Final = 256 * 1024
"""Room that the limits must have again before a gap is closed, so that gaps stay few."""


class LogBudget:
    """Two token buckets: what a build may log in a minute and in an hour. `now` in seconds."""

    def __init__(self, burst_bytes_per_min: int, sustained_bytes_per_hour: int, now: float) -> None:
        self._limits = ((burst_bytes_per_min, 60.0), (sustained_bytes_per_hour, 3600.0))
        self._tokens = [float(burst_bytes_per_min), float(sustained_bytes_per_hour)]
        self._filled_at = now

    def room(self, now: float) -> int:
        """Bytes that may be logged now."""
        elapsed = max(0.0, now - self._filled_at)
        self._filled_at = now
        for index, (limit, secs) in enumerate(self._limits):
            self._tokens[index] = min(float(limit), self._tokens[index] + elapsed * limit / secs)
        return max(0, int(min(self._tokens)))

    def spend(self, size: int) -> None:
        """So many bytes were logged."""
        self._tokens = [tokens - size for tokens in self._tokens]


@dataclass(frozen=True, slots=True)
class Gap:
    """`skipped` bytes of the spool from `at` on are left out; `text` stands in their place."""

    at: int
    skipped: int
    text: bytes


@dataclass(frozen=True, slots=True)
class SpoolPart:
    """Bytes of the log that are read from the spool."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class TextPart:
    """Bytes of the log that stand for a gap."""

    data: bytes


class LogLayout:
    """Translates offsets of the log into places of the spool."""

    def __init__(self, gaps: Sequence[Gap] = ()) -> None:
        self._gaps: list[Gap] = []
        self._starts: list[int] = []  # of each gap's text, in the log
        for gap in gaps:
            self.add(gap)

    @property
    def gaps(self) -> Sequence[Gap]:
        """All gaps, in order."""
        return tuple(self._gaps)

    def add(self, gap: Gap) -> None:
        """Append a gap behind all others."""
        self._starts.append(self.log_offset(gap.at))
        self._gaps.append(gap)

    def log_offset(self, spool_offset: int) -> int:
        """Where a spool offset behind the last gap stands in the log."""
        if not self._gaps:
            return spool_offset
        last = self._gaps[-1]
        return self._starts[-1] + len(last.text) + spool_offset - last.at - last.skipped

    def part(self, offset: int, limit: int) -> SpoolPart | TextPart:
        """The piece of the log at `offset`, at most `limit` long and within one segment."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            bound = self._starts[0] if self._starts else offset + limit
            return SpoolPart(offset, min(limit, bound - offset))
        gap, within = self._gaps[index], offset - self._starts[index]
        if within < len(gap.text):
            return TextPart(gap.text[within : within + limit])
        bound = self._starts[index + 1] if index + 1 < len(self._starts) else offset + limit
        return SpoolPart(gap.at + gap.skipped + within - len(gap.text), min(limit, bound - offset))


class LogPlan:
    """Decides, as the spool grows, how far the log goes and where its gaps are.

    `layout` is the log as decided so far, `length` its size. `advance` is called with the spool's size
    whether or not anything can be sent, for the limits count what a build writes, not what travels.
    """

    def __init__(self, budget: LogBudget, layout: LogLayout | None = None) -> None:
        self._budget = budget
        self.layout = layout or LogLayout()
        gaps = self.layout.gaps
        self._position = gaps[-1].at + gaps[-1].skipped if gaps else 0
        self._skipping = False

    @property
    def length(self) -> int:
        """Bytes of log that are decided and may be sent."""
        return self.layout.log_offset(self._position)

    def advance(self, spool_size: int, now: float, *, ended: bool) -> Gap | None:
        """Take in what was written. Returns a new gap, to be kept before anything behind it is sent."""
        room = self._budget.room(now)
        if self._skipping:
            return self._end_gap(spool_size, room, ended=ended)
        size = min(spool_size - self._position, room)
        self._move(size)
        if spool_size == self._position:
            return None
        self._skipping = True
        return self._end_gap(spool_size, 0, ended=ended)

    def close(self, discarded_bytes: int) -> Gap | None:
        """The log is complete but for what the runner threw away beyond the spool's limit: say so."""
        gaps = self.layout.gaps
        if not discarded_bytes or (gaps and gaps[-1].at == self._position and not gaps[-1].skipped):
            return None
        gap = Gap(self._position, 0, _left_out(discarded_bytes))
        self.layout.add(gap)
        return gap

    def _end_gap(self, spool_size: int, room: int, *, ended: bool) -> Gap | None:
        waiting = spool_size - self._position
        if not ended and room < RESUME_BYTES:
            return None
        kept = min(waiting, TAIL_BYTES) if ended else 0
        self._skipping = False
        if waiting == kept:
            self._move(kept)
            return None
        skipped = waiting - kept
        gap = Gap(self._position, skipped, _left_out(skipped))
        self.layout.add(gap)
        self._position += skipped
        self._budget.spend(len(gap.text))
        self._move(kept)
        return gap

    def _move(self, size: int) -> None:
        self._position += size
        self._budget.spend(size)


def _left_out(size: int) -> bytes:
    return f"\n[gradient: {size} bytes of output left out, over the worker's log limits]\n".encode()
