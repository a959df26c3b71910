"""A database that is locked, stopped or out of reach: its callers wait, and nothing is lost or doubled."""

import contextlib
import sqlite3
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
import structlog
import trio
from gradient_server.db import engine, patience, tables
from gradient_server.db.errors import CommitFailedError, InDoubtError
from gradient_server.db.runner import Database

from tests.fixtures.databases import PostgresTemplate

PROJECT = tables.project
BUSY_MS = 50


def add(connection: sa.Connection, name: str) -> str:
    connection.execute(PROJECT.insert().values(id=name, name=name, created_at=1.0))
    return name


def names(connection: sa.Connection) -> set[str]:
    return set(connection.scalars(sa.select(PROJECT.c.name)))


@pytest.fixture(autouse=True)
def _busy_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite gives up in a twentieth of a second, so that what follows is ours."""
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_MS", BUSY_MS)


@contextlib.contextmanager
def locked(database: Database) -> Iterator[None]:
    """Somebody else writes into the file for a long time."""
    assert database.url.database is not None
    other = sqlite3.connect(database.url.database, isolation_level=None)
    try:
        other.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        other.close()


async def test_a_locked_file_is_waited_for(sqlite_database: Database) -> None:
    stored = trio.Event()

    async def store() -> None:
        await sqlite_database.run(lambda c: add(c, "late"))
        stored.set()

    with structlog.testing.capture_logs() as told:
        async with trio.open_nursery() as nursery:
            with locked(sqlite_database):
                nursery.start_soon(store)
                await trio.sleep(6 * BUSY_MS / 1000)
                assert not stored.is_set()
    assert await sqlite_database.read(names) == {"late"}
    assert [line["event"] for line in told] == [
        "the database is away: transactions wait",
        "the database is back",
    ]


async def test_whoever_cannot_wait_goes_and_leaves_nothing(sqlite_database: Database) -> None:
    with locked(sqlite_database):
        with trio.move_on_after(3 * BUSY_MS / 1000) as scope:
            await sqlite_database.run(lambda c: add(c, "never"))
        assert scope.cancelled_caught
    await sqlite_database.run(lambda c: add(c, "after"))
    assert await sqlite_database.read(names) == {"after"}


async def test_patience_has_an_end(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECS", 3 * BUSY_MS / 1000)
    with locked(sqlite_database), pytest.raises(CommitFailedError, match="locked"):
        await sqlite_database.run(lambda c: add(c, "never"))
    assert await sqlite_database.run(lambda c: add(c, "next")) == "next"


async def test_a_server_that_stops_waits_for_nothing(sqlite_database: Database) -> None:
    with locked(sqlite_database):
        async with trio.open_nursery() as nursery:

            async def fail() -> None:
                with pytest.raises(CommitFailedError):
                    await sqlite_database.run(lambda c: add(c, "never"))

            nursery.start_soon(fail)
            await trio.sleep(3 * BUSY_MS / 1000)
            sqlite_database.end_patience()


async def test_postgresql_may_be_restarted(
    postgres_database: Database, postgres_template: PostgresTemplate
) -> None:
    database, server = postgres_database, postgres_template.server
    await database.run(lambda c: add(c, "before"))
    stored: list[str] = []

    async def store(name: str) -> None:
        stored.append(await database.run(lambda c: add(c, name)))

    async with trio.open_nursery() as nursery:
        await trio.to_thread.run_sync(server.halt)
        try:
            for number in range(10):
                nursery.start_soon(store, f"meanwhile-{number}")
            with trio.move_on_after(0.3) as scope:
                await database.read(names)
            assert scope.cancelled_caught
            assert not stored
        finally:
            await trio.to_thread.run_sync(server.start)
    assert await database.read(names) == {"before", *(f"meanwhile-{number}" for number in range(10))}


async def test_a_transaction_that_postgresql_ended_in_the_middle_is_done_again(
    postgres_database: Database, postgres_template: PostgresTemplate
) -> None:
    server = postgres_template.server
    tries: list[int] = []

    def work(connection: sa.Connection) -> str:
        tries.append(1)
        if len(tries) == 1:
            server.halt()
            server.start()
        return add(connection, "once")

    assert await postgres_database.run(work) == "once"
    assert len(tries) == 2
    assert await postgres_database.read(names) == {"once"}


async def test_a_commit_that_nobody_answered_is_in_doubt(
    postgres_database: Database, postgres_template: PostgresTemplate
) -> None:
    def work(connection: sa.Connection) -> None:
        add(connection, "perhaps")
        postgres_template.server.halt()

    try:
        with pytest.raises(InDoubtError):
            await postgres_database.run(work)
    finally:
        await trio.to_thread.run_sync(postgres_template.server.start)
