"""What the two ways to run transactions share (`group_writer`, `thread_pool`), and the way without threads
that simulations take.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import sqlalchemy as sa
import structlog

__all__ = ["MAX_GROUP", "Statistics", "run_inline", "warn_if_slow"]

T = TypeVar("T")

logger = structlog.get_logger(__name__)

MAX_GROUP: Final = 128
"""So many requests share a transaction at most, so that nobody's answer waits for a crowd."""

SLOW_TRANSACTION_SECS: Final = 1.0


@dataclass(slots=True)
class Statistics:
    """Counts since the start. `commits` is smaller than `transactions` where groups form."""

    transactions: int = 0
    commits: int = 0
    failed: int = 0
    retried: int = 0


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


def warn_if_slow(fn: Callable[..., object], started: float) -> None:
    """One line for a transaction that began at `started`, on the monotonic clock, and took over a second."""
    took_secs = time.monotonic() - started
    if took_secs > SLOW_TRANSACTION_SECS:
        # By its name alone: the representation of a partial shows everything it was given.
        name = getattr(getattr(fn, "func", fn), "__qualname__", type(fn).__name__)
        logger.warning("a slow transaction", function=name, took_secs=round(took_secs, 3))
