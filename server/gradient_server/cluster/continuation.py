"""What began before this instance did, or at one that it succeeded: its attempts go on here."""

from collections.abc import Callable, Sequence

from gradient_server.clock import Clock
from gradient_server.cluster import events as e
from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.executor import Executor
from gradient_server.cluster.recovery import goes_on, recover, recover_stopping, stops_at
from gradient_server.cluster.states import Seat
from gradient_server.cluster.store import ClusterStore
from gradient_server.domain.cluster import ClusterInfo
from gradient_server.domain.events import JobUnqueued
from gradient_server.scheduler.scheduler import Scheduler

__all__ = ["Continuation"]


class Continuation:
    """Reads the attempts of this instance, and hands them to the executor."""

    def __init__(
        self,
        *,
        book: ClusterBook,
        executor: Executor,
        scheduler: Scheduler,
        store: ClusterStore,
        clock: Clock,
        is_connected: Callable[[str], bool],
    ) -> None:
        self._book = book
        self._executor = executor
        self._attempts = executor.attempts
        self._scheduler = scheduler
        self._store = store
        self._clock = clock
        self._is_connected = is_connected

    async def load(self) -> None:
        """At start-up, before any session: clusters that have not ended, and attempts that go on."""
        await self._store.clear_reservation()
        infos = await self._store.load(None)
        now = self._clock.monotonic()
        for info in infos:
            self._book.learn(info, now)
        await self._go_on(infos)

    async def take_up(self) -> bool:
        """After this instance succeeded another one: the attempts that it has now.

        False: not all, for a cluster has a seat or a survivor of an earlier attempt here; try again soon.
        """
        infos = [info for info in await self._store.load(None) if self._is_news(info)]
        free = [info for info in infos if self._attempts.of_cluster(info.id) is None]
        await self._go_on(free)
        return len(free) == len(infos)

    def _is_news(self, info: ClusterInfo) -> bool:
        """Whether an attempt of this instance is not known here."""
        if goes_on(info, self._store.instance_id):
            assert info.open_attempt is not None
            return self._attempts.get(info.open_attempt.id) is None
        return self._is_stopping(info) and self._attempts.of_cluster(info.id) is None

    def _is_stopping(self, info: ClusterInfo) -> bool:
        return info.open_attempt is None and stops_at(info, self._clock.now()) == self._store.instance_id

    async def _go_on(self, infos: Sequence[ClusterInfo]) -> None:
        going_on = [
            info for info in infos if goes_on(info, self._store.instance_id) or self._is_stopping(info)
        ]
        found = [info.open_attempt or info.stopping_attempt for info in going_on]
        workers = [member.worker_id for one in found if one is not None for member in one.members]
        names = await self._store.worker_names(workers)
        for info in going_on:
            if self._attempts.of_cluster(info.id) is None:
                self._book.learn(info, self._clock.monotonic())
                if info.open_attempt is None:
                    self._wait_for_survivors(info, names)
                else:
                    self._run_on(info, names)

    def _run_on(self, info: ClusterInfo, names: dict[str, str]) -> None:
        """A started attempt."""
        assert info.open_attempt is not None
        for member in info.members:
            # It was queued here too, where the attempt was another instance's.
            self._scheduler.on_event(JobUnqueued(member.job_key, "its attempt goes on here"))
        wall_ahead_secs = self._clock.now() - self._clock.monotonic()
        attempt, instructions = recover(info, info.open_attempt, names, wall_ahead_secs=wall_ahead_secs)
        self._book.adopt(info.id, attempt.id)
        self._executor.begin(attempt, instructions)

    def _wait_for_survivors(self, info: ClusterInfo, names: dict[str, str]) -> None:
        """An attempt that was closed to be repeated: its members wait in the book meanwhile."""
        found = info.stopping_attempt
        assert found is not None
        attempt, instructions = recover_stopping(info, found, names)
        self._book.adopt(info.id, attempt.id)
        self._executor.begin(attempt, instructions)
        # As long as there was left of it.
        attempt.deadline = self._clock.monotonic() + (found.until - self._clock.now())
        for seat in list(attempt.seats.values()):
            # One that is here has resumed, with this attempt closed: it was dropped then.
            if attempt.machine.seats[seat.assignment_id] is Seat.STOPPING and self._is_connected(
                seat.worker_id
            ):
                self._executor.feed(attempt, e.MemberLost(seat.assignment_id, "dropped at the resume"))
