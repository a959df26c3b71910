"""Waiting for a database that is away: locked by somebody else, stopped, out of reach.

Of what could not even begin nothing is stored, so it is tried again, and whoever waits for it waits
longer: a restart of PostgreSQL, or a backup that locks an SQLite file, costs nobody a session. Only
after `PATIENCE_SECS` is the failure the caller's.
"""

import random
import sqlite3
import sys
import threading
import time

import sqlalchemy as sa
import structlog

from gradient_server.db.errors import first_line

__all__ = ["PATIENCE_SECS", "Patience", "is_away"]

logger = structlog.get_logger(__name__)

# A host that starts again, or a stand-by that takes over, is there by then.
PATIENCE_SECS = 120.0
FIRST_WAIT_SECS = 0.05
LONGEST_WAIT_SECS = 1.0
# Locked, or not to be opened: no descriptor left, a network file system that is away.
_SQLITE_AWAY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN})
# invalid_authorization_specification, invalid_password, invalid_catalog_name: no wait makes these good.
_REFUSED_SQLSTATES = frozenset({"28000", "28P01", "3D000"})


class Patience:
    """One for all threads of a database. There is none before `begin`, nor after `end`."""

    def __init__(self) -> None:
        self._begun = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._away_since: float | None = None

    def begin(self) -> None:
        """The database was reached: from now on it is waited for."""
        self._begun = True

    def end(self) -> None:
        """Nobody has the time any more: whoever waits tries once more, and takes what comes."""
        self._ended.set()

    def wait(self, error: BaseException, since: float, *, connecting: bool) -> bool:
        """Waits a little and says whether to try again, where `error` says that the database is away.

        `since`: when the thread first tried, on the monotonic clock; `connecting`: it has no connection.
        """
        waited_secs = time.monotonic() - since
        if not self._begun or self._ended.is_set() or waited_secs >= PATIENCE_SECS:
            return False
        if not is_away(error, connecting=connecting):
            return False
        with self._lock:
            if self._away_since is None:
                self._away_since = since
                logger.warning("the database is away: transactions wait", reason=first_line(error))
        pause_secs = min(max(FIRST_WAIT_SECS, waited_secs / 4), LONGEST_WAIT_SECS)
        self._ended.wait(pause_secs * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
        return True

    def reached(self) -> None:
        """A thread has begun a transaction."""
        if self._away_since is None:
            return
        with self._lock:
            since, self._away_since = self._away_since, None
        if since is not None:
            logger.info("the database is back", away_secs=round(time.monotonic() - since, 1))


def is_away(error: BaseException, *, connecting: bool) -> bool:
    """Whether the error says that nothing could begin, and that it may later. `connecting`: as for `wait`."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    if isinstance(cause, sqlite3.OperationalError):
        # The extended code tells why in its upper bits.
        return cause.sqlite_errorcode & 0xFF in _SQLITE_AWAY
    psycopg = sys.modules.get("psycopg")
    if not connecting or psycopg is None or not isinstance(cause, psycopg.OperationalError):
        return False
    return cause.sqlstate not in _REFUSED_SQLSTATES
