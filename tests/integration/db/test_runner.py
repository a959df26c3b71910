"""Transactions from many tasks on both databases: order, isolation, cancellation, failure."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import trio
import trio.testing
from gradient_server.db import group_writer, tables
from gradient_server.db.errors import (
    CommitFailedError,
    DatabaseClosedError,
    DatabaseError,
    DatabaseInUseError,
    DatabaseUnusableError,
)
from gradient_server.db.group_writer import GROUP_SECS
from gradient_server.db.runner import Database, open_database

from tests.fixtures.databases import count

PROJECT = tables.project


def add(connection: sa.Connection, name: str) -> str:
    connection.execute(PROJECT.insert().values(id=name, name=name, created_at=1.0))
    return name


def names(connection: sa.Connection) -> set[str]:
    return set(connection.scalars(sa.select(PROJECT.c.name)))


class Gate:
    """Holds a database thread inside a transaction until the test lets it go."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()

    def hold(self, connection: sa.Connection) -> None:
        self._entered.set()
        assert self._open.wait(10)

    async def entered(self) -> None:
        assert await trio.to_thread.run_sync(self._entered.wait, 10)

    def open(self) -> None:
        self._open.set()


async def test_what_was_answered_is_seen_by_a_later_read(database: Database) -> None:
    assert await database.run(lambda c: add(c, "one")) == "one"
    assert await database.read(names) == {"one"}


async def test_one_failure_undoes_its_own_work_alone(database: Database) -> None:
    failures = []

    def add_and_fail(connection: sa.Connection) -> None:
        add(connection, "undone")
        raise ValueError("no")

    async def fail() -> None:
        with pytest.raises(ValueError, match="no"):
            await database.run(add_and_fail)
        failures.append(1)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(database.run, lambda c, n=number: add(c, f"kept-{n}"))
            nursery.start_soon(fail)
    assert len(failures) == 20
    assert await database.read(names) == {f"kept-{number}" for number in range(20)}


async def test_a_broken_constraint_is_answered_to_its_caller(database: Database) -> None:
    await database.run(lambda c: add(c, "one"))
    with pytest.raises(sa.exc.IntegrityError):
        await database.run(lambda c: add(c, "one"))
    assert await database.run(lambda c: add(c, "two")) == "two"


async def test_sqlite_applies_in_the_order_of_the_calls(sqlite_database: Database) -> None:
    called: list[int] = []
    applied: list[int] = []

    async def call(number: int) -> None:
        called.append(number)
        await sqlite_database.run(lambda _: applied.append(number))

    async with trio.open_nursery() as nursery:
        for number in range(300):
            nursery.start_soon(call, number)
    assert applied == called


async def test_a_read_cannot_write(database: Database) -> None:
    with pytest.raises(sa.exc.DBAPIError, match=r"read-?\s?only"):
        await database.read(lambda c: add(c, "one"))
    assert await database.read(names) == set()


async def test_a_read_sees_one_snapshot_while_writers_go_on(database: Database) -> None:
    gate = Gate()

    def count_twice(connection: sa.Connection) -> tuple[int, int]:
        first = count(connection, PROJECT)
        gate.hold(connection)
        return first, count(connection, PROJECT)

    seen = []

    async def read() -> None:
        seen.append(await database.read(count_twice))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await gate.entered()
        await database.run(lambda c: add(c, "meanwhile"))
        gate.open()
    assert seen == [(0, 0)]


async def test_cancelled_before_its_transaction_began_leaves_nothing(sqlite_database: Database) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sqlite_database.run, gate.hold)
        await gate.entered()
        with trio.move_on_after(0.05) as scope:
            await sqlite_database.run(lambda c: add(c, "never"))
        assert scope.cancelled_caught
        gate.open()
    await sqlite_database.run(lambda c: add(c, "after"))
    assert await sqlite_database.read(names) == {"after"}


async def test_cancelled_within_its_transaction_gets_the_answer(database: Database) -> None:
    gate = Gate()

    def slow(connection: sa.Connection) -> str:
        gate.hold(connection)
        return add(connection, "stored")

    answers = []
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                answers.append(await database.run(slow))

            nursery.start_soon(call)
            await gate.entered()
            scope.cancel()
            gate.open()
    assert answers == ["stored"]
    assert await database.read(names) == {"stored"}


async def test_a_failed_commit_is_answered_to_the_whole_group(sqlite_database: Database) -> None:
    gate = Gate()
    failed = []

    def break_commit(connection: sa.Connection) -> None:
        # A deferred constraint is judged by COMMIT.
        connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
        connection.execute(
            tables.task.insert().values(id="t", project="nobody", name="t", created_at=1.0),
        )

    async def call(fn: Callable[[sa.Connection], object]) -> None:
        with pytest.raises(CommitFailedError, match="FOREIGN KEY"):
            await sqlite_database.run(fn)
        failed.append(fn)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sqlite_database.run, gate.hold)
        await gate.entered()
        await trio.sleep(2 * GROUP_SECS)  # so that the two below make a group of their own
        nursery.start_soon(call, break_commit)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(call, lambda c: add(c, "innocent"))
        await trio.testing.wait_all_tasks_blocked()
        gate.open()
    assert len(failed) == 2
    assert await sqlite_database.run(lambda c: add(c, "next")) == "next"
    assert await sqlite_database.read(names) == {"next"}


async def test_a_full_database_fails_its_callers_and_recovers(sqlite_database: Database) -> None:
    def pragma(text: str) -> Callable[[sa.Connection], object]:
        return lambda c: c.exec_driver_sql(f"PRAGMA {text}").scalar()

    def add_much(connection: sa.Connection) -> None:
        for number in range(1000):
            add(connection, f"{number}-{'x' * 1000}")

    pages = await sqlite_database.run(pragma("page_count"))
    assert isinstance(pages, int)
    await sqlite_database.run(pragma(f"max_page_count={pages + 5}"))
    with pytest.raises((CommitFailedError, sa.exc.OperationalError), match="full"):
        await sqlite_database.run(add_much)
    assert await sqlite_database.read(names) == set()
    await sqlite_database.run(pragma("max_page_count=1000000"))
    await sqlite_database.run(add_much)
    assert len(await sqlite_database.read(names)) == 1000


async def test_a_writer_that_dies_is_told_to_everyone(
    sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(_connection: sa.Connection) -> None:
        raise RuntimeError("the connection is beyond repair")

    monkeypatch.setattr(group_writer, "_roll_back", break_down)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def close_the_connection(connection: sa.Connection) -> None:
        connection.connection.driver_connection.close()  # type: ignore[union-attr]  # it is open

    errors = []

    async def call(fn: Callable[[sa.Connection], object]) -> None:
        with pytest.raises(DatabaseError) as raised:
            await sqlite_database.run(fn)
        errors.append(raised.type)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call, close_the_connection)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            nursery.start_soon(call, names)
    assert len(errors) == 4
    with pytest.raises(DatabaseClosedError, match="writer thread died"):
        await sqlite_database.run(names)


async def test_racing_increments_lose_none(database: Database) -> None:
    await database.run(lambda c: add(c, "counter"))

    def increment(connection: sa.Connection) -> None:
        value = connection.scalar(sa.select(PROJECT.c.created_at).with_for_update())
        connection.execute(PROJECT.update().values(created_at=(value or 0.0) + 1))

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(database.run, increment)
    assert await database.read(lambda c: c.scalar(sa.select(PROJECT.c.created_at))) == 41.0


async def test_postgresql_repeats_a_deadlocked_transaction(postgres_database: Database) -> None:
    database = postgres_database
    await database.run(lambda c: (add(c, "a"), add(c, "b")))
    barrier = threading.Barrier(2)

    def touch(first: str, second: str, tries: list[int], connection: sa.Connection) -> None:
        tries.append(1)
        for name in (first, second):
            value = PROJECT.c.created_at + 1
            connection.execute(PROJECT.update().where(PROJECT.c.name == name).values(created_at=value))
            if len(tries) == 1 and name == first:
                barrier.wait(10)

    one: list[int] = []
    two: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(database.run, lambda c: touch("a", "b", one, c))
        nursery.start_soon(database.run, lambda c: touch("b", "a", two, c))
    assert sorted([len(one), len(two)]) == [1, 2]
    assert await database.read(lambda c: set(c.scalars(sa.select(PROJECT.c.created_at)))) == {3.0}


async def test_postgresql_survives_a_broken_connection(postgres_database: Database) -> None:
    database = postgres_database

    def end_all_others(connection: sa.Connection) -> None:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

    await database.run(end_all_others)
    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(database.run, lambda c, n=number: add(c, str(n)))
    assert len(await database.read(names)) == 8


async def test_the_queue_is_bounded_and_nobody_is_turned_away(sqlite_template: Path) -> None:
    database = await Database.open(f"sqlite:///{sqlite_template}", queue_limit=3)
    done = []

    async def call(number: int) -> None:
        await database.run(lambda _: None)
        done.append(number)

    try:
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(call, number)
    finally:
        await database.aclose()
    assert len(done) == 50


async def test_closing_serves_what_is_queued_and_refuses_the_rest(sqlite_database: Database) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sqlite_database.run, gate.hold)
        await gate.entered()
        nursery.start_soon(sqlite_database.run, lambda c: add(c, "queued"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(sqlite_database.aclose)
        await trio.testing.wait_all_tasks_blocked()
        gate.open()
    with pytest.raises(DatabaseClosedError):
        await sqlite_database.run(lambda _: None)
    async with open_database(sqlite_database.url) as again:
        assert await again.read(names) == {"queued"}


async def test_a_second_server_on_one_sqlite_file_is_refused(sqlite_database: Database) -> None:
    with pytest.raises(DatabaseInUseError, match="in use by another"):
        await Database.open(sqlite_database.url)


@pytest.mark.parametrize("url", ["mysql://u:secret@h/d", "no url", "sqlite:////nowhere/at/all.db"])
async def test_an_unusable_url_is_one_line_without_secrets(url: str) -> None:
    with pytest.raises(DatabaseUnusableError) as raised:
        await Database.open(url)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_an_unreachable_postgresql_is_one_line_without_secrets(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnusableError) as raised:
        await Database.open(f"postgresql://u:secret@/d?host={tmp_path}")
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_inline_uses_no_threads(autojump_clock: trio.testing.MockClock) -> None:
    before = threading.active_count()
    async with open_database("sqlite://", inline=True) as database:
        await database.run(tables.metadata.create_all)
        await database.run(lambda c: add(c, "one"))
        assert await database.read(names) == {"one"}
        with pytest.raises(sa.exc.OperationalError, match="readonly"):
            await database.read(lambda c: add(c, "two"))
        assert threading.active_count() == before
    with pytest.raises(DatabaseClosedError):
        await database.run(names)


class _Together:
    """Does every other request at once, and remembers how many it was given."""

    def __init__(self, *, fails: bool = False) -> None:
        self.given: list[int] = []
        self.fails = fails

    def __call__(self, connection: sa.Connection, fns: Sequence[Callable[[sa.Connection], Any]]) -> list[Any]:
        self.given.append(len(fns))
        connection.execute(sa.text("CREATE TABLE made_together (x INTEGER)"))
        if self.fails:
            raise ValueError("not together")
        return ["together" if place % 2 == 0 else None for place in range(len(fns))]


async def _three_behind_another(database: Database, together: _Together) -> list[str]:
    answers: dict[int, str] = {}
    gate = Gate()

    async def ask(number: int) -> None:
        answers[number] = await database.run(lambda _: "alone", together)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(database.run, gate.hold)
        await gate.entered()
        for number in range(3):
            nursery.start_soon(ask, number)
        await trio.testing.wait_all_tasks_blocked()
        gate.open()
    return sorted(answers.values())


@pytest.fixture
async def one_writer(database_url: str) -> AsyncIterator[Database]:
    """Both databases, with one thread, so that requests wait behind another."""
    database = await Database.open(database_url, writer_threads=1)
    yield database
    await database.aclose()


async def test_requests_of_one_sort_are_done_together(one_writer: Database) -> None:
    together = _Together()
    assert await _three_behind_another(one_writer, together) == ["alone", "together", "together"]
    assert together.given == [3]
    assert await one_writer.read(lambda c: sa.inspect(c).has_table("made_together"))


async def test_what_fails_together_is_undone_and_run_alone(one_writer: Database) -> None:
    assert await _three_behind_another(one_writer, _Together(fails=True)) == ["alone"] * 3
    assert not await one_writer.read(lambda c: sa.inspect(c).has_table("made_together"))


async def test_one_that_is_cancelled_is_not_among_those_done_together(one_writer: Database) -> None:
    together = _Together()
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one_writer.run, gate.hold)
        await gate.entered()
        for _ in range(2):
            nursery.start_soon(one_writer.run, lambda _: "alone", together)
        with trio.move_on_after(0.01):
            await one_writer.run(lambda _: "cancelled", together)
        gate.open()
    assert together.given == [2]
