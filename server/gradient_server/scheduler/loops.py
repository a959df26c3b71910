"""The scheduler's loops: claims, offers, look-ups, jobs whose time comes, and the 5 s tick.

Everything is driven by events; the tick is the backstop.
"""

from collections.abc import Callable
from typing import Final

import trio
from gradient_protocol.kinds import JobKind

from gradient_server.clock import Clock
from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.claims import ClaimStore
from gradient_server.scheduler.dispatch import Dispatcher
from gradient_server.scheduler.model import ASSIGNMENT_TICK_SECS, Assignment
from gradient_server.scheduler.offers import Offers
from gradient_server.scheduler.signal import Signal
from gradient_server.scheduler.tracker import JobTracker
from gradient_server.scheduler.worker_pool import WorkerPool

__all__ = ["Loops"]

# Offers to busy workers and revocations are gathered this long.
_GATHER_SECS: Final = 0.1
_LOOK_UP_BATCH: Final = 256


class Loops:
    """Owns no state of the queue; it drives the parts that do."""

    def __init__(
        self,
        *,
        tracker: JobTracker,
        pool: WorkerPool,
        offers: Offers,
        dispatcher: Dispatcher,
        store: ClaimStore,
        clock: Clock,
        queue: Callable[[PendingJob], None],
    ) -> None:
        self._tracker = tracker
        self._pool = pool
        self._offers = offers
        self._dispatcher = dispatcher
        self._store = store
        self._clock = clock
        self._queue = queue
        self.offers_changed = Signal()
        self.due_changed = Signal()
        self._to_look_up: dict[str, None] = {}
        self._look_up_wanted = Signal()
        # Answers that the reader noted, until they are committed. At most one for each slot.
        self._answers: dict[str, Assignment] = {}

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """All loops, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dispatcher.run_claims)
            nursery.start_soon(self._run_offers)
            nursery.start_soon(self._run_gathered)
            nursery.start_soon(self._run_look_ups)
            nursery.start_soon(self._run_due)
            nursery.start_soon(self._run_ticks)
            task_status.started()

    # Answers on their way

    def note_answer(self, assignment: Assignment | None) -> None:
        """An answer was noted in memory and is to be committed."""
        if assignment is not None:
            self._answers[assignment.assignment_id] = assignment

    def take_answer(self, assignment_id: str) -> Assignment | None:
        """The noted answer, once."""
        return self._answers.pop(assignment_id, None)

    # Look-ups

    def look_up(self, job_id: str) -> None:
        """What is true of this job is in the database: load it."""
        self._to_look_up[job_id] = None
        self._look_up_wanted.set()

    @property
    def has_look_ups(self) -> bool:
        """Whether jobs wait to be looked up."""
        return bool(self._to_look_up)

    async def look_up_batch(self) -> None:
        """Loads the next jobs that have to be looked up, and queues those that wait."""
        if not self._to_look_up:
            return
        job_ids = list(self._to_look_up)[:_LOOK_UP_BATCH]
        for job_id in job_ids:
            del self._to_look_up[job_id]
        for job in await self._store.reload(job_ids):
            self._queue(job)

    async def _run_look_ups(self) -> None:
        while True:
            await self._look_up_wanted.wait()
            while self._to_look_up:
                await self.look_up_batch()

    # Offers

    async def _run_offers(self) -> None:
        while True:
            await self.offers_changed.wait()
            self._offers.flush(self._offers.urgent)

    async def _run_gathered(self) -> None:
        while True:
            await trio.sleep(_GATHER_SECS)
            self._offers.flush(self._offers.urgent)
            self._offers.flush(self._offers.gathered)

    # Time

    async def _run_due(self) -> None:
        while True:
            due = self._tracker.next_due()
            until_due = ASSIGNMENT_TICK_SECS if due is None else due - self._clock.now()
            with trio.move_on_after(min(max(until_due, 0.001), ASSIGNMENT_TICK_SECS)):
                await self.due_changed.wait()
            self.queue_due()

    def queue_due(self) -> None:
        """Jobs whose backoff has passed become candidates."""
        for job in self._tracker.take_due(self._clock.now()):
            self._queue(job)

    async def _run_ticks(self) -> None:
        while True:
            await trio.sleep(ASSIGNMENT_TICK_SECS)
            await self.tick()

    async def tick(self) -> None:
        """The backstop: BumpRescore, then everyone who waits is looked at, one by one."""
        for table in self._tracker.tables.values():
            table.bump_rescore()
        self.queue_due()
        self._pool.refresh_ram()
        for job_id in self._dispatcher.lost:
            self.look_up(job_id)
        self._dispatcher.lost.clear()
        await self._dispatcher.abort_unanswered(self._dispatcher.unanswered())
        monotonic = self._clock.monotonic()
        for kind in JobKind:
            for worker_id in tuple(self._pool.waiting[kind]):
                worker = self._pool.workers.get(worker_id)
                if worker is not None:
                    worker.forget_expired(monotonic)
                    self._dispatcher.try_assign(worker, kind, widen=True)
                    # A long queue and many workers must not keep the sessions waiting.
                    await trio.lowlevel.checkpoint()
        self.offers_changed.set()
