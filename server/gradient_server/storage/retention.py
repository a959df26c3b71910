"""What goes away in time: once an hour what is past `retentionDays` and whatever nothing names any more;
objects that a verdict or a deletion drops, as soon as it says so.

The order is from the top down (graph/garbage.py): clusters (cluster-jobs.md, Tables), evaluations,
derivations with their builds, paths of the NAR store; then files without rows. Rows go first, files
after the commit. Every batch is a short transaction of its own and nothing is remembered between two,
so that a pass may end anywhere and the next one begins anew.
"""

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from gradient_server.db.errors import database_errors, first_line
from gradient_server.domain.events import Event, ObjectUnused
from gradient_server.domain.sweeps import Sweep
from gradient_server.graph import garbage
from gradient_server.graph.retention import DAY_SECS, run_retention
from gradient_server.storage.nar_store import StorageError
from gradient_server.storage.orphans import collect_logs, collect_orphans, delete_unused

if TYPE_CHECKING:
    from gradient_server.net.services import Services

__all__ = ["FIRST_PASS_SECS", "PASS_SECS", "Retention"]

log = structlog.get_logger(__name__)

PASS_SECS: Final = 3600.0
# A server that starts has something better to do than to look through all of its database.
FIRST_PASS_SECS: Final = 60.0
# Between two batches, so that a large collection takes no more than a part of the database's time.
_PAUSE_SECS: Final = 0.01


class Retention:
    """Subscribes itself to the bus; `run` does the work."""

    def __init__(self, services: "Services") -> None:
        self._services = services
        # In the order of the events; a name once.
        self._unused: dict[str, None] = {}
        self._wake = trio.Event()
        services.bus.subscribe(self.on_event)

    def on_event(self, event: Event) -> None:
        """Notes objects to be deleted."""
        if isinstance(event, ObjectUnused):
            self._unused[event.object] = None
            self._wake.set()

    async def run(
        self,
        *,
        first_after_secs: float = 0.0,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """A pass `first_after_secs` after the start and every hour; objects when they become unused."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._delete_for_ever)
            await trio.sleep(first_after_secs)
            while True:
                began = self._services.clock.monotonic()
                await self.collect()
                took_secs = self._services.clock.monotonic() - began
                await trio.sleep(max(0.0, PASS_SECS - took_secs))

    async def collect(self) -> None:
        """One pass over everything. What fails is logged, and tried again in the next one."""
        passes: tuple[tuple[Sweep, Callable[[], Awaitable[int]]], ...] = (
            (Sweep.CLUSTERS, self._clusters),
            (Sweep.EVALUATIONS, self._evaluations),
            (Sweep.DERIVATIONS, self._derivations),
            (Sweep.NARS, self._nars),
            (Sweep.OBJECTS, partial(collect_orphans, self._services)),
            (Sweep.LOGS, partial(collect_logs, self._services)),
        )
        figures = self._services.sweep_figures
        for sweep, one in passes:
            try:
                found = await one()
            except database_errors(StorageError) as error:
                figures.failures[sweep] += 1
                log.error("a pass failed and comes again in an hour", sweep=sweep, reason=first_line(error))
                continue
            figures.ended(sweep, found)
            if found:
                log.info("collected", sweep=sweep, count=found)

    @property
    def _before(self) -> float:
        """What was over by then is past its time; seconds since the epoch."""
        return self._services.clock.now() - self._services.settings.retention_days * DAY_SECS

    async def _clusters(self) -> int:
        services = self._services
        deleted = 0
        while True:
            gone = await services.transact(
                partial(
                    run_retention, retention_days=services.settings.retention_days, now=services.clock.now()
                )
            )
            deleted += gone
            if not gone:
                return deleted
            await trio.sleep(_PAUSE_SECS)

    async def _evaluations(self) -> int:
        deleted, before = 0, self._before
        # A look by a reader first: most passes have nothing to delete, and need no writer.
        look = partial(garbage.old_evaluations, before=before)
        while await self._services.database.read(look):
            gone = await self._services.database.run(partial(garbage.delete_evaluations, before=before))
            if not gone:
                break
            deleted += gone
            await trio.sleep(_PAUSE_SECS)
        return deleted

    async def _derivations(self) -> int:
        deleted, before, below = 0, self._before, sys.maxsize
        while True:
            window = await self._services.database.read(
                partial(garbage.derivation_window, below=below, before=before)
            )
            if window.last is None:
                return deleted
            below = int(window.last)
            delete = partial(
                garbage.delete_derivations, ids=[int(one) for one in window.garbage], before=before
            )
            while window.garbage and (gone := await self._services.database.run(delete)):
                deleted += gone
                await trio.sleep(_PAUSE_SECS)

    async def _nars(self) -> int:
        deleted, before, above = 0, self._before, ""
        while True:
            window = await self._services.database.read(
                partial(garbage.path_window, above=above, before=before)
            )
            if window.last is None:
                return deleted
            above = str(window.last)
            left = [str(one) for one in window.garbage]
            while left:
                left, gone = await self._delete_nars(left, before)
                deleted += gone
                await trio.sleep(_PAUSE_SECS)

    async def _delete_nars(self, paths: list[str], before: float) -> tuple[list[str], int]:
        return await self._services.transact(partial(garbage.delete_paths, paths=paths, before=before))

    async def _delete_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._unused:
                name = next(iter(self._unused))
                del self._unused[name]
                try:
                    await delete_unused(self._services, name)
                except database_errors(StorageError) as error:
                    # The hourly look for objects without a row finds it.
                    log.error("an unused object cannot be deleted", object=name, reason=first_line(error))
