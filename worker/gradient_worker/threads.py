"""Blocking work off the event loop: packing, hashing, unpacking, evaluating.

A simulation passes in something that runs it inline, for a mock clock sees a task that waits for a
thread as idle.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

__all__ = ["Few", "ThreadPool", "Threads"]

T = TypeVar("T")


class Threads(Protocol):
    """Runs a function where it may block."""

    async def run(self, function: Callable[[], T]) -> T:
        """Await the function's result; its exception is raised here. Not abandoned on cancel."""
        ...


class ThreadPool:
    """Trio's worker threads, at most `limit` of them at once."""

    def __init__(self, limit: int) -> None:
        self._limiter = trio.CapacityLimiter(limit)

    async def run(self, function: Callable[[], T]) -> T:
        """See Threads."""
        return await trio.to_thread.run_sync(function, limiter=self._limiter)


class Few:
    """At most `limit` of somebody's threads, for one kind of work; who waits is served in order."""

    def __init__(self, threads: Threads, limit: int) -> None:
        self._threads = threads
        self._places = trio.Semaphore(limit)

    async def run(self, function: Callable[[], T]) -> T:
        """See Threads."""
        async with self._places:
            return await self._threads.run(function)
