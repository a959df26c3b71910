"""Engines for the two databases, set up the way the rest of the server relies on."""

from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import NullPool, StaticPool

from gradient_server.db.errors import DatabaseUnusableError

__all__ = [
    "Dialect",
    "dialect_of",
    "make_read_engine",
    "make_write_engine",
    "parse_url",
    "shown_url",
    "sqlite_file",
]

Dialect = Literal["sqlite", "postgresql"]

BUSY_TIMEOUT_MS = 10_000
# A checkpoint copies the log into the database and syncs both; rarer ones cost the writer less.
WAL_CHECKPOINT_PAGES = 4_000
WAL_SIZE_LIMIT_BYTES = 64 * 1024 * 1024
CACHE_KIB = 64 * 1024
CACHED_STATEMENTS = 512


def parse_url(url: str | sa.URL) -> sa.URL:
    """The URL with its driver. DatabaseUnusableError, without the password, if it names no known database."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise DatabaseUnusableError(
            "database.url cannot be read: write sqlite:////path/to/gradient.db or postgresql://user@host/name"
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        return parsed.set(drivername="sqlite+pysqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise DatabaseUnusableError(f"database.url names {backend}: only sqlite and postgresql are supported")


def shown_url(url: sa.URL) -> str:
    """The URL as it may be printed: without its password."""
    return url.render_as_string(hide_password=True)


def dialect_of(url: sa.URL) -> Dialect:
    """Which of the two databases a parsed URL names."""
    return "sqlite" if url.get_backend_name() == "sqlite" else "postgresql"


def sqlite_file(url: sa.URL) -> Path | None:
    """The file of an SQLite URL; None where the database lives in memory, or is PostgreSQL."""
    if dialect_of(url) != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database)


def make_write_engine(url: sa.URL) -> sa.Engine:
    """An engine whose transactions may write."""
    if dialect_of(url) == "postgresql":
        return sa.create_engine(url, poolclass=NullPool)
    in_memory = sqlite_file(url) is None
    engine = sa.create_engine(
        url,
        poolclass=StaticPool if in_memory else NullPool,
        connect_args={"check_same_thread": False, "cached_statements": CACHED_STATEMENTS},
    )
    _configure_sqlite(engine, begin="BEGIN IMMEDIATE", read_only=False)
    return engine


def make_read_engine(url: sa.URL) -> sa.Engine:
    """An engine whose transactions see one snapshot and cannot write."""
    if dialect_of(url) == "postgresql":
        engine = sa.create_engine(url, poolclass=NullPool)
        _without_jit(engine)
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    engine = sa.create_engine(url, poolclass=NullPool, connect_args={"cached_statements": CACHED_STATEMENTS})
    _configure_sqlite(engine, begin="BEGIN", read_only=True)
    return engine


def _without_jit(engine: sa.Engine) -> None:
    """The sums over a day are taken every half minute; to compile them costs more than it spares."""

    @event.listens_for(engine, "connect")
    def prepare(driver: Any, _record: object) -> None:  # noqa: ANN401 - psycopg's own connection
        driver.execute("SET jit = off").close()
        driver.commit()


def _configure_sqlite(engine: sa.Engine, *, begin: str, read_only: bool) -> None:
    pragmas = [
        f"busy_timeout={BUSY_TIMEOUT_MS}",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        f"wal_autocheckpoint={WAL_CHECKPOINT_PAGES}",
        f"journal_size_limit={WAL_SIZE_LIMIT_BYTES}",
        f"cache_size=-{CACHE_KIB}",
        "temp_store=MEMORY",
    ]
    if read_only:
        pragmas.append("query_only=ON")

    @event.listens_for(engine, "connect")
    def prepare(driver: Any, _record: object) -> None:  # noqa: ANN401 - sqlite3's own connection
        # The driver must begin nothing by itself, or savepoints outlive a rollback.
        driver.isolation_level = None
        for pragma in pragmas:
            driver.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)
