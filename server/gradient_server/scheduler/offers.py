"""The windows: who is offered which candidates, and the messages that keep the workers' copies.

A candidate goes first to at most 32 eligible workers, those that wait before those whose slot is
expected next. Each offer is scored by its worker and taken back from all but one, so a queue that is
longer than the pool can look at is spread: few workers get each candidate, and every worker enough
to choose from. A worker that finds nothing gets the next 64 by worker-independent score. What is
said to a worker that waits is said at once; to one that is busy, gathered for a moment, so that a
fast queue does not cost a message for each job and worker.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Final, cast

import msgspec
from gradient_protocol.kinds import JobKind
from gradient_protocol.limits import MAX_OFFER_BYTES, MAX_WINDOW_CANDIDATES
from gradient_protocol.messages.server import Candidate, JobListChunk, JobOffer, RevokeJob

from gradient_server.scheduler.model import OFFER_WORKERS
from gradient_server.scheduler.tracker import JobTracker, Tracked
from gradient_server.scheduler.worker import Worker
from gradient_server.scheduler.worker_pool import WorkerPool

__all__ = ["WINDOW_ENOUGH", "Offers", "next_chunk"]

# A worker whose window holds this many is passed over once a few others were offered.
WINDOW_ENOUGH: Final = 16
_FEW_WORKERS: Final = 2
# Who has enough is not looked for through the whole pool.
_PASSED_OVER: Final = 8
_OVERHEAD_BYTES: Final = 64  # a message's own names


def next_chunk(waiting: dict[str, Tracked]) -> list[msgspec.Raw]:
    """Takes out what fits into one message: at most 1,000 candidates and 1 MiB."""
    chunk: list[msgspec.Raw] = []
    size = _OVERHEAD_BYTES
    while waiting and len(chunk) < MAX_WINDOW_CANDIDATES:
        job_id = next(iter(waiting))
        raw = waiting[job_id].encoded
        size += _length(raw)
        if chunk and size > MAX_OFFER_BYTES:
            break
        chunk.append(raw)
        del waiting[job_id]
    return chunk


def _length(raw: msgspec.Raw) -> int:
    return len(memoryview(raw))


def _on_wire(raws: list[msgspec.Raw]) -> list[Candidate]:
    # Encoded once for all workers; the encoder copies them into the message as they are.
    return cast("list[Candidate]", raws)


class Offers:
    """Windows, and what has to be told about them."""

    def __init__(self, tracker: JobTracker, pool: WorkerPool) -> None:
        self._tracker = tracker
        self._pool = pool
        # Workers with something to be told: at once, or in a moment.
        self.urgent: dict[str, None] = {}
        self.gathered: dict[str, None] = {}
        # Workers whose window fell below `WINDOW_ENOUGH`, in that order; some may have enough again.
        self._hungry: dict[JobKind, dict[str, None]] = {kind: {} for kind in JobKind}
        self.offers_made = 0

    # Windows

    def offer_new(self, tracked: Tracked) -> None:
        """A job became a candidate."""
        self._pool.intern_fresh()
        kind = tracked.job.kind
        waiting = self._pool.waiting[kind]
        others = (one for one in self._pool.by_expected[kind] if one not in waiting)
        spread = self._spread(kind)
        self._offer_first(tracked, itertools.chain(waiting, others), spread)
        if spread < OFFER_WORKERS and len(tracked.offered_to) < spread:
            self._offer_hungry(tracked, spread)

    def _spread(self, kind: JobKind) -> int:
        """How many workers get a new candidate, that all windows together hold enough."""
        wanted = len(self._pool.workers) * WINDOW_ENOUGH // max(len(self._tracker.tables[kind]), 1)
        return min(max(wanted, _FEW_WORKERS), OFFER_WORKERS)

    def _offer_first(self, tracked: Tracked, workers: Iterable[str], limit: int) -> None:
        """To the first of `workers`; of those that have enough, few get it, who have the least."""
        kind = tracked.job.kind
        passed_over: list[Worker] = []
        for worker_id in workers:
            worker = self._pool.workers[worker_id]
            if not worker.eligible[tracked.requirement_id]:
                continue
            if len(worker.windows[kind]) < WINDOW_ENOUGH:
                self._offer_if_able(worker, tracked)
            else:
                passed_over.append(worker)
            if len(tracked.offered_to) >= limit or len(passed_over) == _PASSED_OVER:
                break
        if len(tracked.offered_to) < _FEW_WORKERS:
            passed_over.sort(key=lambda worker: len(worker.windows[kind]))
            for worker in passed_over[: _FEW_WORKERS - len(tracked.offered_to)]:
                self._offer_if_able(worker, tracked)

    def _offer_hungry(self, tracked: Tracked, limit: int) -> None:
        """To those that have had too little to choose from the longest."""
        kind = tracked.job.kind
        hungry = self._hungry[kind]
        for worker_id in tuple(itertools.islice(hungry, OFFER_WORKERS)):
            worker = self._pool.workers.get(worker_id)
            if worker is None or len(worker.windows[kind]) >= WINDOW_ENOUGH:
                del hungry[worker_id]
                continue
            if worker.eligible[tracked.requirement_id]:
                self._offer_if_able(worker, tracked)
            if len(tracked.offered_to) >= limit:
                return

    def offer_next(self, worker: Worker, candidates: Iterable[Tracked]) -> int:
        """Candidates for one worker that has nothing to choose from. How many were new to it."""
        return sum(self._offer_if_able(worker, tracked) for tracked in candidates)

    def hurry(self, worker: Worker) -> None:
        """The worker waits now: what was gathered for it is told at once."""
        if worker.to_offer:
            self.urgent[worker.id] = None

    def withdraw(self, tracked: Tracked) -> None:
        """The job is no candidate any more: it leaves every window."""
        job_id, kind = tracked.job.job_id, tracked.job.kind
        hungry = self._hungry[kind]
        for worker_id in tracked.offered_to:
            worker = self._pool.workers[worker_id]
            window = worker.windows[kind]
            window.remove(job_id)
            if len(window) < WINDOW_ENOUGH:
                hungry.setdefault(worker_id)
            if worker.to_offer.pop(job_id, None) is None:
                worker.to_revoke[job_id] = None
                self.gathered[worker_id] = None
        tracked.offered_to = {}

    def close(self, worker: Worker) -> None:
        """The session ended: its windows are gone."""
        for kind, window in worker.windows.items():
            for tracked in window.entries:
                self._tracker.tables[kind].withdrawn(tracked, worker.id)
        self.urgent.pop(worker.id, None)
        self.gathered.pop(worker.id, None)
        for hungry in self._hungry.values():
            hungry.pop(worker.id, None)

    def empty(self, worker: Worker) -> None:
        """The worker takes no more jobs: everything in its windows is revoked."""
        self._revoke_if(worker, lambda _: True)

    def prune(self, worker: Worker) -> None:
        """The worker has changed: what it can no longer take leaves its windows."""
        self._revoke_if(worker, lambda tracked: not worker.eligible[tracked.requirement_id])

    def _revoke_if(self, worker: Worker, unfit: Callable[[Tracked], bool]) -> None:
        for kind, window in worker.windows.items():
            for tracked in [entry for entry in window.entries if unfit(entry)]:
                job_id = tracked.job.job_id
                window.remove(job_id)
                self._tracker.tables[kind].withdrawn(tracked, worker.id)
                if worker.to_offer.pop(job_id, None) is None:
                    worker.to_revoke[job_id] = None
                    self.gathered[worker.id] = None

    def list_requested(self, worker: Worker) -> None:
        """The worker asked for its window anew: all of it is told again."""
        worker.list_open = True
        for kind, window in worker.windows.items():
            self._hungry[kind].setdefault(worker.id)
            worker.to_offer.update((entry.job.job_id, entry) for entry in window.entries)
        self.urgent[worker.id] = None

    def _offer_if_able(self, worker: Worker, tracked: Tracked) -> bool:
        job_id, kind = tracked.job.job_id, tracked.job.kind
        if worker.draining is not None or worker.id in tracked.offered_to or not worker.room_in_window:
            return False
        if not worker.eligible[tracked.requirement_id] or job_id in worker.excluded:
            return False
        if _length(tracked.encoded) + _OVERHEAD_BYTES > MAX_OFFER_BYTES:
            return False  # too large for a message: assigned unscored, after its rounds
        worker.windows[kind].add(tracked)
        self._tracker.tables[kind].offered(tracked, worker.id)
        self.offers_made += 1
        worker.to_offer[job_id] = tracked
        (self.urgent if worker.slots[kind].ready else self.gathered)[worker.id] = None
        return True

    # Messages

    def flush(self, workers: dict[str, None]) -> None:
        """Tells what has to be told; who has no room is kept for the next time."""
        for worker_id in tuple(workers):
            worker = self._pool.workers.get(worker_id)
            if worker is None or self._tell(worker):
                workers.pop(worker_id, None)

    def _tell(self, worker: Worker) -> bool:
        """True if all was said."""
        if not _has_room(worker):
            return False
        if worker.to_revoke:
            worker.outbox.send(RevokeJob(job_ids=list(worker.to_revoke)))
            worker.to_revoke.clear()
        while worker.to_offer or worker.list_open:
            if not _has_room(worker):
                return False
            part = _on_wire(next_chunk(worker.to_offer))
            is_final = not worker.to_offer
            if worker.list_open:
                worker.outbox.send(JobListChunk(candidates=part, is_final=is_final))
                worker.list_open = not is_final
            else:
                worker.outbox.send(JobOffer(candidates=part, is_final=is_final))
        return True


def _has_room(worker: Worker) -> bool:
    return worker.outbox.control_has_room
