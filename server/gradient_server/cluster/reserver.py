"""The reservation in force: the desk's decisions carried out on pool, dispatcher and row."""

from collections.abc import Sequence
from typing import Final

import structlog
from gradient_protocol.kinds import JobKind

from gradient_server.clock import Clock
from gradient_server.cluster.dispatch import PassOutcome
from gradient_server.cluster.reservation import (
    Release,
    Reservation,
    ReservationDesk,
    ReservedSeat,
    backfill_secs,
)
from gradient_server.cluster.reserve_rows import ReservationRows
from gradient_server.cluster.settings import ClusterSettings
from gradient_server.cluster.store import ClusterStore
from gradient_server.scheduler.scheduler import Scheduler

__all__ = ["Reserver"]

log = structlog.get_logger(__name__)

_DENIED_SECS: Final = 5.0


class Reserver:
    """Holds `desk`; `rows` writes what it decides, by a loop of its own."""

    def __init__(
        self, *, scheduler: Scheduler, store: ClusterStore, clock: Clock, settings: ClusterSettings
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._clock = clock
        self._settings = settings
        self.desk = ReservationDesk(
            after_secs=settings.reserve_after_secs, timeout_secs=settings.reserve_timeout_secs
        )
        self.rows = ReservationRows(store, clock, self._denied)
        self._reserve_again_at = 0.0

    def may_reserve(self, now: float) -> bool:
        """Not right after another instance turned out to hold the pool's reservation."""
        return now >= self._reserve_again_at

    def release_of(self, cluster_id: str, why: Release) -> None:
        """The reservation ends if it is this cluster's."""
        if self.desk.held is not None and self.desk.held.cluster_id == cluster_id:
            self.release(why)

    def backfill_secs(self, worker_id: str, kind: JobKind) -> float | None:
        """Reserved seats get no new single job of their kind; with backfill, short builds."""
        held = self.desk.held
        if held is None or not self.desk.is_reserved(worker_id, kind):
            return None
        if not self._settings.backfill or kind is not JobKind.BUILD:
            return 0.0
        now = self._clock.monotonic()
        return backfill_secs((self._expected_end(seat, now) for seat in held.seats), now)

    def _expected_end(self, seat: ReservedSeat, now: float) -> float | None:
        """When a busy seat is expected to be free; None if it is, or if nobody knows."""
        worker = self._pool.workers.get(seat.worker_id)
        if worker is None or worker.slots[seat.kind].free:
            return None
        ends = [
            None if one.expected_secs is None else max(one.assigned_at + one.expected_secs, now)
            for one in worker.assigned.values()
            if one.kind is seat.kind
        ]
        known = [end for end in ends if end is not None]
        return min(known) if len(known) == len(ends) and known else None

    def follow(self, outcome: PassOutcome, before: Reservation | None, seats: Sequence[ReservedSeat]) -> None:
        """The row follows the desk; seats that are free again may be taken."""
        if outcome.released is not None and before is not None:
            self._released(before, outcome.released)
        held = self.desk.held
        if held is not None and (held is not before or held.seats != seats):
            log.info("a cluster reserves its seats", cluster=held.cluster_id)
            self.rows.held(held)
            for seat in held.seats:
                if seat.kind is JobKind.BUILD:
                    # Memory is not kept for a build that the reserved worker will not get.
                    self._scheduler.dispatcher.waiting.end_worker(seat.worker_id)

    def release(self, why: Release) -> None:
        """The reservation ends, if there is one."""
        held = self.desk.held
        if held is not None:
            self.desk.release()
            self._released(held, why)

    def _denied(self, reservation: Reservation) -> None:
        """Another instance holds the pool's reservation."""
        self._reserve_again_at = self._clock.monotonic() + _DENIED_SECS
        if self.desk.held is reservation:
            self.release(Release.DENIED)

    def _released(self, reservation: Reservation, why: Release) -> None:
        log.info("a reservation ended", cluster=reservation.cluster_id, reason=str(why))
        self.rows.released(reservation.cluster_id)
        for seat in reservation.seats:
            worker = self._pool.workers.get(seat.worker_id)
            if worker is not None:
                self._scheduler.dispatcher.try_assign(worker, seat.kind)
