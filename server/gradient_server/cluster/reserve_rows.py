"""The desk's decisions as the pool's one row: written in order, by one task.

Memory goes first, for reserved seats must be locked at once; where another instance turns out to hold
the pool's reservation, this one gives up its own.
"""

from collections import deque
from collections.abc import Callable

from gradient_server.clock import Clock
from gradient_server.cluster.reservation import Reservation
from gradient_server.cluster.store import ClusterStore
from gradient_server.scheduler.signal import Signal

__all__ = ["ReservationRows"]


class ReservationRows:
    """`denied(reservation)` is called for one that another instance was faster with."""

    def __init__(self, store: ClusterStore, clock: Clock, denied: Callable[[Reservation], None]) -> None:
        self._store = store
        self._clock = clock
        self._denied = denied
        self._wanted: deque[tuple[str, Reservation | None]] = deque()
        self._signal = Signal()

    def held(self, reservation: Reservation) -> None:
        """A reservation was granted, or has other seats now."""
        self._wanted.append((reservation.cluster_id, reservation))
        self._signal.set()

    def released(self, cluster_id: str) -> None:
        """A reservation ended."""
        self._wanted.append((cluster_id, None))
        self._signal.set()

    async def write(self) -> None:
        """Writes what has been decided."""
        while self._wanted:
            cluster_id, reservation = self._wanted.popleft()
            if reservation is None:
                await self._store.release_reservation(cluster_id)
                continue
            reserved_at = self._clock.now() - (self._clock.monotonic() - reservation.reserved_at)
            seats = {seat.job_key: seat.worker_id for seat in reservation.seats}
            if not await self._store.reserve(cluster_id, seats, reserved_at):
                self._denied(reservation)

    async def run(self) -> None:
        """Writes, for ever."""
        while True:
            await self.write()
            await self._signal.wait()
