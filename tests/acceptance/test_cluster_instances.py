"""Clusters over several servers on one database: watched from outside, and with a server that dies."""

import signal
from collections.abc import Iterator

import pytest

from tests.acceptance.cluster_load import all_completed, crew_of, submit, until
from tests.acceptance.crew import Crew
from tests.acceptance.instances import Servers, Watcher
from tests.fixtures.postgres import PostgresServer


@pytest.fixture
def empty_postgres(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a database without anything: the servers migrate it."""
    name = postgres_server.create()
    yield postgres_server.url(name)
    postgres_server.drop(name)


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
        reasons = dict(watcher.rows("SELECT id, reason FROM cluster_attempt"))
        assert running
        assert [reasons[one] for one in running if ends[one] != "Succeeded"] == []
