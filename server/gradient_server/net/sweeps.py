"""The sweeps of a running server, by name (domain/sweeps.py): each a pass again and again.

A pass that fails because the database is away or full is logged, counted and tried again at its next
turn; nothing is remembered between two that a restart would miss.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
import structlog
import trio

from gradient_server.db.errors import database_errors, first_line
from gradient_server.domain.events import Event
from gradient_server.domain.job import build_key
from gradient_server.domain.sweeps import Sweep
from gradient_server.graph import sweeps
from gradient_server.graph.jobs import JobDefaults
from gradient_server.graph.work import Work
from gradient_server.net.aborts import end_drains, reap

if TYPE_CHECKING:
    from gradient_server.net.services import Services

__all__ = ["ABANDONED_SECS", "STALLED_SECS", "Sweeps"]

log = structlog.get_logger(__name__)

_ABORTS_EVERY_SECS: Final = 5.0
_ABANDONED_EVERY_SECS: Final = 30.0
_WATCHDOG_EVERY_SECS: Final = 60.0
# An assignment this old without anybody is not merely on its way.
ABANDONED_SECS: Final = 60.0
# How much longer than its timeout an evaluation may be silent before its worker is taken to hang.
STALLED_SECS: Final = 300.0
_QUEUED_AT_ONCE: Final = 10_000


class Sweeps:
    """The loops, and what each has to remember from one pass to the next."""

    def __init__(self, services: "Services") -> None:
        self._services = services
        # What a pass finds may be in mid-flight; what two passes find is not.
        self._suspected_dispatches: frozenset[str] = frozenset()
        self._suspected_builds: frozenset[str] = frozenset()
        self._last_queued = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """All of them, for ever. Started after the first pass of each but the watchdog's, which looks
        through every open evaluation.
        """
        loops: tuple[tuple[Sweep, float, Callable[[], Awaitable[int]]], ...] = (
            (Sweep.UNCONFIRMED_ABORTS, _ABORTS_EVERY_SECS, self.reap_unconfirmed_aborts),
            (Sweep.DRAIN_DEADLINES, _ABORTS_EVERY_SECS, self.end_drains),
            (Sweep.ABANDONED_DISPATCH, _ABANDONED_EVERY_SECS, self.close_abandoned_dispatches),
        )
        async with trio.open_nursery() as nursery:
            for sweep, every_secs, one_pass in loops:
                await self.one(sweep, one_pass)
                nursery.start_soon(self._again, sweep, every_secs, every_secs, one_pass)
            watchdog = Sweep.EVALUATION_WATCHDOG
            nursery.start_soon(self._again, watchdog, 0.0, _WATCHDOG_EVERY_SECS, self.watch_evaluations)
            task_status.started()

    async def _again(
        self, sweep: Sweep, first_secs: float, every_secs: float, one_pass: Callable[[], Awaitable[int]]
    ) -> None:
        await trio.sleep(first_secs)
        while True:
            await self.one(sweep, one_pass)
            await trio.sleep(every_secs)

    async def one(self, sweep: Sweep, one_pass: Callable[[], Awaitable[int]]) -> None:
        """One pass, with its figures."""
        figures = self._services.sweep_figures
        try:
            found = await one_pass()
        except database_errors() as error:
            figures.failures[sweep] += 1
            log.error("a sweep failed and comes again", sweep=sweep, reason=first_line(error))
            return
        figures.ended(sweep, found)

    async def reap_unconfirmed_aborts(self) -> int:
        """Closes assignments whose abort nobody confirmed in time."""
        reaped = await self._services.transact(partial(reap, self._services))
        if reaped:
            log.warning("aborts were not confirmed", sweep=Sweep.UNCONFIRMED_ABORTS, count=reaped)
        return reaped

    async def end_drains(self) -> int:
        """Aborts what still runs at a drain's deadline."""
        return await self._services.transact(partial(end_drains, self._services))

    async def close_abandoned_dispatches(self) -> int:
        """Closes open assignments that nobody attended to in this pass and the one before."""
        services = self._services
        look = partial(
            sweeps.find_abandoned_dispatches,
            instance_id=services.instance_id,
            attended=self._attended(),
            before=services.clock.now() - ABANDONED_SECS,
        )
        found = {one.assignment_id for one in await services.database.read(look)}
        due = sorted(found & self._suspected_dispatches)
        self._suspected_dispatches = frozenset(found.difference(due))
        if not due:
            return 0
        attended = self._attended()

        def close(connection: sa.Connection) -> tuple[int, Sequence[Event]]:
            work = self._work(connection)
            closed = sweeps.close_abandoned_dispatches(
                work, due, instance_id=services.instance_id, is_attended=attended.__contains__
            )
            return closed, work.events

        closed = await services.transact(close)
        log.warning("assignments had nobody", sweep=Sweep.ABANDONED_DISPATCH, assignments=due, closed=closed)
        return closed

    async def watch_evaluations(self) -> int:
        """Ends evaluations that hang at their workers, and moves on whatever waits for nothing."""
        ended = await self._end_stalled()
        repaired = await self._repair()
        return ended + repaired + await self._tell_the_scheduler()

    async def _end_stalled(self) -> int:
        services = self._services
        timeout_secs = JobDefaults().evaluation_timeout_secs
        look = partial(
            sweeps.find_stalled_evaluations,
            now=services.clock.now(),
            timeout_secs=timeout_secs,
            margin_secs=STALLED_SECS,
        )
        found = await services.database.read(look)
        if not found:
            return 0

        def end(connection: sa.Connection) -> tuple[int, Sequence[Event]]:
            work = self._work(connection)
            ended = sweeps.end_stalled_evaluations(work, timeout_secs=timeout_secs, margin_secs=STALLED_SECS)
            return ended, work.events

        log.warning(
            "evaluations make no progress", sweep=Sweep.EVALUATION_WATCHDOG, evaluations=sorted(found)
        )
        return await services.transact(end)

    async def _repair(self) -> int:
        services = self._services
        if not len(await services.database.read(sweeps.find_stuck)):
            return 0

        def move_on(connection: sa.Connection) -> tuple[sweeps.StuckJobs, Sequence[Event]]:
            work = self._work(connection)
            return sweeps.repair(work), work.events

        stuck = await services.transact(move_on)
        if len(stuck):
            log.error("jobs waited for what had come", sweep=Sweep.EVALUATION_WATCHDOG, stuck=stuck)
        return len(stuck)

    async def _tell_the_scheduler(self) -> int:
        """A part of the queue each time: what memory does not know of it in two turns is looked up."""
        services, scheduler = self._services, self._services.scheduler
        look = partial(sweeps.queued_builds, above=self._last_queued, many=_QUEUED_AT_ONCE)
        builds: list[str] = await services.database.read(look)
        self._last_queued = builds[-1] if len(builds) == _QUEUED_AT_ONCE else ""
        claimed = {assignment.job_id for assignment in scheduler.pool.assignments.values()}
        unknown = {
            key for key in map(build_key, builds) if key not in claimed and scheduler.tracker.get(key) is None
        }
        due = sorted(unknown & self._suspected_builds)
        self._suspected_builds = frozenset(unknown)
        for key in due:
            scheduler.loops.look_up(key)
        if due:
            log.error("builds waited unknown to the scheduler", sweep=Sweep.EVALUATION_WATCHDOG, jobs=due)
        return len(due)

    def _attended(self) -> frozenset[str]:
        """Workers with a session or a grace."""
        services = self._services
        return frozenset((*(session.worker_id for session in services.sessions), *services.graces.awaited))

    def _work(self, connection: sa.Connection) -> Work:
        services = self._services
        return Work(connection, services.clock.now(), services.ids, services.graph_settings)
