"""The sweeps of a running server: two looks before a deed, figures, and a database that is away."""

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
import trio
from gradient_server.db.queries.instances import database_now, register_instance
from gradient_server.db.runner import Database
from gradient_server.domain.job import build_key
from gradient_server.domain.sweeps import Sweep

from tests.fakes.pool import running_pool
from tests.fixtures.graph import assigned, job_status, make_build, make_evaluation, make_worker, want


async def test_an_assignment_without_anybody_is_closed_by_the_second_pass(
    database: Database, tmp_path: Path
) -> None:
    async with running_pool(database, tmp_path) as pool:
        services = pool.services

        def orphan(connection: sa.Connection) -> str:
            register_instance(
                connection, services.instance_id, advertise_url=None, now=database_now(connection)
            )
            build = make_build(connection)
            want(connection, make_evaluation(connection), build)
            worker = make_worker(connection)
            assigned(connection, worker=worker, build=build, instance=services.instance_id)
            return build

        build = await database.run(orphan)
        for found in (0, 1, 1):
            await services.sweeps.one(Sweep.ABANDONED_DISPATCH, services.sweeps.close_abandoned_dispatches)
            assert services.sweep_figures.found[Sweep.ABANDONED_DISPATCH] == found
        assert await database.read(lambda c: job_status(c, build_key(build))) == "Queued"
        assert build_key(build) in services.scheduler.tracker, "it is to be assigned again"


async def test_the_grace_of_a_worker_and_its_session_keep_its_assignments(
    database: Database, tmp_path: Path
) -> None:
    async with running_pool(database, tmp_path) as pool:
        services, close = pool.services, pool.services.sweeps.close_abandoned_dispatches
        registration = await pool.register("w")

        def held(connection: sa.Connection) -> None:
            register_instance(
                connection, services.instance_id, advertise_url=None, now=database_now(connection)
            )
            assigned(
                connection,
                worker=registration.worker_id,
                build=make_build(connection),
                instance=services.instance_id,
            )

        services.graces.arm(registration.worker_id)
        await database.run(held)
        assert [await close() for _ in range(3)] == [0, 0, 0]


async def test_a_build_that_the_scheduler_does_not_know_is_looked_up(
    database: Database, tmp_path: Path
) -> None:
    async with running_pool(database, tmp_path) as pool:
        services, watch = pool.services, pool.services.sweeps.watch_evaluations

        def unheard(connection: sa.Connection) -> str:
            build = make_build(connection)
            want(connection, make_evaluation(connection), build)
            return build

        key = build_key(await database.run(unheard))
        assert await watch() == 0
        assert key not in services.scheduler.tracker
        assert await watch() == 1
        with trio.fail_after(10):
            while key not in services.scheduler.tracker:
                await trio.sleep(0.01)
        assert await watch() == 0


async def test_a_pass_that_fails_is_counted_and_comes_again(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        sweeps, figures = pool.services.sweeps, pool.services.sweep_figures
        before = figures.passes[Sweep.UNCONFIRMED_ABORTS]

        async def away(*_: object) -> None:
            raise sqlite3.OperationalError("database is locked")

        with monkeypatch.context() as patched:
            patched.setattr(sqlite_database, "run", away)
            await sweeps.one(Sweep.UNCONFIRMED_ABORTS, sweeps.reap_unconfirmed_aborts)
        assert figures.failures[Sweep.UNCONFIRMED_ABORTS] == 1
        await sweeps.one(Sweep.UNCONFIRMED_ABORTS, sweeps.reap_unconfirmed_aborts)
        assert figures.passes[Sweep.UNCONFIRMED_ABORTS] == before + 1
