"""Members of clusters that wait, offered to every worker with an idle slot of their kind.

Workers score them under their own keys (cluster-jobs.md, Tracking); single assignment never sees
them. Bounded: a worker gets at most 64 more in one pass, and a pass makes at most 4,096 offers.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final, cast

import msgspec
from gradient_protocol.messages.server import Candidate, JobOffer

from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.floor import Floor
from gradient_server.cluster.planner import Flags
from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.model import NEXT_CANDIDATES
from gradient_server.scheduler.offers import next_chunk
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scheduler.tracker import NO_HISTORY, Tracked
from gradient_server.scheduler.worker import Worker

__all__ = ["OFFERED_AFTER_SECS", "MemberOffers"]

OFFERED_AFTER_SECS: Final = 1.0
_OFFERS_A_PASS: Final = 4096


class MemberOffers:
    """Who was offered which member."""

    def __init__(self, book: ClusterBook, floor: Floor, scheduler: Scheduler) -> None:
        self._book = book
        self._floor = floor
        self._pool = scheduler.pool
        self._revocations = scheduler.offers.gathered
        self._offered: dict[str, Tracked] = {}
        self.offers_made = 0

    def offer(self, cluster_ids: Sequence[str], now: float) -> None:
        """Offers the members of these clusters, the first first, to workers that wait.

        A cluster that has only just become able to start is not offered yet: where there are seats for
        it soon, nobody needs to know what it would have to fetch.
        """
        left = _OFFERS_A_PASS
        waiting = (self._book.clusters[cluster_id] for cluster_id in cluster_ids)
        members = [
            (job, member.pin)
            for entry in waiting
            if entry.ready_since is not None and now - entry.ready_since >= OFFERED_AFTER_SECS
            for job, member in zip(entry.jobs(), entry.info.members, strict=True)
        ]
        if not members:
            return
        able: dict[str, Flags] = {}
        for worker_id, kind, *_ in self._pool.idle_slots(now):
            worker = self._pool.workers[worker_id]
            room = min(NEXT_CANDIDATES, worker.room_in_window, left)
            if room <= 0 or worker_id not in self._floor or not worker.outbox.control_has_room:
                continue
            column = self._floor.column(worker_id)
            fresh = (
                job
                for job, pin in members
                if job.kind is kind
                and job.job_id not in worker.members_offered
                and self._able(able, job, pin)[column]
            )
            left -= self._tell(worker, list(islice(fresh, room)))

    def withdraw(self, job_key: str) -> None:
        """The member does not wait any more."""
        self._floor.forget_scores(job_key)
        tracked = self._offered.pop(job_key, None)
        for worker_id in () if tracked is None else tracked.offered_to:
            worker = self._pool.workers.get(worker_id)
            if worker is not None and job_key in worker.members_offered:
                del worker.members_offered[job_key]
                worker.to_revoke[job_key] = None
                self._revocations[worker_id] = None

    def worker_left(self, worker_id: str) -> None:
        """Its session, and with it its cache, is gone."""
        for tracked in self._offered.values():
            tracked.offered_to.pop(worker_id, None)

    def forget_worker(self, worker: Worker, *, tell: bool = True) -> None:
        """The worker takes no jobs, or (`tell` False) has begun its cache anew."""
        for job_key in worker.members_offered:
            tracked = self._offered.get(job_key)
            if tracked is not None:
                tracked.offered_to.pop(worker.id, None)
            if tell:
                worker.to_revoke[job_key] = None
                self._revocations[worker.id] = None
        worker.members_offered = {}

    def _able(self, known: dict[str, Flags], job: PendingJob, pin: str | None) -> Flags:
        flags = known.get(job.job_id)
        if flags is None:
            flags = known[job.job_id] = self._floor.able(job, pin)
        return flags

    def _tell(self, worker: Worker, jobs: Sequence[PendingJob]) -> int:
        waiting: dict[str, Tracked] = {}
        for job in jobs:
            tracked = self._offered.get(job.job_id)
            if tracked is None:
                tracked = self._offered[job.job_id] = Tracked(job, NO_HISTORY, -1, -1)
            tracked.offered_to[worker.id] = None
            worker.members_offered[job.job_id] = None
            worker.to_revoke.pop(job.job_id, None)
            waiting[job.job_id] = tracked
        while waiting:
            part: list[msgspec.Raw] = next_chunk(waiting)
            # Encoded once for all workers; the encoder copies them into the message as they are.
            candidates = cast("list[Candidate]", part)
            worker.outbox.send(JobOffer(candidates=candidates, is_final=not waiting))
        self.offers_made += len(jobs)
        return len(jobs)
