"""What goes away in time: once an hour clusters that ended long ago (cluster-jobs.md, Tables) and
objects of the NAR store that no row names; objects that a verdict drops, as soon as it says so.
"""

from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from gradient_server.domain.events import Event, ObjectUnused
from gradient_server.graph.retention import run_retention
from gradient_server.storage.nar_store import StorageError
from gradient_server.storage.orphans import collect_orphans, delete_unused

if TYPE_CHECKING:
    from gradient_server.net.services import Services

__all__ = ["PASS_SECS", "Retention"]

log = structlog.get_logger(__name__)

PASS_SECS: Final = 3600.0


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

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """A pass at the start and every hour; objects when they become unused."""
        task_status.started()
        while True:
            deadline = self._services.clock.monotonic() + PASS_SECS
            await self._pass()
            while (left_secs := deadline - self._services.clock.monotonic()) > 0:
                await self._delete_unused()
                with trio.move_on_after(left_secs):
                    await self._wake.wait()

    async def _pass(self) -> None:
        services = self._services
        work = partial(
            run_retention, retention_days=services.settings.retention_days, now=services.clock.now()
        )
        await services.transact(lambda connection: (None, work(connection)))
        await collect_orphans(services)

    async def _delete_unused(self) -> None:
        self._wake = trio.Event()
        while self._unused:
            name = next(iter(self._unused))
            del self._unused[name]
            try:
                await delete_unused(self._services, name)
            except StorageError as error:
                log.error("an unused object cannot be deleted", object=name, reason=str(error))
