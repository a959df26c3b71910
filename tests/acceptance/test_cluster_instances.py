"""Clusters over several servers on one database: watched from outside, and with a server that dies."""

import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.acceptance.instances import Crew, Servers, Watcher
from tests.fixtures.postgres import PostgresServer

WORKERS = 40
# Clusters an evaluation.
BATCH = 5


@pytest.fixture
def empty_postgres(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a database without anything: the servers migrate it."""
    name = postgres_server.create()
    yield postgres_server.url(name)
    postgres_server.drop(name)


@asynccontextmanager
async def crew_of(servers: Servers, work_secs: float) -> AsyncIterator[Crew]:
    """Workers of all servers, until the block ends."""
    async with trio.open_nursery() as nursery:
        crew = Crew(servers, work_secs=work_secs)
        await crew.staff(WORKERS, nursery)
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


def check(crew: Crew, watcher: Watcher) -> None:
    """What holds of every run."""
    assert watcher.problems == []
    assert watcher.looks > 0
    assert watcher.most_open > 1
    assert crew.seen.alone == []
    assert crew.seen.early == []
    assert list(watcher.faults(crew.seen.heard)) == []


async def test_clusters_of_two_servers_never_meet(empty_postgres: str) -> None:
    clusters = 40
    with Servers(empty_postgres, 2) as servers, Watcher(empty_postgres) as watcher:
        async with crew_of(servers, work_secs=0.05) as crew:
            crew.go.set()
            await submit(crew, clusters)
            await until(all_completed(watcher, clusters), crew, watcher, secs=50)
            owners = watcher.rows("SELECT DISTINCT instance FROM cluster_attempt WHERE outcome = 'Succeeded'")
        assert {owner for (owner,) in owners} == {servers.instance(number) for number in (0, 1)}
        check(crew, watcher)


async def test_a_killed_server_is_succeeded_with_all_that_it_had(empty_postgres: str) -> None:
    clusters = 20
    with Servers(empty_postgres, 2) as servers, Watcher(empty_postgres) as watcher:
        dead, living = servers.instance(0), servers.instance(1)

        def attempts(started: str) -> list[str]:
            query = "SELECT id FROM cluster_attempt WHERE instance = %s AND finished_at IS NULL"
            return [row[0] for row in watcher.rows(f"{query} AND started_at IS {started}", dead)]

        async with crew_of(servers, work_secs=0.05) as crew:
            await submit(crew, 10)
            await until(lambda: len(attempts("NOT NULL")) >= 2, crew, watcher, secs=30)
            # From here on its workers leave members unanswered, and nothing it prepares can start.
            crew.mute.add(0)
            await submit(crew, 10)
            await until(lambda: bool(attempts("NULL")), crew, watcher, secs=30)
            servers.processes[0].end(signal.SIGKILL)
            running, preparing = attempts("NOT NULL"), attempts("NULL")
            crew.mute.clear()
            crew.go.set()
            await until(all_completed(watcher, clusters), crew, watcher, secs=60)
        check(crew, watcher)
        assert watcher.rows("SELECT succeeded_by FROM instance WHERE id = %s", dead) == [(living,)]
        ends = dict(watcher.rows("SELECT id, outcome FROM cluster_attempt"))
        assert {ends[one] for one in preparing} == {"PrepareFailed"}
        # Their workers came back in time, with what they had: a started cluster lost nothing.
        assert {ends[one] for one in running} == {"Succeeded"}
