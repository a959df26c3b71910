"""The threads of a database whose transactions run side by side: readers of SQLite, all of PostgreSQL.

Each runs one transaction a request, or one for those of a sort that wait (`together`), and repeats one
that the database gave up in favour of another (serialisation failure, deadlock), or whose connection
broke before the commit was sent.

A database that is away is waited for (`patience`). Meanwhile a request has not begun: its caller may go.
"""

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import outcome
import sqlalchemy as sa
import structlog

from gradient_server.db.bridge import Bridge, Request
from gradient_server.db.errors import InDoubtError, first_line
from gradient_server.db.patience import Patience, is_away
from gradient_server.db.transactions import MAX_GROUP, Statistics, warn_if_slow

__all__ = ["ThreadPool"]

T = TypeVar("T")

logger = structlog.get_logger(__name__)

MAX_TRIES: Final = 6
RETRY_BASE_SECS: Final = 0.005
# serialization_failure, deadlock_detected, lock_not_available
RETRIED_SQLSTATES: Final = frozenset({"40001", "40P01", "55P03"})


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
        warn_if_slow(fn, started)
        return outcome.Value(value), False


def _is_repeatable(error: BaseException) -> bool:
    """Whether PostgreSQL gave this transaction up in favour of another; nothing of it remains."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return getattr(cause, "sqlstate", None) in RETRIED_SQLSTATES


def _is_broken(connection: sa.Connection) -> bool:
    return connection.invalidated or bool(getattr(connection.connection.driver_connection, "closed", False))
