"""Four workers kept busy by an endless stream of single builds, and one cluster of four that wants them all.

The real scheduler, ranking, book, planner and reservation, with the clock of the simulation: nothing
waits. Half of the stream takes `SHORT_SECS`, half `LONG_SECS`, and the history says so; ends are spread,
so that no four workers are ever idle by chance.
"""

from dataclasses import dataclass

from gradient_protocol.kinds import JobKind
from gradient_server.cluster.settings import ClusterSettings
from gradient_server.scoring.contexts import HistoryPrediction

from tests.fakes.cluster import ClusterWorld, cluster_info
from tests.fakes.scheduler import build, worker

__all__ = ["LONG_SECS", "SHORT_SECS", "Outcome", "simulate"]

WORKERS = ("a", "b", "c", "d")
SHORT_SECS = 10.0
LONG_SECS = 120.0
STEP_SECS = 5.0
# Of each length, waiting at any time.
BACKLOG = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds. `started_after_secs` from the submission of the cluster, None if it never did.

    `idle_worker_secs` while a reservation was held; `builds_meanwhile` began during it.
    """

    started_after_secs: float | None
    reserved_after_secs: float | None
    idle_worker_secs: float
    builds_meanwhile: int


class _Stream:
    def __init__(self, world: ClusterWorld) -> None:
        self.world = world
        self.running: dict[str, tuple[str, float]] = {}
        self.begun = 0
        self._number = 0

    def refill(self) -> None:
        """As many wait as always, and every worker has scored them."""
        for letter, secs in (("s", SHORT_SECS), ("l", LONG_SECS)):
            waiting = [key for key in self.world.store.queued if key.startswith(f"build:{letter}")]
            for _ in range(BACKLOG - len(waiting)):
                self._number += 1
                name = f"{letter}{self._number}"
                history = HistoryPrediction(
                    build_time_ms=secs * 1000, build_time_p95_ms=secs * 1000, samples=5
                )
                self.world.queue(build(name))
                self.world.scheduler.tracker.tables[JobKind.BUILD].set_history(f"build:{name}", history)

    async def begin(self) -> None:
        """What was assigned begins."""
        for position, name in enumerate(WORKERS):
            for message in self.world.assigned(name):
                await self.world.reply(name, message)
                if message.cluster is None:
                    secs = SHORT_SECS if message.job_id.startswith("build:s") else LONG_SECS
                    # Ends are spread, and none is later than promised.
                    ends = self.world.clock.passed + secs - (STEP_SECS * position if secs > 60 else 0)
                    self.running[name] = (message.assignment_id, ends)
                    self.begun += 1

    def end(self) -> None:
        """What is done makes room."""
        for name, (assignment, ends) in list(self.running.items()):
            if ends <= self.world.clock.passed:
                del self.running[name]
                self.world.bus.publish(self.world.store.close(assignment))
                self.world.scheduler.request_job(name, JobKind.BUILD)


async def simulate(*, reserves: bool, backfill: bool = False, for_secs: float = 1_500.0) -> Outcome:
    """The cluster is submitted once all workers are busy."""
    world = ClusterWorld()
    world.runner.reserver._settings = ClusterSettings(backfill=backfill)
    if not reserves:
        world.runner.desk.after_secs = float("inf")
    for name in WORKERS:
        world.connect(worker(name, max_concurrent_builds=1))
        world.scheduler.request_job(name, JobKind.BUILD)
    stream = _Stream(world)
    submitted: float | None = None
    reserved: float | None = None
    idle_secs, before = 0.0, 0
    while submitted is None or world.clock.passed - submitted < for_secs:
        stream.refill()
        world.scheduler.offers.flush(world.scheduler.offers.gathered)
        for name in WORKERS:
            world.score(name, *world.store.queued)
        await world.settle()
        await stream.begin()
        if submitted is None and len(stream.running) == len(WORKERS):
            world.submit(cluster_info("k", members=len(WORKERS)))
            submitted = world.clock.passed
        assert submitted is not None, "the stream keeps all workers busy from its first step"
        await world.plan()
        await stream.begin()
        if len(world.runner.attempts):
            meanwhile = 0 if reserved is None else stream.begun - before
            return Outcome(world.clock.passed - submitted, reserved, idle_secs, meanwhile)
        if world.runner.desk.held is not None:
            if reserved is None:
                reserved, before = world.clock.passed - submitted, stream.begun
            idle_secs += STEP_SECS * (len(WORKERS) - len(stream.running))
        await world.later(STEP_SECS)
        stream.end()
    return Outcome(None, reserved, idle_secs, 0)
