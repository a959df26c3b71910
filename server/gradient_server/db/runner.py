"""The database as the rest of the server sees it: `await database.run(fn)`.

`fn(connection)` is a plain function: one transaction, committed when it returns, undone when it
raises. It may be run more than once (PostgreSQL gives up one of two transactions that collide), so
it must change nothing but the database. trio and SQLAlchemy meet nowhere else (design.md, "The
database is the truth").
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

import sqlalchemy as sa
import structlog
import trio

from gradient_server.db.bridge import Bridge, Together
from gradient_server.db.engine import (
    Dialect,
    dialect_of,
    make_read_engine,
    make_write_engine,
    parse_url,
    shown_url,
    sqlite_file,
)
from gradient_server.db.errors import DatabaseClosedError, DatabaseUnusableError, first_line
from gradient_server.db.group_writer import GroupWriter
from gradient_server.db.lock import FileLock
from gradient_server.db.patience import Patience
from gradient_server.db.thread_pool import ThreadPool
from gradient_server.db.transactions import Statistics, run_inline

__all__ = ["Database", "open_database"]

T = TypeVar("T")

logger = structlog.get_logger(__name__)

# 200 sessions with four requests each and the loops beside them stay below it.
QUEUE_LIMIT = 2_000
WRITER_THREADS = 8
READER_THREADS = 3
CLOSE_SECS = 30.0


class _Road(Protocol):
    """How a transaction reaches a connection."""

    async def call(self, fn: Callable[[sa.Connection], T], together: Together | None = None) -> T: ...

    async def aclose(self) -> None: ...


class _Threads:
    """The road through a bridge to threads."""

    def __init__(self, engine: sa.Engine, bridge: Bridge, threads: GroupWriter | ThreadPool) -> None:
        self._engine = engine
        self._bridge = bridge
        self._threads = threads

    async def call(self, fn: Callable[[sa.Connection], T], together: Together | None = None) -> T:
        return await self._bridge.call(fn, together)

    async def aclose(self) -> None:
        self._bridge.close("the database is closed")
        self._threads.stop()
        if not await trio.to_thread.run_sync(self._threads.join, CLOSE_SECS):
            logger.error("database threads did not end in time", waited_secs=CLOSE_SECS)
        self._bridge.fail_all("the database is closed")
        self._engine.dispose()


class _Inline:
    """The road without threads: a mock clock takes a task that waits for one as idle, and jumps."""

    def __init__(self, connection: sa.Connection, *, read_only: bool) -> None:
        self._connection = connection
        self._read_only = read_only

    async def call(self, fn: Callable[[sa.Connection], T], together: Together | None = None) -> T:
        del together  # nothing else waits
        await trio.lowlevel.checkpoint()
        if self._connection.closed:
            raise DatabaseClosedError("the database is closed")
        return run_inline(self._connection, fn, read_only=self._read_only)

    async def aclose(self) -> None:
        self._connection.close()


class Database:
    """One database, SQLite or PostgreSQL. Open it with `open` or `open_database`, inside trio."""

    def __init__(
        self,
        url: sa.URL,
        *,
        writing: _Road,
        reading: _Road,
        statistics: Statistics,
        lock: FileLock | None,
        patience: Patience,
    ) -> None:
        self.url = url
        self.dialect: Dialect = dialect_of(url)
        self.statistics = statistics
        self._writing = writing
        self._reading = reading
        self._lock = lock
        self._patience = patience

    @classmethod
    async def open(
        cls,
        url: str | sa.URL,
        *,
        inline: bool = False,
        writer_threads: int = WRITER_THREADS,
        reader_threads: int = READER_THREADS,
        queue_limit: int = QUEUE_LIMIT,
    ) -> "Database":
        """Opens the database and proves that it answers.

        SQLite has one writer thread whatever `writer_threads` says. `inline` (SQLite in memory)
        uses no threads at all. Raises DatabaseInUseError if another process holds the SQLite file, and
        DatabaseUnusableError, with one line, if it cannot be opened.
        """
        parsed = parse_url(url)
        file = sqlite_file(parsed)
        if inline:
            database = _open_inline(parsed)
        elif dialect_of(parsed) == "sqlite" and file is None:
            raise DatabaseUnusableError(
                "an SQLite database in memory cannot be shared by threads: name a file"
            )
        else:
            lock = FileLock(file) if file is not None else None
            statistics, patience = Statistics(), Patience()
            database = cls(
                parsed,
                writing=_open_writing(parsed, statistics, patience, writer_threads, queue_limit),
                reading=_open_reading(parsed, patience, reader_threads, queue_limit),
                statistics=statistics,
                lock=lock,
                patience=patience,
            )
        try:
            await database.run(_probe)
            await database.read(_probe)
        except BaseException as error:
            await database.aclose()
            if isinstance(error, Exception):
                raise DatabaseUnusableError(
                    f"cannot open {shown_url(parsed)}: {first_line(error)}"
                ) from error
            raise
        database._patience.begin()
        return database

    async def run(self, fn: Callable[[sa.Connection], T], together: Together | None = None) -> T:
        """Runs `fn` in one write transaction and returns its value after the commit.

        `together(connection, fns)` may take the place of several calls with this same `together` that
        wait one behind the other: it returns their values, None for each that it left to be run alone.
        If it raises, its work is undone and all of them are run alone.

        Raises what `fn` raised, its work undone; CommitFailedError if the commit failed. On SQLite the
        transactions of all callers are applied in the order of their calls. A caller that is
        cancelled before its transaction began leaves nothing; later it waits for the end of it. A
        database that is away is waited for (`patience`); none of its transactions has begun meanwhile.
        """
        return await self._writing.call(fn, together)

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        """Runs `fn` on a snapshot that cannot write, beside the writers."""
        return await self._reading.call(fn)

    def end_patience(self) -> None:
        """From now on a database that is away fails its callers at once."""
        self._patience.end()

    async def aclose(self) -> None:
        """Serves what is queued, then ends the threads. Further calls raise DatabaseClosedError."""
        self.end_patience()
        with trio.CancelScope(shield=True):
            await self._reading.aclose()
            await self._writing.aclose()
            if self._lock is not None:
                self._lock.release()


@contextlib.asynccontextmanager
async def open_database(url: str | sa.URL, *, inline: bool = False) -> AsyncIterator[Database]:
    """`Database.open` for the length of an `async with` block."""
    database = await Database.open(url, inline=inline)
    try:
        yield database
    finally:
        await database.aclose()


def _open_writing(
    url: sa.URL, statistics: Statistics, patience: Patience, threads: int, queue_limit: int
) -> _Road:
    engine = make_write_engine(url)
    if dialect_of(url) == "sqlite":
        bridge = Bridge(queue_limit)
        return _Threads(engine, bridge, GroupWriter(engine, bridge, statistics, patience))
    bridge = Bridge(queue_limit, alike=True)
    pool = ThreadPool(engine, bridge, statistics, patience, threads=threads, name="writer")
    return _Threads(engine, bridge, pool)


def _open_reading(url: sa.URL, patience: Patience, threads: int, queue_limit: int) -> _Road:
    engine = make_read_engine(url)
    bridge = Bridge(queue_limit)
    pool = ThreadPool(engine, bridge, Statistics(), patience, threads=threads, name="reader")
    return _Threads(engine, bridge, pool)


def _open_inline(url: sa.URL) -> Database:
    if dialect_of(url) != "sqlite":
        raise DatabaseUnusableError("only SQLite can be used without threads")
    connection = make_write_engine(url).connect()
    return Database(
        url,
        writing=_Inline(connection, read_only=False),
        reading=_Inline(connection, read_only=True),
        statistics=Statistics(),
        lock=None,
        patience=Patience(),
    )


def _probe(connection: sa.Connection) -> None:
    connection.execute(sa.text("SELECT 1")).all()
