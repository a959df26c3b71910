"""From the bus to whoever watches an evaluation: bounded, and never waiting for a reader.

A watcher's queue holds what its reader has not taken yet. A reader that lags behind loses the queue
and is `lost`: what it needs then is the state of things, not their history.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import trio

from gradient_server.domain.events import BuildChanged, EvaluationChanged, Event, LogGrew, NoteAdded
from gradient_server.domain.job import eval_key

__all__ = ["MAX_WATCHERS", "Hub", "TooManyWatchersError", "WatchEvent", "Watcher"]

MAX_QUEUED: Final = 1_000
MAX_WATCHERS: Final = 512

WatchEvent = BuildChanged | EvaluationChanged | NoteAdded


class TooManyWatchersError(Exception):
    """The server shows progress to as many as it can."""


class Watcher:
    """One reader of one evaluation's events.

    `jobs` are those of it that have not ended, their names by job key: their logs are of interest.
    `grown` are logs with news since they were last looked at, by job key.
    """

    def __init__(self, evaluation: str) -> None:
        self.evaluation = evaluation
        self.jobs: dict[str, str] = {eval_key(evaluation): "evaluation"}
        self.grown: dict[str, LogGrew] = {}
        self.lost = False
        self._queue: deque[WatchEvent] = deque()
        self._news = trio.Event()

    def put(self, event: WatchEvent) -> None:
        """Queues an event, or gives up the queue."""
        if self.lost:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.lost = True
            self._queue.clear()
            self.grown.clear()
        else:
            self._queue.append(event)
        self._news.set()

    def log_grew(self, event: LogGrew) -> None:
        """Notes it; at most one for each job."""
        if event.job_id in self.jobs and not self.lost:
            self.grown[event.job_id] = event

    def take(self) -> list[WatchEvent]:
        """All that is queued."""
        taken = list(self._queue)
        self._queue.clear()
        self._news = trio.Event()
        return taken

    def found(self) -> None:
        """The reader gets a fresh snapshot; events are queued again from now on."""
        self.lost = False
        self.take()

    async def wait(self, at_most_secs: float) -> None:
        """Returns when something is queued, or in time."""
        with trio.move_on_after(at_most_secs):
            await self._news.wait()

    def note_job(self, job_key: str, name: str, *, ended: bool) -> None:
        """Keeps `jobs` to those that have not ended."""
        if ended:
            self.jobs.pop(job_key, None)
            self.grown.pop(job_key, None)
        else:
            self.jobs[job_key] = name


class Hub:
    """Subscribed to the bus. Costs one look-up an event while nobody watches."""

    def __init__(self) -> None:
        self._watchers: dict[str, list[Watcher]] = {}
        self.count = 0

    def require_room(self) -> None:
        """TooManyWatchersError if there is no room for one more."""
        if self.count >= MAX_WATCHERS:
            raise TooManyWatchersError

    @contextmanager
    def watch(self, evaluation: str) -> Iterator[Watcher]:
        """A watcher while the block runs. TooManyWatchersError beyond MAX_WATCHERS."""
        self.require_room()
        watcher = Watcher(evaluation)
        self._watchers.setdefault(evaluation, []).append(watcher)
        self.count += 1
        try:
            yield watcher
        finally:
            self.count -= 1
            left = self._watchers[evaluation]
            left.remove(watcher)
            if not left:
                del self._watchers[evaluation]

    def on_event(self, event: Event) -> None:
        """For `Bus.subscribe`."""
        if not self._watchers:
            return
        if isinstance(event, BuildChanged):
            for evaluation in event.evaluations:
                self._put(evaluation, event)
        elif isinstance(event, EvaluationChanged | NoteAdded):
            self._put(event.evaluation, event)
        elif isinstance(event, LogGrew):
            for watchers in self._watchers.values():
                for watcher in watchers:
                    watcher.log_grew(event)

    def _put(self, evaluation: str, event: WatchEvent) -> None:
        for watcher in self._watchers.get(evaluation, ()):
            watcher.put(event)
