"""A load of clusters for several servers, and waiting for its end: for tests and for bench.instances."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from tests.acceptance.crew import Crew
from tests.acceptance.instances import Servers, Watcher

__all__ = ["all_completed", "crew_of", "submit", "until"]

WORKERS = 40
# Clusters an evaluation.
BATCH = 5


@asynccontextmanager
async def crew_of(servers: Servers, *, work_secs: float, workers: int = WORKERS) -> AsyncIterator[Crew]:
    """Workers of all servers, until the block ends."""
    async with trio.open_nursery() as nursery:
        crew = Crew(servers, work_secs=work_secs)
        await crew.staff(workers, nursery)
        yield crew
        nursery.cancel_scope.cancel()


async def submit(crew: Crew, clusters: int) -> None:
    """Clusters of 2 to 6 members, by turns through every server."""
    sizes = [random.Random(number).randint(2, 6) for number in range(clusters)]
    for number, at in enumerate(range(0, clusters, BATCH)):
        await crew.submit(sizes[at : at + BATCH], number % crew.servers.count)


async def until(look: Callable[[], bool], crew: Crew, watcher: Watcher, *, secs: float) -> None:
    """Returns once `look` is true; looks in a thread."""
    with trio.move_on_after(secs):
        while not await trio.to_thread.run_sync(look):
            await trio.sleep(0.1)
        return
    standings = await trio.to_thread.run_sync(watcher.standings)
    raise AssertionError(f"not within {secs:g} s: {standings} {crew.seen}\n{crew.servers.logs()}")


def all_completed(watcher: Watcher, clusters: int) -> Callable[[], bool]:
    return lambda: watcher.standings() == {"Completed": clusters}
