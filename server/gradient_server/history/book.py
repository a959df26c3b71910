"""Predictions at hand: what the pending jobs are expected to take, loaded ahead and kept (scoring.md,
"History and Closure Size"). Pure; `refresh` loads.

A job is told its prediction when it is queued, if its history is known already; else the history is
wanted, and the job is no candidate until it is loaded, which takes one read. When a build ends, what its
history tells is stale: jobs that wait under the same name get the fresh prediction swapped in. What is
only stale is gathered by the loader, for a thousand builds of one name may end within a second.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gradient_protocol.kinds import EvalStep, JobKind

from gradient_server.domain.job import PendingJob
from gradient_server.scoring.contexts import HistoryPrediction

__all__ = ["MAX_KEPT", "HistoryBook", "HistoryKey", "history_key"]

# Names whose prediction is kept though no job of them waits.
MAX_KEPT: Final = 10_000


@dataclass(frozen=True, slots=True)
class HistoryKey:
    """What a history is kept under: a build's name and architecture, or an evaluation's task and steps."""

    kind: JobKind
    name: str
    architecture: str = ""
    steps: tuple[EvalStep, ...] = ()


def history_key(job: PendingJob) -> HistoryKey:
    """The key of a job: `pname`, else `name`, and the architecture; of an evaluation its task."""
    if job.kind is JobKind.EVAL:
        return HistoryKey(JobKind.EVAL, job.task or "", steps=job.steps)
    return HistoryKey(JobKind.BUILD, job.pname or job.name, job.system)


class HistoryBook:
    """Who waits under which key, what is known, and what is to be loaded. `wake` tells the loader."""

    def __init__(self) -> None:
        self._known: OrderedDict[HistoryKey, HistoryPrediction] = OrderedDict()
        self._stale: set[HistoryKey] = set()
        self._users: dict[HistoryKey, dict[str, None]] = {}
        self._wanted: dict[HistoryKey, None] = {}
        # Known, waited under, and to be loaded again in a moment.
        self._outdated: dict[HistoryKey, None] = {}
        self.wake: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._known)

    def look(self, job: PendingJob) -> HistoryPrediction | None:
        """The prediction for a job that begins to wait; None while it has to be loaded first."""
        key = history_key(job)
        self._users.setdefault(key, {})[job.job_id] = None
        known = self._known.get(key)
        if known is None:
            self._want(key)
            return None
        self._known.move_to_end(key)
        if key in self._stale:
            self._want(key)
        return known

    def known(self, job: PendingJob) -> HistoryPrediction:
        """What is known for a job now, whoever waits; nothing, where nothing is loaded."""
        return self._known.get(history_key(job), HistoryPrediction())

    def forget(self, job: PendingJob) -> None:
        """The job waits no more."""
        key = history_key(job)
        users = self._users.get(key)
        if users is not None and users.pop(job.job_id, "") is None and not users:
            del self._users[key]

    def ended(self, job: PendingJob) -> None:
        """A run of this job ended: whatever is known under its key may have changed.

        That nothing is known is forgotten: the next job waits for the read, and is not taken for unmeasured.
        """
        key = history_key(job)
        known = self._known.get(key)
        if known is not None and not known.samples:
            del self._known[key]
            self._stale.discard(key)
        self._outdate(key)

    def outdate_evaluations(self) -> None:
        """The durations of evaluations were measured anew."""
        for key in [*self._known]:
            if key.kind is JobKind.EVAL:
                self._outdate(key)

    def want_outdated(self) -> None:
        """What became stale is to be loaded now."""
        for key in self._outdated:
            self._wanted[key] = None
        if self._outdated:
            self._outdated.clear()
            self.wake()

    def take_wanted(self, limit: int) -> list[HistoryKey]:
        """The next keys to load, at most `limit`."""
        taken = [key for key, _ in zip(self._wanted, range(limit), strict=False)]
        for key in taken:
            del self._wanted[key]
            self._outdated.pop(key, None)
            self._stale.discard(key)
        return taken

    def put(self, loaded: Mapping[HistoryKey, HistoryPrediction]) -> list[tuple[str, HistoryPrediction]]:
        """Takes over what was loaded; the waiting jobs whose prediction this is."""
        changed: list[tuple[str, HistoryPrediction]] = []
        for key, prediction in loaded.items():
            is_news = self._known.get(key) != prediction
            self._known[key] = prediction
            self._known.move_to_end(key)
            if is_news:
                changed.extend((job_id, prediction) for job_id in self._users.get(key, ()))
        while len(self._known) > MAX_KEPT:
            key, _ = self._known.popitem(last=False)
            self._stale.discard(key)
        return changed

    def missed(self, keys: Iterable[HistoryKey]) -> list[tuple[str, HistoryPrediction]]:
        """These could not be loaded: jobs under them go on with what was known, or with nothing."""
        nothing = HistoryPrediction()
        kept = {key: self._known.get(key, nothing) for key in keys}
        changed = self.put(kept)
        self._stale.update(kept)
        return changed

    def _outdate(self, key: HistoryKey) -> None:
        if key in self._users:
            self._outdated[key] = None
        elif key in self._known:
            self._stale.add(key)

    def _want(self, key: HistoryKey) -> None:
        self._wanted[key] = None
        self.wake()
