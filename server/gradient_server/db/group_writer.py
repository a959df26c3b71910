"""SQLite's one writer thread.

It commits in groups: it takes what waits in the queue, gives each request a savepoint of its own,
commits once and answers all of them after the commit. A request that raises is undone alone; a commit
that fails is answered to everyone in the group. Requests of one sort that wait one behind the other may
be done by one function for all of them (`together`), with fewer statements.

A database that is locked is waited for (`patience`). Meanwhile a request has not begun: its caller may go.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import outcome
import sqlalchemy as sa
import structlog

from gradient_server.db.bridge import Bridge, Request
from gradient_server.db.errors import CommitFailedError, first_line
from gradient_server.db.patience import Patience, is_away
from gradient_server.db.transactions import MAX_GROUP, Statistics, warn_if_slow

__all__ = ["GROUP_SECS", "GroupWriter"]

logger = structlog.get_logger(__name__)

GROUP_SECS: Final = 0.02
"""So long a group grows at most."""


class GroupWriter:
    """SQLite's one writer thread."""

    def __init__(self, engine: sa.Engine, bridge: Bridge, statistics: Statistics, patience: Patience) -> None:
        self._engine = engine
        self._bridge = bridge
        self._statistics = statistics
        self._patience = patience
        self._thread = threading.Thread(target=self._run, name="database-writer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The thread ends once it has served what is in the queue."""
        self._bridge.inbox.put(None)

    def join(self, timeout_secs: float) -> bool:
        """Waits for the thread's end, in a thread of the caller's. False if it goes on."""
        self._thread.join(timeout_secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with self._engine.connect() as connection:
                while (request := self._bridge.inbox.get()) is not None:
                    if self._serve_group(connection, request):
                        return
        except BaseException as error:
            logger.exception("the database's writer thread died")
            self._bridge.fail_all(f"the database's writer thread died: {error}")
            raise

    def _serve_group(self, connection: sa.Connection, first: Request[Any]) -> bool:
        """Runs, commits and answers one group. True if the end of the queue was reached."""
        group: list[Request[Any]] = []
        try:
            with self._begin(connection):
                if not first.begin():
                    return False
                group.append(first)
                stopping = self._run_group(connection, group)
        except Exception as error:
            if not group and first.begin():
                group.append(first)
            if is_away(error, connecting=False):
                logger.error("transactions fail", transactions=len(group), reason=first_line(error))
            else:
                logger.exception("a group of transactions could not be committed", transactions=len(group))
            for request in group:
                failure = CommitFailedError(f"the database could not commit: {first_line(error)}")
                failure.__cause__ = error
                request.result = outcome.Error(failure)
            self._statistics.failed += len(group)
            self._bridge.answer(group)
            # Where even this fails, the thread ends and everyone is told.
            _roll_back(connection)
            return False
        self._statistics.commits += 1
        self._bridge.answer(group)
        return stopping

    def _begin(self, connection: sa.Connection) -> sa.RootTransaction:
        """A transaction, once nobody else has the database locked."""
        since = time.monotonic()
        while True:
            try:
                transaction = connection.begin()
            except Exception as error:
                if not self._patience.wait(error, since, connecting=False):
                    raise
            else:
                self._patience.reached()
                return transaction

    def _run_group(self, connection: sa.Connection, group: list[Request[Any]]) -> bool:
        """Runs the one request of `group`, adds what waits and runs it too."""
        driver: Any = connection.connection.driver_connection
        deadline = time.monotonic() + GROUP_SECS
        taken, stopping = self._take(MAX_GROUP - len(group))
        group.extend(taken)
        taken = group.copy()
        while taken:
            for _, run in itertools.groupby(taken, key=lambda request: request.together):
                self._apply_run(connection, driver, list(run))
            if stopping or time.monotonic() >= deadline:
                break
            taken, stopping = self._take(MAX_GROUP - len(group))
            group.extend(taken)
        return stopping

    def _take(self, limit: int) -> tuple[list[Request[Any]], bool]:
        """What waits now, and whether the end of the queue was reached."""
        taken: list[Request[Any]] = []
        with contextlib.suppress(queue.Empty):
            while len(taken) < limit:
                request = self._bridge.inbox.get_nowait()
                if request is None:
                    return taken, True
                if request.begin():
                    taken.append(request)
        return taken, False

    def _apply_run(self, connection: sa.Connection, driver: Any, run: Sequence[Request[Any]]) -> None:  # noqa: ANN401 - sqlite3's connection
        """Requests with the same `together`, as one where it can be."""
        together = run[0].together
        values: Sequence[Any | None] = [None] * len(run)
        if together is not None and len(run) > 1:
            started = time.monotonic()
            driver.execute("SAVEPOINT together")
            try:
                values = together(connection, [request.fn for request in run])
            except Exception as error:
                if not driver.in_transaction:
                    raise
                logger.exception("transactions that failed together are run alone", error=first_line(error))
                driver.execute("ROLLBACK TO together")
            driver.execute("RELEASE together")
            warn_if_slow(together, started)
        for request, value in zip(run, values, strict=True):
            if value is None:
                self._apply(connection, driver, request)
            else:
                self._statistics.transactions += 1
                request.result = outcome.Value(value)

    def _apply(self, connection: sa.Connection, driver: Any, request: Request[Any]) -> None:  # noqa: ANN401 - sqlite3's connection
        started = time.monotonic()
        driver.execute("SAVEPOINT request")
        request.result = outcome.capture(request.fn, connection)
        self._statistics.transactions += 1
        if isinstance(request.result, outcome.Error):
            if not driver.in_transaction:
                # A full disk or a failing one: SQLite has undone the whole group already.
                raise request.result.error
            self._statistics.failed += 1
            driver.execute("ROLLBACK TO request")
        driver.execute("RELEASE request")
        warn_if_slow(request.fn, started)


def _roll_back(connection: sa.Connection) -> None:
    """SQLAlchemy takes a transaction whose COMMIT failed as over; SQLite keeps it open."""
    connection.rollback()
    driver: Any = connection.connection.driver_connection
    if driver.in_transaction:
        driver.rollback()
