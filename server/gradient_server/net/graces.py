"""Workers that lost their connection, and when their assignments are given up for lost.

The grace (`proto.reconnectGraceSecs`) runs from the session's end, or from this instance's
listening, whichever is later (protocol.md, "Lost connections").
"""

from collections.abc import Awaitable, Callable

import structlog
import trio

from gradient_server.db.errors import database_errors, first_line

__all__ = ["Graces"]

log = structlog.get_logger(__name__)


class Graces:
    """One deadline a worker. `lose(worker_id)` declares the rest of its assignments lost.

    All times are on trio's clock, as deadlines of the server are.
    """

    def __init__(self, grace_secs: float, lose: Callable[[str], Awaitable[None]]) -> None:
        self._grace_secs = grace_secs
        self._lose = lose
        # In the order of their deadlines: the grace is the same for all.
        self._deadlines: dict[str, float] = {}
        self._losing: dict[str, trio.Event] = {}
        self._changed = trio.lowlevel.ParkingLot()

    def arm(self, worker_id: str) -> None:
        """The worker's session ended, or its instance begins to listen: the grace runs anew."""
        self._deadlines.pop(worker_id, None)
        self._deadlines[worker_id] = trio.current_time() + self._grace_secs
        self._changed.unpark_all()

    def expect(self, worker_id: str) -> None:
        """The worker should come; a grace that runs already runs on."""
        if worker_id not in self._deadlines:
            self.arm(worker_id)

    @property
    def awaited(self) -> list[str]:
        """Workers whose grace runs, or whose loss is being stored."""
        return [*self._deadlines, *self._losing]

    async def cancel(self, worker_id: str) -> None:
        """The worker is back. Returns once a loss that had begun already is stored."""
        losing = self._losing.get(worker_id)
        if losing is not None:
            await losing.wait()
        # Last, for a loss that could not be stored has let the grace run anew.
        self._deadlines.pop(worker_id, None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Gives up what is due, one worker after another, for ever."""
        task_status.started()
        while True:
            if not self._deadlines:
                await self._changed.park()
                continue
            worker_id, deadline = next(iter(self._deadlines.items()))
            if deadline > trio.current_time():
                with trio.move_on_at(deadline):
                    await self._changed.park()
                continue
            del self._deadlines[worker_id]
            await self._give_up(worker_id)

    async def _give_up(self, worker_id: str) -> None:
        done = self._losing[worker_id] = trio.Event()
        try:
            log.info("a worker did not come back", worker=worker_id, grace_secs=self._grace_secs)
            await self._lose(worker_id)
        except database_errors() as error:
            log.error("a loss cannot be stored and comes again", worker=worker_id, reason=first_line(error))
            self.arm(worker_id)
        finally:
            del self._losing[worker_id]
            done.set()
