"""Clusters that the book does not know, or not any more: read from the database."""

from collections.abc import Callable

import trio

from gradient_server.clock import Clock
from gradient_server.cluster.attempts import Attempts
from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.recovery import stops_at
from gradient_server.cluster.settings import REFRESH_SECS
from gradient_server.cluster.store import ClusterStore
from gradient_server.domain.events import JobUnqueued
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scheduler.signal import Signal

__all__ = ["ClusterLoader"]


class ClusterLoader:
    """`changed` is called after the book has learnt something."""

    def __init__(
        self,
        *,
        book: ClusterBook,
        attempts: Attempts,
        scheduler: Scheduler,
        store: ClusterStore,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self._book = book
        self._attempts = attempts
        self._scheduler = scheduler
        self._store = store
        self._clock = clock
        self._changed = changed
        self._to_load: dict[str, None] = {}
        self._wanted = Signal()

    def load_soon(self, cluster_id: str) -> None:
        """Nothing, or nothing certain, is known of this cluster."""
        self._to_load[cluster_id] = None
        self._wanted.set()

    async def load_wanted(self) -> None:
        """Loads what is wanted."""
        while self._to_load:
            cluster_ids = list(self._to_load)
            self._to_load.clear()
            for info in await self._store.load(cluster_ids):
                self._book.learn(info, self._clock.monotonic())
            self._changed()

    async def refresh(self) -> None:
        """What other instances have done to clusters, which nobody tells this one of: the backstop."""
        known = list(self._book.clusters)
        infos = {info.id: info for info in await self._store.load(None)}
        for cluster_id in known:
            if cluster_id not in infos:
                self._forget(cluster_id)
        now = self._clock.monotonic()
        for info in infos.values():
            # While survivors of the last try stop at another instance, the cluster is that one's to repeat.
            if stops_at(info, self._clock.now()) not in (None, self._store.instance_id):
                continue
            if info.open_attempt is None and self._attempts.of_cluster(info.id) is None:
                self._book.learn(info, now)
                for member in self._book.clusters[info.id].absent():
                    self._scheduler.loops.look_up(member.job_key)
        self._changed()

    def _forget(self, cluster_id: str) -> None:
        entry = self._book.get(cluster_id)
        if entry is not None and self._attempts.of_cluster(cluster_id) is None:
            for job_key in list(entry.arrived):
                self._scheduler.on_event(JobUnqueued(job_key, "its cluster ended"))
            self._book.forget(cluster_id)

    async def run(self) -> None:
        """Loads, for ever."""
        while True:
            await self.load_wanted()
            await self._wanted.wait()

    async def run_refreshes(self) -> None:
        """Looks at what others do, for ever."""
        while True:
            await trio.sleep(REFRESH_SECS)
            await self.refresh()
