"""The planner's passes: when one runs, and what follows from it (cluster-jobs.md, Placement)."""

from typing import Final

import trio

from gradient_server.clock import Clock
from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.dispatch import plan_pass
from gradient_server.cluster.executor import Executor
from gradient_server.cluster.floor import Floor
from gradient_server.cluster.offers import MemberOffers
from gradient_server.cluster.reserver import Reserver
from gradient_server.cluster.seating import Seating
from gradient_server.cluster.settings import PASS_SECS
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scheduler.signal import Signal

__all__ = ["Passes"]

# Planning takes at most half of the event loop, however often it is asked for.
_MAX_PAUSE_SECS: Final = 1.0


class Passes:
    """One pass whenever something has changed that could let a cluster start, and every 5 s."""

    def __init__(
        self,
        *,
        book: ClusterBook,
        floor: Floor,
        scheduler: Scheduler,
        executor: Executor,
        reserver: Reserver,
        seating: Seating,
        offers: MemberOffers,
        clock: Clock,
    ) -> None:
        self._book = book
        self._floor = floor
        self._scheduler = scheduler
        self._executor = executor
        self._reserver = reserver
        self._seating = seating
        self._offers = offers
        self._clock = clock
        self._wanted = Signal()

    def want(self) -> None:
        """Something has changed, or a deadline was set."""
        self._wanted.set()

    def run_one(self) -> None:
        """Overdue prepares first, then a placement for every cluster able to start."""
        now = self._clock.monotonic()
        self._executor.expire(now)
        if self._scheduler.dispatcher.stopping:
            return
        desk = self._reserver.desk
        before = desk.held
        seats = () if before is None else before.seats
        outcome = plan_pass(
            self._book,
            self._floor,
            desk,
            idle_slots=[(worker, kind) for worker, kind, *_ in self._scheduler.pool.idle_slots(now)],
            excluded=self._seating.excluded(now),
            now=now,
            may_reserve=self._reserver.may_reserve(now),
        )
        self._reserver.follow(outcome, before, seats)
        for planned in outcome.attempts:
            self._seating.take(planned, now)
        self._offers.offer(outcome.unseated, now)

    async def run(self) -> None:
        """Passes, for ever."""
        while True:
            with trio.move_on_after(self._until_next()):
                await self._wanted.wait()
            before = self._clock.monotonic()
            self.run_one()
            took_secs = self._clock.monotonic() - before
            await trio.sleep(min(took_secs, _MAX_PAUSE_SECS))

    def _until_next(self) -> float:
        """Until the backstop, or the first thing that has its time before."""
        now = self._clock.monotonic()
        startable = self._book.next_startable(now)
        times = [now + PASS_SECS, *self._executor.deadlines()]
        if startable is not None:
            times.append(startable)
        return max(min(times) - now, 0.001)
