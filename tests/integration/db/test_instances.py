"""Server instances and take-overs, on both databases."""

import time
from functools import partial

import sqlalchemy as sa
from gradient_server.db import tables
from gradient_server.db.queries import instances
from gradient_server.db.queries.claims import Claim, claim_assignment, open_assignments
from gradient_server.db.queries.reservations import Reservation, find_reservation, take_reservation
from gradient_server.db.runner import Database
from gradient_server.domain.job import build_key

from tests.fixtures import graph
from tests.integration.db.test_claims import race

NOW = 1_700_000_000.0


async def register(database: Database, *names: str) -> None:
    for name in names:
        assert await database.run(
            lambda c, n=name: instances.register_instance(c, n, advertise_url=None, now=NOW)
        )


async def test_the_database_has_the_time(database: Database) -> None:
    assert abs(await database.read(instances.database_now) - time.time()) < 5


async def test_one_successor_wins_and_owns_everything(database: Database) -> None:
    await register(database, "dead", "one", "two")
    build = await database.run(graph.make_build)
    await database.run(lambda c: graph.assigned(c, worker="w", build=build, instance="dead"))
    answers = await race(
        database,
        *(
            lambda c, s=successor: instances.take_over(c, "dead", s, silent_since=NOW, now=NOW + 30)
            for successor in ("one", "two")
        ),
    )
    [taken] = [answer for answer in answers if answer is not None]
    assert isinstance(taken, instances.TakeOver)
    [opened] = await database.read(open_assignments)
    assert taken.assignments == (opened.assignment_id,)
    assert opened.instance_id in ("one", "two")
    assert not await database.run(lambda c: instances.beat_instance(c, "dead", now=NOW + 31))
    assert not await database.run(
        lambda c: instances.register_instance(c, "dead", advertise_url=None, now=NOW + 31)
    )


async def test_a_living_instance_is_left_alone_and_a_stopped_one_is_not(database: Database) -> None:
    await register(database, "old", "new")
    assert await database.run(lambda c: instances.beat_instance(c, "old", now=NOW + 20))
    silent_since = NOW + 10

    def take(connection: sa.Connection) -> instances.TakeOver | None:
        return instances.take_over(connection, "old", "new", silent_since=silent_since, now=NOW + 30)

    assert await database.run(take) is None
    await database.run(lambda c: instances.stop_instance(c, "old", now=NOW + 25))
    assert await database.run(take) == instances.TakeOver((), (), ())
    assert [row.succeeded_by for row in await database.read(instances.list_instances)] == [None, "new"]


async def test_a_successor_keeps_its_own_prepares_and_reservation(database: Database) -> None:
    await register(database, "dead", "living")

    def prepare(connection: sa.Connection) -> dict[str, str]:
        keys = {}
        for owner in ("dead", "living"):
            build = graph.make_build(connection)
            cluster = graph.make_member(connection, build=build)
            connection.execute(
                tables.cluster_attempt.insert().values(
                    id=f"of-{owner}", cluster_job=cluster, instance=owner, created_at=NOW
                )
            )
            made = Claim(
                assignment_id=f"a-{owner}",
                job_key=build_key(build),
                worker_id=f"w-{owner}",
                instance_id=owner,
                cluster_attempt=f"of-{owner}",
                cluster_role="node",
                cluster_index=0,
            )
            assert claim_assignment(connection, made, now=NOW)
            keys[owner] = build_key(build)
            if owner == "living":
                held = Reservation(
                    cluster_id=cluster, instance_id=owner, reserved_at=NOW, seats={build_key(build): "w"}
                )
                assert take_reservation(connection, held)
        return keys

    keys = await database.run(prepare)
    taken = await database.run(
        lambda c: instances.take_over(c, "dead", "living", silent_since=NOW, now=NOW + 30)
    )
    assert taken is not None
    assert (taken.attempts, taken.assignments) == (("of-dead",), ())
    assert await database.read(lambda c: graph.job_status(c, keys["dead"])) == "Queued"
    assert await database.read(lambda c: graph.job_status(c, keys["living"])) == "Assigned"
    assert await database.read(find_reservation) is not None


async def test_the_dead_are_found_and_the_owner_of_a_workers_jobs(database: Database) -> None:
    await register(database, "silent", "beating", "me")
    build = await database.run(graph.make_build)
    await database.run(lambda c: graph.assigned(c, worker="w", build=build, instance="beating"))
    await database.run(lambda c: instances.beat_instance(c, "beating", now=NOW + 30))
    look = partial(instances.dead_instances, but="me", silent_since=NOW + 10)
    assert await database.read(look) == ["silent"]
    owner = partial(instances.other_owner, worker_id="w", but="me")
    assert await database.read(partial(owner, silent_since=NOW + 10)) == instances.OtherOwner(
        "beating", None, is_alive=True
    )
    found = await database.read(partial(owner, silent_since=NOW + 40))
    assert found is not None
    assert not found.is_alive
    assert (
        await database.read(partial(instances.other_owner, worker_id="w", but="beating", silent_since=NOW))
        is None
    )


async def test_a_restart_closes_its_attempts_that_had_not_started(database: Database) -> None:
    await register(database, "same")

    def prepare(connection: sa.Connection) -> tuple[str, str]:
        keys = []
        for attempt, started in (("unstarted", None), ("started", NOW)):
            build = graph.make_build(connection)
            cluster = graph.make_member(connection, build=build)
            connection.execute(
                tables.cluster_attempt.insert().values(
                    id=attempt, cluster_job=cluster, instance="same", created_at=NOW, started_at=started
                )
            )
            made = Claim(
                assignment_id=f"a-{attempt}",
                job_key=build_key(build),
                worker_id="w",
                instance_id="same",
                cluster_attempt=attempt,
                cluster_role="node",
                cluster_index=0,
            )
            assert claim_assignment(connection, made, now=NOW)
            keys.append(build_key(build))
        return keys[0], keys[1]

    unstarted, started = await database.run(prepare)
    taken = await database.run(
        lambda c: instances.take_over(c, "same", "same", silent_since=NOW, now=NOW + 1)
    )
    assert taken is not None
    assert taken.attempts == ("unstarted",)
    assert [closed.job_key for closed in taken.abandoned] == [unstarted]
    assert taken.assignments == ("a-started",)
    assert await database.read(lambda c: graph.job_status(c, unstarted)) == "Queued"
    assert await database.read(lambda c: graph.job_status(c, started)) == "Assigned"
