"""Tells a build that was killed from a host that kills builds (protocol.md, "Jobs and holds at the worker").

When all builds of a worker, two at least, end by signal within a second, that is the host's failure.
Pure: `now` in seconds of one monotonic clock.
"""

from collections import deque
from dataclasses import dataclass

from gradient_worker.timing import HOST_FAILURE_WINDOW_SECS

__all__ = ["HostWatch"]

KEPT_SECS = 3 * HOST_FAILURE_WINDOW_SECS
"""How long an end is remembered: a build that waits for its verdict looks back one window and a bit."""


@dataclass(slots=True, eq=False)
class _Seen:
    started_at: float
    ended_at: float | None = None
    by_signal: bool = False


class HostWatch:
    """The builds of this worker that run or have just ended."""

    def __init__(self) -> None:
        self._running: dict[str, _Seen] = {}
        self._ended: deque[tuple[str, _Seen]] = deque()

    @property
    def running(self) -> int:
        """Builds that run now."""
        return len(self._running)

    def started(self, assignment_id: str, now: float) -> None:
        """A build runs."""
        self._running[assignment_id] = _Seen(now)

    def ended(self, assignment_id: str, now: float, *, by_signal: bool) -> None:
        """A build's command ended. One that never started is ignored."""
        while self._ended and self._end_of(self._ended[0][1]) < now - KEPT_SECS:
            self._ended.popleft()
        seen = self._running.pop(assignment_id, None)
        if seen is not None:
            seen.ended_at, seen.by_signal = now, by_signal
            self._ended.append((assignment_id, seen))

    def may_be_host(self, assignment_id: str) -> bool:
        """Whether it is worth waiting a second for the others, for a build that ended by signal."""
        seen = self._find(assignment_id)
        return seen is not None and seen.by_signal and len(self._beside(seen)) > 1

    def is_host(self, assignment_id: str) -> bool:
        """Whether everything that ran ended by signal within a second of this build."""
        seen = self._find(assignment_id)
        if seen is None:
            return False
        beside = self._beside(seen)
        return len(beside) > 1 and all(self._together(other, seen) for other in beside)

    def _find(self, assignment_id: str) -> _Seen | None:
        return next((seen for name, seen in reversed(self._ended) if name == assignment_id), None)

    def _beside(self, seen: _Seen) -> list[_Seen]:
        """What ran when it ended, or ended in the second before; itself too."""
        end = self._end_of(seen)
        others = [*self._running.values(), *(other for _, other in self._ended)]
        return [
            other
            for other in others
            if other.started_at <= end and self._end_of(other) >= end - HOST_FAILURE_WINDOW_SECS
        ]

    @classmethod
    def _together(cls, other: _Seen, seen: _Seen) -> bool:
        apart = abs(cls._end_of(other) - cls._end_of(seen))
        return other.by_signal and apart <= HOST_FAILURE_WINDOW_SECS

    @staticmethod
    def _end_of(seen: _Seen) -> float:
        return float("inf") if seen.ended_at is None else seen.ended_at
