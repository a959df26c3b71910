"""Tells a build that was killed from a host that kills builds (protocol.md, "Jobs and holds at the worker").

When all builds of a worker, two at least, end by signal within a second, that is the host's failure.
Pure: `now` in seconds of one monotonic clock.
"""

from dataclasses import dataclass

from gradient_worker.timing import HOST_FAILURE_WINDOW_SECS

__all__ = ["HostWatch"]


@dataclass(slots=True)
class _Seen:
    started_at: float
    ended_at: float | None = None
    by_signal: bool = False


class HostWatch:
    """The builds of this worker that run or have just ended."""

    def __init__(self) -> None:
        self._builds: dict[str, _Seen] = {}

    @property
    def running(self) -> int:
        """Builds that run now."""
        return sum(1 for seen in self._builds.values() if seen.ended_at is None)

    def started(self, assignment_id: str, now: float) -> None:
        """A build runs."""
        self._builds[assignment_id] = _Seen(now)

    def ended(self, assignment_id: str, now: float, *, by_signal: bool) -> None:
        """A build's command ended."""
        self._forget_old(now)
        seen = self._builds.setdefault(assignment_id, _Seen(now))
        seen.ended_at, seen.by_signal = now, by_signal

    def may_be_host(self, assignment_id: str) -> bool:
        """Whether it is worth waiting a second for the others, for a build that ended by signal."""
        seen = self._builds[assignment_id]
        return seen.by_signal and len(self._beside(seen)) > 1

    def is_host(self, assignment_id: str) -> bool:
        """Whether everything that ran ended by signal within a second of this build."""
        seen = self._builds[assignment_id]
        beside = self._beside(seen)
        return len(beside) > 1 and all(self._together(other, seen) for other in beside)

    def _beside(self, seen: _Seen) -> list[_Seen]:
        assert seen.ended_at is not None
        ended_at = seen.ended_at
        return [
            other
            for other in self._builds.values()
            if other.started_at <= ended_at
            and (other.ended_at is None or other.ended_at >= ended_at - HOST_FAILURE_WINDOW_SECS)
        ]

    @staticmethod
    def _together(other: _Seen, seen: _Seen) -> bool:
        if other.ended_at is None or seen.ended_at is None:
            return False
        return other.by_signal and abs(other.ended_at - seen.ended_at) <= HOST_FAILURE_WINDOW_SECS

    def _forget_old(self, now: float) -> None:
        old = now - 10 * HOST_FAILURE_WINDOW_SECS
        self._builds = {
            name: seen for name, seen in self._builds.items() if seen.ended_at is None or seen.ended_at >= old
        }
