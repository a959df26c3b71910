"""The one aging reservation (cluster-jobs.md, Aging Reservations; design.md, Seats and reservations).

A cluster that can start and has found no seats for `after_secs`, counted from its last member's
arrival, reserves a placement over every connected eligible worker. Its seats keep their running jobs
and get no new single job of the reserved kind. The reservation ends with its cluster's start, with the
cluster leaving the queue, with a seat's worker leaving, or after `timeout_secs`. A failed prepare does
not end it: it is planned again, for 30 s without the worker that rejected.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gradient_protocol.kinds import JobKind

__all__ = ["AVOID_SECS", "Release", "Reservation", "ReservationDesk", "ReservedSeat", "backfill_secs"]

AVOID_SECS: Final = 30.0


class Release(enum.StrEnum):
    """Why a reservation ended."""

    TIMEOUT = "it was held for scheduler.clusterReserveTimeoutSecs"
    WORKER_LEFT = "the worker of a seat left"
    STARTED = "the cluster started"
    DENIED = "another server instance holds the reservation of the pool"
    LEFT_QUEUE = "the cluster left the queue"


@dataclass(frozen=True, slots=True)
class ReservedSeat:
    """One member's seat."""

    job_key: str
    worker_id: str
    kind: JobKind


@dataclass(slots=True)
class Reservation:
    """Times on the monotonic clock. `replan`: a prepare on these seats failed."""

    cluster_id: str
    reserved_at: float
    seats: tuple[ReservedSeat, ...]
    replan: bool = False
    avoided: dict[str, float] = field(default_factory=dict)


class ReservationDesk:
    """Who holds the reservation."""

    def __init__(self, *, after_secs: float, timeout_secs: float) -> None:
        self.after_secs = after_secs
        self.timeout_secs = timeout_secs
        self.held: Reservation | None = None
        self._reserved: frozenset[tuple[str, JobKind]] = frozenset()
        self.workers: frozenset[str] = frozenset()

    def is_reserved(self, worker_id: str, kind: JobKind) -> bool:
        """Whether the worker gets no new single job of this kind."""
        return (worker_id, kind) in self._reserved

    def has_aged(self, ready_since: float | None, now: float) -> bool:
        """Whether a cluster that could start since `ready_since` may reserve."""
        return ready_since is not None and now - ready_since >= self.after_secs

    def grant(self, cluster_id: str, seats: tuple[ReservedSeat, ...], now: float) -> Reservation:
        """Reserves. ValueError while another cluster holds the reservation."""
        if self.held is not None:
            raise ValueError(f"{self.held.cluster_id} holds the reservation")
        self.held = Reservation(cluster_id, now, seats)
        self._index()
        return self.held

    def move(self, seats: tuple[ReservedSeat, ...]) -> None:
        """Other seats for the same cluster; its clock runs on."""
        held = self._holder()
        held.seats = seats
        held.replan = False
        self._index()

    def prepare_failed(self, cluster_id: str, rejecting: str | None, now: float) -> None:
        """The holder's prepare failed, maybe for a worker's reject: its seats are planned again."""
        held = self.held
        if held is None or held.cluster_id != cluster_id:
            return
        held.replan = True
        if rejecting is not None:
            held.avoided[rejecting] = now + AVOID_SECS
            held.seats = tuple(seat for seat in held.seats if seat.worker_id != rejecting)
            self._index()

    def avoided(self, now: float) -> frozenset[str]:
        """Workers that the holder is planned without for the moment."""
        if self.held is None:
            return frozenset()
        return frozenset(worker for worker, until in self.held.avoided.items() if now < until)

    def expired(self, now: float) -> bool:
        """Whether it has been held for too long."""
        return self.held is not None and now - self.held.reserved_at >= self.timeout_secs

    def release(self) -> None:
        """Nothing is reserved any more."""
        self.held = None
        self._index()

    def _holder(self) -> Reservation:
        if self.held is None:
            raise ValueError("nothing is reserved")
        return self.held

    def _index(self) -> None:
        seats = () if self.held is None else self.held.seats
        self._reserved = frozenset((seat.worker_id, seat.kind) for seat in seats)
        self.workers = frozenset(seat.worker_id for seat in seats)


def backfill_secs(expected_ends: Iterable[float | None], now: float) -> float:
    """How long a single job on a reserved seat may take (`scheduler.clusterBackfill`), 0 for none.

    Until the latest expected end among the busy seats; those whose end nobody knows allow nothing.
    """
    known = [end for end in expected_ends if end is not None]
    return max(max(known, default=now) - now, 0.0)
