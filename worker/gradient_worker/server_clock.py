"""The server's clock as the worker knows it (protocol.md, "Spans and metrics").

Each HeartbeatAck gives one sample: the server's time less the middle of the round trip. The sample
of the shortest of the last eight round trips is the offset, for it bounds the error best.

Everything is kept on a clock of this host that nobody sets, so that neither a wall clock that is off
nor one that is stepped moves anything; the wall clock serves only until the first sample.
"""

from collections import deque
from collections.abc import Callable

__all__ = ["ServerClock"]

SAMPLES = 8
# What two clocks may drift apart while eight heartbeats last.
DRIFT_SECS = 1.0


class ServerClock:
    """`wall` in seconds since the epoch; `steady` in seconds on a clock that never steps."""

    def __init__(self, wall: Callable[[], float], steady: Callable[[], float]) -> None:
        self._wall = wall
        self.steady = steady
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._offset_secs = wall() - steady()

    @property
    def measured(self) -> bool:
        """Whether there is a sample at all."""
        return bool(self._samples)

    def now(self) -> float:
        """The server's time, in seconds since the epoch."""
        return self.at(self.steady())

    def at(self, instant: float) -> float:
        """An instant of the steady clock on the server's, as far as it is known by now."""
        return instant + self._offset_secs

    def of_wall(self, wall_time: float) -> float:
        """A past instant of this host's wall clock on the steady one. One of the future is taken as now."""
        return self.steady() - max(0.0, self._wall() - wall_time)

    def sample(self, sent_at: float, received_at: float, server_time: float) -> None:
        """One answered heartbeat; the first two on the steady clock.

        A sample that no round trip explains means that the server's clock was set: what was learnt
        before it is void.
        """
        round_trip = received_at - sent_at
        offset_secs = server_time - (sent_at + received_at) / 2
        if self._samples:
            shortest, known = min(self._samples)
            if abs(offset_secs - known) > (round_trip + shortest) / 2 + DRIFT_SECS:
                self._samples.clear()
        self._samples.append((round_trip, offset_secs))
        self._offset_secs = min(self._samples)[1]
