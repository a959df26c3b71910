"""What one assignment costs the scheduler alone: no sockets, no database, claims always won.

    python -m bench.scheduler [--workers 200] [--pending 1000] [--jobs 10000] [--profile FILE]

Each job's life is what the sessions tell the scheduler of it: queued, offered, scored, decided, claimed,
answered, closed, while the worker asks again. Processor time of the process, so that
other load on the machine counts for less; the bench's own part, about a tenth, is in it.
"""

import argparse
import cProfile
import itertools
import json
import time
from collections import deque

import msgspec
import trio
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import AssignJob, Candidate, JobListChunk, JobOffer
from gradient_protocol.messages.worker import (
    AssignJobResponse,
    CandidateScore,
    CandidateScores,
    WorkerMetrics,
)
from gradient_server.clock import SystemClock
from gradient_server.domain.events import Bus, JobQueued
from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.model import SchedulerSettings
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scoring.policy import policy_by_name
from gradient_server.wiring import tune_interpreter

from tests.fakes.scheduler import FakeClaimStore, build, worker

_candidates = msgspec.msgpack.Decoder(list[Candidate])
_encode = msgspec.msgpack.Encoder().encode
_CLOSED_TOGETHER = 32  # ends that share a transaction
_GATHER_EVERY = 4  # rounds between two flushes of what is gathered


class Inbox:
    """A worker that scores all it is offered, and ends each job when it is told to."""

    control_has_room = True

    def __init__(self, worker_id: str, busy: deque[tuple[str, str]]) -> None:
        self.worker_id = worker_id
        self.busy = busy
        self.offered: list[CandidateScore] = []
        self.offers = 0

    def send(self, message: Message) -> None:
        """As a session's."""
        if isinstance(message, AssignJob):
            self.busy.append((self.worker_id, message.assignment_id))
        elif isinstance(message, JobOffer | JobListChunk):
            for one in _candidates.decode(_encode(message.candidates)):
                self.offers += 1
                self.offered.append(
                    CandidateScore(
                        job_id=one.job_id, missing_count=0, missing_nar_size=0, outputs_present=False
                    )
                )


class Load:
    """The scheduler, its workers, and the jobs that come and go."""

    def __init__(self, workers: int, pending: int) -> None:
        self.bus = Bus()
        self.store = FakeClaimStore()
        self.clock = SystemClock()
        self.scheduler = Scheduler(
            store=self.store,
            bus=self.bus,
            clock=self.clock,
            ids=IdSource(),
            settings=SchedulerSettings(),
            policy=policy_by_name("resource-aware"),
        )
        self.busy: deque[tuple[str, str]] = deque()
        self.inboxes: dict[str, Inbox] = {}
        self._numbers = itertools.count()
        for number in range(workers):
            info = worker(
                f"w{number}",
                max_concurrent_builds=1,
                ram_total_mb=65_536,
                cpu_count=16,
                cpu_core_score=3000.0,
            )
            inbox = self.inboxes[info.id] = Inbox(info.id, self.busy)
            self.scheduler.worker_connected(info, inbox, [])
            sample = WorkerMetrics(n=0, lateness_secs=0.0, cpu_usage_pct=10.0, ram_free_mb=60_000)
            self.scheduler.heartbeat(info.id, sample)
        self.queue(pending)
        for worker_id in self.inboxes:
            self.scheduler.request_job_list(worker_id)
            self.scheduler.request_job(worker_id, JobKind.BUILD)

    @property
    def offers(self) -> int:
        """Candidates told to workers so far."""
        return sum(inbox.offers for inbox in self.inboxes.values())

    def queue(self, count: int) -> None:
        """New jobs, ready now."""
        now = self.clock.now()
        jobs: list[PendingJob] = [
            build(f"job-{next(self._numbers)}", queued_at=now, ready_at=now) for _ in range(count)
        ]
        for job in jobs:
            self.store.queued[job.job_id] = job
        self.bus.publish([JobQueued(job) for job in jobs])

    async def run(self, jobs: int) -> int:
        """Until `jobs` have ended; how many did."""
        done = 0
        for turn in itertools.count():
            await self._move(gather=turn % _GATHER_EVERY == 0)
            ended = [self.busy.popleft() for _ in range(min(_CLOSED_TOGETHER, len(self.busy)))]
            for worker_id, assignment_id in ended:
                response = AssignJobResponse(assignment_id=assignment_id, accepted=True)
                self.scheduler.answer_arrived(worker_id, response)
                self.scheduler.request_job(worker_id, JobKind.BUILD)
            for worker_id, assignment_id in ended:
                self.scheduler.take_acceptance(
                    worker_id, AssignJobResponse(assignment_id=assignment_id, accepted=True)
                )
                self.bus.publish(self.store.close(assignment_id))
            self.queue(len(ended))
            done += len(ended)
            if done >= jobs:
                return done
        raise AssertionError

    async def _move(self, *, gather: bool) -> None:
        scheduler = self.scheduler
        while scheduler.dispatcher.has_claims:
            await scheduler.dispatcher.claim_batch()
        self.store.claims.clear()
        scheduler.offers.flush(scheduler.offers.urgent)
        if gather:
            scheduler.offers.flush(scheduler.offers.gathered)
        for worker_id, inbox in self.inboxes.items():
            if inbox.offered:
                scores, inbox.offered = inbox.offered, []
                scheduler.candidate_scores(worker_id, CandidateScores(scores=scores, is_final=True))


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Warms up with a tenth, then measures."""
    load = Load(options.workers, options.pending)
    await load.run(options.jobs // 10)
    offers = load.offers
    profiler = cProfile.Profile()
    if options.profile:
        profiler.enable()
    began = time.process_time()
    done = await load.run(options.jobs)
    spent = time.process_time() - began
    if options.profile:
        profiler.disable()
        profiler.dump_stats(options.profile)
    return {
        "case": "scheduler",
        "workers": options.workers,
        "pending": options.pending,
        "jobs": done,
        "cpu_us_per_job": round(spent * 1e6 / done, 1),
        "offers_per_job": round((load.offers - offers) / done, 2),
    }


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--pending", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--profile", help="write a profile to this file")
    options = parser.parse_args()
    tune_interpreter()
    print(json.dumps(trio.run(measure, options)))


if __name__ == "__main__":
    main()
