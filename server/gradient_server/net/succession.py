"""Beats, and the succession of instances that stopped beating (protocol.md, Several instances).

What a dead instance owned becomes this one's in one transaction; then memory follows: its started
attempts go on here, its workers have their grace from now, and whatever waits is queued here too, for
what was queued in its memory alone nobody else would assign.
"""

from functools import partial
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
import structlog
import trio

from gradient_server.cluster.events import MemberLost
from gradient_server.db.errors import database_errors, first_line
from gradient_server.db.queries.claims import open_assignments
from gradient_server.db.queries.instances import (
    TakeOver,
    beat_instance,
    database_now,
    dead_instances,
    living_elsewhere,
    take_over,
)
from gradient_server.domain.events import Event
from gradient_server.graph.jobs import load_pending
from gradient_server.graph.resume import lose_assignments
from gradient_server.net.instances import BEAT_SECS, SILENT_SECS, Punctuality

if TYPE_CHECKING:
    from gradient_server.net.services import Services

__all__ = ["Succession"]

log = structlog.get_logger(__name__)

_NEVER_HEARD: Final = "its server instance died before the worker heard of it"


class Succession:
    """This instance's beats, and what it takes over from others."""

    def __init__(self, services: "Services") -> None:
        self._services = services
        self._punctuality = Punctuality()
        # Attempts of the dead whose clusters still have one of ours, which has ended already.
        self._attempts_left = False
        self._elsewhere: list[str] = []
        self._sent_elsewhere = 0

    def elsewhere(self) -> str | None:
        """Where a worker without jobs goes from an instance that stops: to the living ones in turn."""
        if not self._elsewhere:
            return None
        self._sent_elsewhere += 1
        return self._elsewhere[self._sent_elsewhere % len(self._elsewhere)]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Beats for ever. An instance that was succeeded ends; started again it has a new identity."""
        task_status.started()
        while True:
            await self.beat()
            await trio.sleep(BEAT_SECS)

    async def beat(self) -> None:
        """One beat; then the dead, if this instance may judge. RuntimeError if it was succeeded itself."""
        services = self._services
        try:
            beaten_at, self._elsewhere = await services.database.run(
                partial(_beat, instance_id=services.instance_id)
            )
        except database_errors() as error:
            # Full, or away for longer than it is waited for: whoever reaches it may think us dead.
            log.error("a beat cannot be stored", reason=first_line(error))
            return
        if beaten_at is None:
            raise RuntimeError("another instance took over what this one owned; start it again")
        self._punctuality.beat(beaten_at)
        if self._attempts_left:
            self._attempts_left = not await services.clusters.take_up()
        if not self._punctuality.may_judge or services.draining.is_set():
            return
        find = partial(dead_instances, but=services.instance_id, silent_since=beaten_at - SILENT_SECS)
        for dead_id in await services.database.read(find):
            await self.succeed(dead_id, silent_since=beaten_at - SILENT_SECS)

    async def succeed(self, dead_id: str, *, silent_since: float) -> bool:
        """Takes over what the dead instance owned. False if another one was first, or it beats again."""
        services = self._services
        # Not cancellable half-way: a successor whose memory knows nothing of it helps nobody.
        with services.taking_over, trio.CancelScope(shield=True):
            found = await services.database.run(
                lambda connection: take_over(
                    connection,
                    dead_id,
                    services.instance_id,
                    silent_since=silent_since,
                    now=services.clock.now(),
                )
            )
            if found is None:
                return False
            log.warning(
                "took over what another instance owned",
                instance=dead_id,
                assignments=len(found.assignments),
                attempts_closed=len(found.attempts),
            )
            await self._follow(found)
        return True

    async def _follow(self, found: TakeOver) -> None:
        """Memory, after the commit."""
        services = self._services
        self._attempts_left = not await services.clusters.take_up()
        mine = await services.database.read(
            lambda connection: open_assignments(connection, instance_id=services.instance_id)
        )
        taken = set(found.assignments)
        for worker_id in services.clusters.awaited_workers():
            if services.sessions.get(worker_id) is None:
                services.graces.expect(worker_id)
        orphans: list[str] = []
        for assignment in mine:
            if assignment.assignment_id not in taken:
                continue
            if services.sessions.get(assignment.worker_id) is None:
                services.graces.arm(assignment.worker_id)
            else:
                # The worker came here before it was written: it never heard of the job.
                orphans.append(assignment.assignment_id)
        if orphans:
            await services.transact(partial(_lose, services=services, orphans=orphans))
            for one in orphans:
                services.clusters.executor.member_event(MemberLost(one, _NEVER_HEARD))
        now = services.clock.now()
        waiting = await services.database.read(lambda connection: load_pending(connection, None, now))
        known = services.scheduler.tracker
        services.scheduler.load([job for job in waiting if known.get(job.job_id) is None])


def _beat(connection: sa.Connection, *, instance_id: str) -> tuple[float | None, list[str]]:
    """The database's time of the beat, None if the instance was succeeded; where the living others are."""
    now = database_now(connection)
    beaten_at = now if beat_instance(connection, instance_id, now=now) else None
    return beaten_at, living_elsewhere(connection, but=instance_id, silent_since=now - SILENT_SECS)


def _lose(connection: sa.Connection, *, services: "Services", orphans: list[str]) -> tuple[None, list[Event]]:
    events = lose_assignments(
        connection,
        orphans,
        instance_id=services.instance_id,
        now=services.clock.now(),
        ids=services.ids,
        settings=services.graph_settings,
        error=_NEVER_HEARD,
    )
    return None, events
