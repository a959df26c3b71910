"""The server's clock as the worker knows it (protocol.md, "Spans and metrics").

Each HeartbeatAck gives one sample: the server's time less the middle of the round trip. The sample
of the shortest of the last eight round trips is the offset, for it bounds the error best.
"""

from collections import deque
from collections.abc import Callable

__all__ = ["ServerClock"]

SAMPLES = 8


class ServerClock:
    """Turns this host's wall clock into the server's. `wall` in seconds since the epoch."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._offset_secs = 0.0

    @property
    def offset_secs(self) -> float:
        """What has to be added to this host's clock; 0 before the first sample."""
        return self._offset_secs

    @property
    def measured(self) -> bool:
        """Whether there is a sample at all."""
        return bool(self._samples)

    def now(self) -> float:
        """The server's time, in seconds since the epoch."""
        return self._wall() + self._offset_secs

    def to_server(self, wall_time: float) -> float:
        """An instant of this host's clock on the server's."""
        return wall_time + self._offset_secs

    def sample(self, sent_at: float, received_at: float, server_time: float) -> None:
        """One answered heartbeat; the first two on this host's wall clock.

        A round trip of negative length means that this host's clock was set meanwhile: it says
        nothing, and what was learnt before it is void.
        """
        round_trip = received_at - sent_at
        if round_trip < 0:
            self._samples.clear()
            return
        self._samples.append((round_trip, server_time - (sent_at + received_at) / 2))
        self._offset_secs = min(self._samples)[1]
