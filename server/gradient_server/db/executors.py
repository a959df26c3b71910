"""The threads that run transactions, and the way without threads that simulations take.

SQLite's writer commits in groups: it takes what waits in the queue, gives each request a savepoint
of its own, commits once and answers all of them after the commit. A request that raises is undone
alone; a commit that fails is answered to everyone in the group. Requests of one sort that wait one
behind the other may be done by one function for all of them (`together`), with fewer statements.

A pool (readers of SQLite, readers and writers of PostgreSQL) runs one transaction a request, or one
for those of a sort that wait (`together`), and repeats one that the database gave up in favour of
another (serialisation failure, deadlock), or whose connection broke before the commit was sent.

A database that is away is waited for (`patience`). Meanwhile a request has not begun: its caller may go.
"""

import contextlib
import functools
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import outcome
import sqlalchemy as sa
import structlog

from gradient_server.db.bridge import Bridge, Request
from gradient_server.db.errors import CommitFailedError, InDoubtError, first_line
from gradient_server.db.patience import Patience, is_away

__all__ = ["GroupWriter", "Statistics", "ThreadPool", "run_inline"]

T = TypeVar("T")

logger = structlog.get_logger(__name__)

# A group ends with this many requests or after this long, so that nobody's answer waits for a crowd.
MAX_GROUP = 128
GROUP_SECS = 0.02
SLOW_TRANSACTION_SECS = 1.0
MAX_TRIES = 6
RETRY_BASE_SECS = 0.005
# serialization_failure, deadlock_detected, lock_not_available
RETRIED_SQLSTATES = frozenset({"40001", "40P01", "55P03"})


@dataclass(slots=True)
class Statistics:
    """Counts since the start. `commits` is smaller than `transactions` where groups form."""

    transactions: int = 0
    commits: int = 0
    failed: int = 0
    retried: int = 0


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
            _warn_if_slow(together, started)
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
        _warn_if_slow(request.fn, started)


class ThreadPool:
    """Threads with a connection each, made when first needed and again after it broke."""

    def __init__(
        self,
        engine: sa.Engine,
        bridge: Bridge,
        statistics: Statistics,
        patience: Patience,
        *,
        threads: int,
        name: str,
    ) -> None:
        self._engine = engine
        self._bridge = bridge
        self._statistics = statistics
        self._patience = patience
        self._threads = [
            threading.Thread(target=self._run, name=f"database-{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """The threads end once they have served what is in the queue."""
        for _ in self._threads:
            self._bridge.inbox.put(None)

    def join(self, timeout_secs: float) -> bool:
        """Waits for the threads' end, in a thread of the caller's. False if one goes on."""
        deadline = time.monotonic() + timeout_secs
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        connection: sa.Connection | None = None
        try:
            while (request := self._bridge.inbox.get()) is not None:
                if request.begin():
                    connection = self._serve_sort(connection, request)
        except BaseException as error:
            logger.exception("a database thread died")
            self._bridge.fail_all(f"a database thread died: {error}")
            raise
        finally:
            if connection is not None:
                connection.close()

    def _serve_sort(self, connection: sa.Connection | None, first: Request[Any]) -> sa.Connection | None:
        """Serves and answers a request, with those of its sort that wait; returns as `_serve`."""
        run = [first]
        if first.together is not None:
            run += self._bridge.begin_alike(first.together, MAX_GROUP - 1)
        if connection is not None and len(run) > 1:
            connection = self._serve_together(connection, run)
        for request in run:
            if request.result is None:
                connection = self._serve(connection, request)
        return connection

    def _serve_together(self, connection: sa.Connection, run: list[Request[Any]]) -> sa.Connection | None:
        """Serves and answers those of `run` that can be done at once; the rest stays without a result."""
        together = run[0].together
        assert together is not None
        fns = [request.fn for request in run]

        @functools.wraps(together)
        def at_once(connection: sa.Connection) -> Sequence[Any | None]:
            return together(connection, fns)

        result, undone = self._transact(connection, at_once)
        if isinstance(result, outcome.Value):
            for request, value in zip(run, result.value, strict=True):
                request.result = None if value is None else outcome.Value(value)
        elif not undone:
            # Nobody can say whether the commit came through.
            for request in run:
                request.result = result
        else:
            logger.info("transactions that failed together are run alone", error=first_line(result.error))
        self._bridge.answer([request for request in run if request.result is not None])
        return self._healthy(connection)

    def _serve(self, connection: sa.Connection | None, request: Request[Any]) -> sa.Connection | None:
        """Answers the request, unless its caller went while the database was away.

        Returns the connection to go on with, None if it broke.
        """
        since = time.monotonic()
        for attempt in itertools.count(1):
            if connection is None:
                request.rewind()
                connected = self._connect(since)
                if not request.begin():
                    return connected.value if isinstance(connected, outcome.Value) else None
                if isinstance(connected, outcome.Error):
                    return self._answer(request, connected, None)
                connection = connected.value
            result, undone = self._transact(connection, request.fn)
            broken = _is_broken(connection)
            connection = self._healthy(connection)
            if isinstance(result, outcome.Value) or not undone:
                return self._answer(request, result, connection)
            if is_away(result.error, connecting=False):
                request.rewind()
                waited = self._patience.wait(result.error, since, connecting=False)
                if not request.begin():
                    return connection
                if waited:
                    continue
            if attempt >= MAX_TRIES or not (broken or _is_repeatable(result.error)):
                return self._answer(request, result, connection)
            self._statistics.retried += 1
            time.sleep(random.uniform(0.5, 1.5) * RETRY_BASE_SECS * 2**attempt)  # noqa: S311 - jitter
        raise AssertionError("the tries are bounded")

    def _answer(
        self, request: Request[Any], result: outcome.Maybe[Any], connection: sa.Connection | None
    ) -> sa.Connection | None:
        """Tells the caller; returns `connection`."""
        request.result = result
        self._bridge.answer([request])
        return connection

    def _connect(self, since: float) -> outcome.Maybe[sa.Connection]:
        """A connection, once the database is there."""
        while True:
            try:
                connection = self._engine.connect()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's answer
                if not self._patience.wait(error, since, connecting=True):
                    return outcome.Error(error)
            else:
                self._patience.reached()
                return outcome.Value(connection)

    def _healthy(self, connection: sa.Connection) -> sa.Connection | None:
        """The connection, None after it broke."""
        if not _is_broken(connection):
            return connection
        connection.invalidate()
        connection.close()
        return None

    def _transact(
        self, connection: sa.Connection, fn: Callable[[sa.Connection], T]
    ) -> tuple[outcome.Maybe[T], bool]:
        """What came of one try, and whether nothing of it is stored; False where that is not known."""
        started = time.monotonic()
        self._statistics.transactions += 1
        committing = False
        try:
            with connection.begin():
                value = fn(connection)
                committing = True
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's task
            self._statistics.failed += 1
            if committing and _is_broken(connection):
                doubt = InDoubtError(f"the connection broke in mid-commit: {first_line(error)}")
                doubt.__cause__ = error
                return outcome.Error(doubt), False
            return outcome.Error(error), True
        self._statistics.commits += 1
        _warn_if_slow(fn, started)
        return outcome.Value(value), False


def run_inline(connection: sa.Connection, fn: Callable[[sa.Connection], T], *, read_only: bool) -> T:
    """One transaction in the caller's own thread, on the one connection of a simulation."""
    with connection.begin():
        if not read_only:
            return fn(connection)
        connection.exec_driver_sql("PRAGMA query_only=ON")
        try:
            return fn(connection)
        finally:
            connection.exec_driver_sql("PRAGMA query_only=OFF")


def _roll_back(connection: sa.Connection) -> None:
    """SQLAlchemy takes a transaction whose COMMIT failed as over; SQLite keeps it open."""
    connection.rollback()
    driver: Any = connection.connection.driver_connection
    if driver.in_transaction:
        driver.rollback()


def _is_repeatable(error: BaseException) -> bool:
    """Whether PostgreSQL gave this transaction up in favour of another; nothing of it remains."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return getattr(cause, "sqlstate", None) in RETRIED_SQLSTATES


def _is_broken(connection: sa.Connection) -> bool:
    return connection.invalidated or bool(getattr(connection.connection.driver_connection, "closed", False))


def _warn_if_slow(fn: Callable[..., object], started: float) -> None:
    took_secs = time.monotonic() - started
    if took_secs > SLOW_TRANSACTION_SECS:
        # By its name alone: the representation of a partial shows everything it was given.
        name = getattr(getattr(fn, "func", fn), "__qualname__", type(fn).__name__)
        logger.warning("a slow transaction", function=name, took_secs=round(took_secs, 3))
