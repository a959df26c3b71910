"""Where trio meets the threads that hold database connections.

A caller's request goes into a queue that a thread drains; its answer wakes the caller's task. Three
promises:

- a caller that is cancelled before its transaction began leaves no trace; one that is cancelled
  later waits for the end of it (threads cannot be interrupted) and gets the answer, so no caller is
  ever in doubt about what was stored;
- at most `limit` requests are under way, further callers wait in their order;
- trio is woken once for all the answers that are ready, not once for each.

Requests with the same `together` can also be taken out of their order, by `begin_alike`.
"""

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import outcome
import sqlalchemy as sa
import trio

from gradient_server.db.errors import DatabaseClosedError

__all__ = ["Bridge", "Request", "Together"]

T = TypeVar("T")

Together = Callable[[sa.Connection, Sequence[Callable[[sa.Connection], Any]]], Sequence[Any | None]]
"""Does the work of several requests at once; None for each that is to be run alone."""


class Request(Generic[T]):
    """One transaction that a task waits for."""

    __slots__ = ("_ticket", "fn", "result", "task", "together")

    def __init__(
        self, fn: Callable[[sa.Connection], T], task: trio.lowlevel.Task, together: Together | None
    ) -> None:
        self.fn = fn
        self.together = together
        self.task = task
        self.result: outcome.Maybe[T] | None = None
        # Whoever takes it decides: the thread begins the transaction, or the caller is cancelled.
        # `list.pop` is atomic, so no lock is needed.
        self._ticket = [None]

    def begin(self) -> bool:
        """True, once, if the transaction may begin; False if the caller was cancelled."""
        try:
            self._ticket.pop()
        except IndexError:
            return False
        return True

    def rewind(self) -> None:
        """Nothing is left of what was begun, and it has to wait: until `begin` its caller may go again."""
        self._ticket.append(None)

    def abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        """Trio's question whether the wait can end at once."""
        return trio.lowlevel.Abort.SUCCEEDED if self.begin() else trio.lowlevel.Abort.FAILED


class Bridge:
    """A bounded queue of requests and the road back. Made inside a trio run."""

    def __init__(self, limit: int, *, alike: bool = False) -> None:
        """`alike`: the threads take requests by `begin_alike` too, or those would pile up."""
        self.inbox: queue.SimpleQueue[Request[Any] | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        self._room = trio.Semaphore(limit)
        self._limit = limit
        self._answered: collections.deque[Request[Any]] = collections.deque()
        # Requests with a `together`, which are in the inbox too: whoever begins one takes it.
        self._alike: dict[Together, collections.deque[Request[Any]]] | None = {} if alike else None
        self._wake_lock = threading.Lock()
        self._waking = False
        self._closed: str | None = None

    @property
    def under_way(self) -> int:
        """Requests that wait for a thread or are being worked on."""
        return self._limit - self._room.value

    async def call(self, fn: Callable[[sa.Connection], T], together: Together | None = None) -> T:
        """Has a thread run `fn` in a transaction and returns, or raises, what came of it."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            self._room.acquire_nowait()
        except trio.WouldBlock:
            await self._room.acquire()
        try:
            if self._closed is not None:
                raise DatabaseClosedError(self._closed)
            request = Request(fn, trio.lowlevel.current_task(), together)
            if together is not None and self._alike is not None:
                self._alike.setdefault(together, collections.deque()).append(request)
            self.inbox.put(request)
            answer: T = await trio.lowlevel.wait_task_rescheduled(request.abort)
            return answer
        finally:
            self._room.release()

    def begin_alike(self, together: Together, limit: int) -> list[Request[Any]]:
        """Called by the threads: begins up to `limit` requests that wait with this `together`."""
        waiting = self._alike.get(together) if self._alike is not None else None
        if waiting is None:
            return []
        begun: list[Request[Any]] = []
        with contextlib.suppress(IndexError):  # no more of them
            while len(begun) < limit:
                # Those that another thread began, or whose caller was cancelled, are passed over.
                if (request := waiting.popleft()).begin():
                    begun.append(request)
        return begun

    def answer(self, requests: Sequence[Request[Any]]) -> None:
        """Called by the threads: `request.result` of each is set, wake their tasks."""
        self._answered.extend(requests)
        with self._wake_lock:
            if self._waking:
                return
            self._waking = True
        with contextlib.suppress(trio.RunFinishedError):  # the callers are gone with the run
            self._token.run_sync_soon(self._wake)

    def _wake(self) -> None:
        with self._wake_lock:
            self._waking = False
        while self._answered:
            request = self._answered.popleft()
            if request.result is None:
                raise RuntimeError("a request was answered without a result")
            trio.lowlevel.reschedule(request.task, request.result)

    def close(self, reason: str) -> None:
        """No further request is accepted; those in the queue are still served."""
        if self._closed is None:
            self._closed = reason

    def fail_all(self, reason: str) -> None:
        """For a thread that dies: nothing more is accepted and what waits is answered with it."""
        self.close(reason)
        failed = []
        with contextlib.suppress(queue.Empty):
            while True:
                request = self.inbox.get_nowait()
                if request is not None and request.begin():
                    request.result = outcome.Error(DatabaseClosedError(reason))
                    failed.append(request)
        self.answer(failed)
