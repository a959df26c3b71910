"""Brings a database to the schema that this program needs.

The whole way is one transaction under a lock: a second server that starts at the same time waits
(PostgreSQL) or is told that the database is in use (SQLite). On SQLite foreign keys are off
meanwhile, for a table that is copied to change it would take its children along, and every one is
checked before the commit.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from gradient_server.db.engine import make_write_engine, parse_url, shown_url, sqlite_file
from gradient_server.db.errors import DatabaseError, DatabaseUnusableError, first_line
from gradient_server.db.lock import FileLock

__all__ = ["Migration", "current_revision", "migrate", "newest_revision"]

# Any number that no other program uses for its lock on the same PostgreSQL database.
_ADVISORY_LOCK = 0x67726164_69656E74


@dataclass(frozen=True, slots=True)
class Migration:
    """The revisions before and after. `before` None: the database was empty."""

    before: str | None
    after: str

    @property
    def changed(self) -> bool:
        """Whether anything was done."""
        return self.before != self.after


def migrate(url: str | sa.URL) -> Migration:
    """Migrates the database to the newest revision. Blocks; run it in a thread, before `Database.open`.

    Raises DatabaseInUseError if another process holds the SQLite file, DatabaseUnusableError, with
    one line, if the database cannot be opened or was migrated by a newer program.
    """
    parsed = parse_url(url)
    file = sqlite_file(parsed)
    with FileLock(file) if file is not None else contextlib.nullcontext():
        engine = make_write_engine(parsed)
        try:
            with _locked(engine) as connection:
                done = _upgrade(connection)
                # A look through the whole database, seconds where it is large.
                if done.changed and connection.dialect.name == "sqlite":
                    _check_foreign_keys(connection)
                return done
        except sa.exc.DatabaseError as error:
            raise DatabaseUnusableError(f"cannot migrate {shown_url(parsed)}: {first_line(error)}") from error
        finally:
            engine.dispose()


def current_revision(connection: sa.Connection) -> str | None:
    """The revision that a database has; None for an empty one."""
    return MigrationContext.configure(connection).get_current_revision()


def newest_revision() -> str:
    """The revision that this program needs."""
    newest = ScriptDirectory.from_config(alembic_config()).get_current_head()
    if newest is None:
        raise RuntimeError("the package has no migrations")
    return newest


def alembic_config(connection: sa.Connection | None = None) -> Config:
    """Alembic's configuration, without a file; `connection` is the one that the migrations use."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


@contextlib.contextmanager
def _locked(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            # The pragma has no effect within a transaction; the lock is the file's.
            driver = connection.connection.driver_connection
            driver.execute("PRAGMA foreign_keys=OFF").close()  # type: ignore[union-attr]  # it is open
            with connection.begin():
                yield connection
        else:
            with connection.begin():
                # Held to the end of the transaction.
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
                yield connection


def _upgrade(connection: sa.Connection) -> Migration:
    before = current_revision(connection)
    newest = newest_revision()
    known = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if before is not None and before not in known:
        raise DatabaseUnusableError(
            f"the database has revision {before}, this program knows up to {newest}: run the newer program"
        )
    if before is None and sa.inspect(connection).has_table("project"):
        raise DatabaseUnusableError("the database has tables but no revision: it was not made by a migration")
    if before != newest:
        command.upgrade(alembic_config(connection), "head")
    return Migration(before, newest)


def _check_foreign_keys(connection: sa.Connection) -> None:
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
    if broken is not None:
        raise DatabaseError(f"the migration would leave a row of {broken[0]} without its {broken[2]}")
