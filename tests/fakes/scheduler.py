"""A scheduler without sockets and without a database: recording outboxes, claims in memory.

`World.settle` does what the loops do, in a fixed order, so that tests decide when.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import EvalStep, JobKind
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import AssignJob, Candidate, JobListChunk, JobOffer, RevokeJob
from gradient_protocol.messages.shapes import BuildJob, Capabilities, EvalJob, Job, PathSource
from gradient_protocol.messages.worker import (
    AssignJobResponse,
    CandidateScore,
    CandidateScores,
    WorkerCapabilities,
    WorkerMetrics,
)
from gradient_server.domain.events import AbortWanted, AssignmentClosed, Bus, Event, JobQueued
from gradient_server.domain.job import PendingJob
from gradient_server.domain.status import AbortReason
from gradient_server.scheduler.claims import ClaimRequest
from gradient_server.scheduler.invariants import violations, waiting_violations
from gradient_server.scheduler.model import AssignedJob, SchedulerSettings, WorkerInfo
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scoring.policy import ScoringPolicy, policy_by_name

__all__ = [
    "FakeClaimStore",
    "RecordingOutbox",
    "SteppedClock",
    "World",
    "build",
    "capabilities",
    "evaluation",
    "metrics",
    "worker",
]

M = TypeVar("M", bound=Message)

START = 1_000_000.0


def build(name: str, **changes: object) -> PendingJob:
    """A pending build that any worker of the project `p` can take."""
    job = PendingJob(
        job_id=f"build:{name}",
        kind=JobKind.BUILD,
        name=name,
        projects=("p",),
        system="any",
        features=frozenset(),
        queued_at=START,
        ready_at=START,
        prioritized=False,
        build_request=False,
        drv_path=f"{name}.drv",
        output_paths=(f"out-{name}",),
    )
    return replace(job, **changes)


def evaluation(name: str, **changes: object) -> PendingJob:
    """A pending evaluation with both steps."""
    job = build(name)
    whole = (EvalStep.FETCH, EvalStep.EVALUATE)
    changes = {"job_id": f"eval:{name}", "kind": JobKind.EVAL, "steps": whole, "drv_path": None} | changes
    return replace(job, **changes)


def capabilities(**changes: object) -> WorkerCapabilities:
    """A host of four cores and 8000 MB that builds two jobs and evaluates one."""
    base = WorkerCapabilities(
        architectures=["x86_64-linux"],
        system_features=[],
        max_concurrent_builds=2,
        max_concurrent_evaluations=1,
        cpu_count=4,
        ram_total_mb=8000,
        build_memory=True,
        cpu_core_score=3000.0,
    )
    return msgspec.structs.replace(base, **changes)


def worker(
    name: str,
    *,
    projects: frozenset[str] | None = None,
    fetch: bool = True,
    evaluates: bool = True,
    builds: bool = True,
    **changes: object,
) -> WorkerInfo:
    """A base worker that can do everything."""
    return WorkerInfo(
        id=name,
        name=f"host-{name}",
        projects=projects,
        can=Capabilities(fetch=fetch, eval=evaluates, build=builds, zstd=True),
        capabilities=capabilities(**changes),
    )


def metrics(**changes: object) -> WorkerMetrics:
    """A heartbeat that says nothing."""
    return WorkerMetrics(**({"n": 1, "lateness_secs": 0.0} | changes))


class SteppedClock:
    """Both clocks, moved by hand."""

    def __init__(self) -> None:
        self.passed = 0.0

    def now(self) -> float:
        """Wall time."""
        return START + self.passed

    def monotonic(self) -> float:
        """Another origin, so that the two are not mixed up unseen."""
        return 50.0 + self.passed


class RecordingOutbox:
    """Keeps what was sent, until it is taken."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.control_has_room = True

    def send(self, message: Message) -> None:
        """As a session's."""
        self.sent.append(message)

    def take(self, kind: type[M]) -> list[M]:
        """Takes out the messages of a class."""
        taken = [message for message in self.sent if isinstance(message, kind)]
        self.sent = [message for message in self.sent if not isinstance(message, kind)]
        return taken

    def offered(self) -> list[str]:
        """Takes out what JobOffer and JobListChunk messages name."""
        messages = [*self.take(JobListChunk), *self.take(JobOffer)]
        raws = [msgspec.Raw(raw) for message in messages for raw in message.candidates]
        return [msgspec.msgpack.decode(raw, type=Candidate).job_id for raw in raws]

    def revoked(self) -> list[str]:
        """Takes out what RevokeJob messages name."""
        return [job_id for message in self.take(RevokeJob) for job_id in message.job_ids]


class FakeClaimStore:
    """The database's part: what is queued, what is open. `before_claim` runs inside the claim's hop."""

    def __init__(self) -> None:
        self.queued: dict[str, PendingJob] = {}
        self.open: dict[str, ClaimRequest] = {}
        self.jobs: dict[str, PendingJob] = {}
        self.accepted: set[str] = set()
        self.aborts: dict[str, AbortReason] = {}
        self.claims: list[ClaimRequest] = []
        self.before_claim: Callable[[], None] = lambda: None

    async def claim(self, requests: Sequence[ClaimRequest]) -> list[Job | None]:
        """Wins what is queued."""
        answers: list[Job | None] = []
        for request in requests:
            job = self.queued.pop(request.job_id, None)
            answers.append(None if job is None else wire_job(job, request.steps))
            if job is not None:
                self.open[request.assignment_id] = request
                self.jobs[request.job_id] = job
                self.claims.append(request)
        self.before_claim()
        return answers

    async def accept(self, assignment_id: str, worker_id: str) -> bool:
        """An open assignment of this worker."""
        request = self.open.get(assignment_id)
        if request is None or request.worker_id != worker_id:
            return False
        self.accepted.add(assignment_id)
        return True

    async def reject(self, assignment_id: str, worker_id: str) -> list[Event]:
        """Queues the job again."""
        request = self.open.get(assignment_id)
        if request is None or request.worker_id != worker_id or assignment_id in self.accepted:
            return []
        return self.requeue(assignment_id)

    async def abandon(self, assignment_ids: Sequence[str]) -> list[Event]:
        """Queues the jobs again."""
        return [event for one in assignment_ids if one in self.open for event in self.requeue(one)]

    async def abort(self, assignment_id: str, reason: AbortReason, text: str) -> list[Event]:
        """Stores the abort."""
        if assignment_id not in self.open:
            return []
        self.aborts[assignment_id] = reason
        return [AbortWanted(assignment_id, self.open[assignment_id].worker_id, reason, text)]

    async def reload(self, job_ids: Sequence[str]) -> list[PendingJob]:
        """What is queued of them."""
        return [self.queued[job_id] for job_id in job_ids if job_id in self.queued]

    def close(self, assignment_id: str) -> list[Event]:
        """The assignment ended and its job with it."""
        request = self.open.pop(assignment_id)
        job = self.jobs[request.job_id]
        return [AssignmentClosed(assignment_id, request.job_id, job.kind, request.worker_id)]

    def requeue(self, assignment_id: str) -> list[Event]:
        """The assignment ended and its job waits again."""
        job = self.jobs[self.open[assignment_id].job_id]
        closed = self.close(assignment_id)
        self.queued[job.job_id] = job
        return [*closed, JobQueued(job)]


def wire_job(job: PendingJob, steps: tuple[EvalStep, ...] | None) -> Job:
    """The smallest job of the kind."""
    if job.kind is JobKind.EVAL:
        return EvalJob(
            project="p",
            task="main",
            evaluation=job.job_id,
            steps=list(steps or job.steps),
            source=PathSource(path="x"),
            attrs=[],
            timeout_secs=1.0,
        )
    return BuildJob(
        project="p",
        drv_path=job.drv_path or "",
        name=job.name,
        system=job.system,
        features=[],
        command=[],
        env={},
        inputs=[],
        outputs=[],
        timeout_secs=1.0,
        max_silent_secs=1.0,
    )


@dataclass
class World:
    """One scheduler and everything around it."""

    policy: ScoringPolicy = field(default_factory=lambda: policy_by_name("resource-aware"))
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    # Of the ids that it makes.
    seed: int = 1

    def __post_init__(self) -> None:
        self.clock = SteppedClock()
        self.bus = Bus()
        self.store = FakeClaimStore()
        self.outboxes: dict[str, RecordingOutbox] = {}
        self.scheduler = Scheduler(
            store=self.store,
            bus=self.bus,
            clock=self.clock,
            ids=IdSource.seeded(self.seed, self.clock.now),
            settings=self.settings,
            policy=self.policy,
        )

    def connect(self, info: WorkerInfo, open_assignments: Sequence[AssignedJob] = ()) -> RecordingOutbox:
        """A session resumes."""
        outbox = self.outboxes[info.id] = RecordingOutbox()
        self.scheduler.worker_connected(info, outbox, open_assignments)
        return outbox

    def queue(self, *jobs: PendingJob) -> None:
        """The graph queued jobs."""
        for job in jobs:
            self.store.queued[job.job_id] = job
            self.bus.publish([JobQueued(job)])

    async def settle(self) -> None:
        """Claims, look-ups and urgent offers, until nothing is left to do."""
        scheduler = self.scheduler
        while scheduler.dispatcher.has_claims or scheduler.loops.has_look_ups:
            await scheduler.dispatcher.claim_batch()
            await scheduler.loops.look_up_batch()
        scheduler.offers.flush(scheduler.offers.urgent)
        self.check()

    async def tick(self, seconds: float = 5.0) -> None:
        """Time passes, and the assignment timer ticks once."""
        self.clock.passed += seconds
        await self.scheduler.loops.tick()
        await self.settle()
        self.scheduler.offers.flush(self.scheduler.offers.gathered)

    def score(self, worker_id: str, *job_ids: str, missing: int = 0, present: bool = False) -> None:
        """The worker scores candidates."""
        scores = [
            CandidateScore(job_id=one, missing_count=0, missing_nar_size=missing, outputs_present=present)
            for one in job_ids
        ]
        self.scheduler.candidate_scores(worker_id, CandidateScores(scores=scores, is_final=True))

    async def answer(self, worker_id: str, message: AssignJob, *, accepted: bool = True) -> None:
        """The worker answers an assignment, as a session does it."""
        response = AssignJobResponse(assignment_id=message.assignment_id, accepted=accepted, reason="no")
        self.scheduler.answer_arrived(worker_id, response)
        await self.scheduler.assignment_answered(worker_id, response)
        await self.settle()

    def assigned(self, worker_id: str) -> list[AssignJob]:
        """Takes out what was sent to the worker."""
        return self.outboxes[worker_id].take(AssignJob)

    def check(self) -> None:
        """Every invariant holds."""
        scheduler = self.scheduler
        assert violations(scheduler.tracker, scheduler.pool, scheduler.offers) == []
        assert waiting_violations(scheduler.dispatcher.waiting, scheduler.pool) == []
