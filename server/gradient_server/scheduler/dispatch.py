"""From a wish to an AssignJob, and what the worker says to it.

A wish is answered at once, by a decision in memory: the job leaves the queue and its assignment is
`claiming`. The claim itself is a row in the database, before anything is sent; all decisions that
are waiting are claimed in one transaction. Then the world is looked at again, for it may have
changed meanwhile: the job is sent, or the claim is closed as abandoned and the job waits again.
"""

import math
from collections import deque
from collections.abc import Sequence

import structlog
import trio
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import EvalStep, JobKind
from gradient_protocol.messages.server import AssignJob
from gradient_protocol.messages.shapes import Job
from gradient_protocol.messages.worker import AssignJobResponse

from gradient_server.clock import Clock
from gradient_server.domain.events import Bus
from gradient_server.domain.status import AbortReason
from gradient_server.history.book import HistoryBook
from gradient_server.scheduler.backfill import fitting
from gradient_server.scheduler.claims import ClaimRequest, ClaimsInDoubtError, ClaimStore
from gradient_server.scheduler.decisions import DecisionRing
from gradient_server.scheduler.members import MemberDesk, NoMembers
from gradient_server.scheduler.model import (
    ASSIGNMENT_ANSWER_SECS,
    CLAIM_BATCH,
    NEXT_CANDIDATES,
    REJECTED_JOB_SECS,
    Assignment,
    AssignmentState,
)
from gradient_server.scheduler.offers import Offers
from gradient_server.scheduler.ram import RamNeed
from gradient_server.scheduler.ranking import Choice, Ranking
from gradient_server.scheduler.signal import Signal
from gradient_server.scheduler.tracker import JobTable, JobTracker
from gradient_server.scheduler.waiting import WaitingBuilds
from gradient_server.scheduler.worker import Worker
from gradient_server.scheduler.worker_pool import WorkerPool
from gradient_server.scoring.contexts import HistoryPrediction, InstanceContext

__all__ = ["Dispatcher"]

log = structlog.get_logger(__name__)

_WHOLE = (EvalStep.FETCH, EvalStep.EVALUATE)


class Dispatcher:
    """Decides, claims and sends."""

    def __init__(
        self,
        *,
        tracker: JobTracker,
        pool: WorkerPool,
        offers: Offers,
        ranking: Ranking,
        decisions: DecisionRing,
        store: ClaimStore,
        bus: Bus,
        clock: Clock,
        ids: IdSource,
    ) -> None:
        self._tracker = tracker
        self._pool = pool
        self._offers = offers
        self._ranking = ranking
        self._decisions = decisions
        self._store = store
        self._bus = bus
        self._clock = clock
        self._ids = ids
        self._to_claim: deque[Assignment] = deque()
        self._claimable = Signal()
        self.stopping = False
        self.members: MemberDesk = NoMembers()
        self.waiting = WaitingBuilds(ranking)
        self.histories: HistoryBook | None = None
        # Jobs that another got, or that could not start: looked up again at the next tick.
        self.lost: dict[str, None] = {}

    # Deciding: synchronous

    def try_assign(self, worker: Worker, kind: JobKind, *, widen: bool = False) -> bool:
        """Gives the worker a job, if it can take one and one passes.

        `widen`: where none does, the worker is offered the next candidates.
        """
        slots = worker.slots[kind]
        if self.stopping or worker.draining is not None or not slots.ready:
            return False
        limit_secs = self.members.backfill_secs(worker.id, kind)
        if limit_secs is not None:
            return limit_secs > 0.0 and self._backfill(worker, kind, limit_secs)
        table = self._tracker.tables[kind]
        if len(table):
            if self._choose(table, worker):
                return True
            self._offers.hurry(worker)
            if widen and not worker.windows[kind].unscored:
                self.offer_next(worker, kind)
        return False

    def _backfill(self, worker: Worker, kind: JobKind, limit_secs: float) -> bool:
        """A short job for a reserved seat; False if none fits, or none that fits may run here."""
        table, instance, now = self._tracker.tables[kind], self.instance(), self._clock.now()
        for tracked in fitting(worker.windows[kind], limit_secs):
            if not self._ranking.may_take(table, tracked, worker, self._clock.monotonic()):
                continue
            verdict = self._ranking.decide_one(table, tracked, worker, instance, now=now)
            if verdict.choice is not None:
                self._decisions.record(verdict.decision)
                self._take(worker, verdict.choice, instance)
                return True
        return False

    def _choose(self, table: JobTable, worker: Worker) -> bool:
        """One round of the worker; False if no job passed."""
        if not self._ranking.any_can_win(table, worker) and self.waiting.build_of(worker.id) is None:
            return False
        instance = self.instance()
        now, monotonic = self._clock.now(), self._clock.monotonic()
        verdict = self.waiting.decide(table, worker, instance, now=now, monotonic=monotonic)
        if verdict.decision.considered:
            self._decisions.record(verdict.decision)
        if verdict.choice is None:
            return False
        self._take(worker, verdict.choice, instance)
        return True

    def offer_next(self, worker: Worker, kind: JobKind, limit: int = NEXT_CANDIDATES) -> None:
        """The next candidates for a worker, best first by what is the same for all."""
        limit = min(limit, worker.room_in_window)
        table = self._tracker.tables[kind]
        if limit and len(table) > len(worker.windows[kind]):
            now, monotonic = self._clock.now(), self._clock.monotonic()
            found = self._ranking.next_best(
                table, worker, self.instance(), limit=limit, now=now, monotonic=monotonic
            )
            self._offers.offer_next(worker, found)

    def instance(self) -> InstanceContext:
        """The instance as rules read it now."""
        return self._pool.instance(len(self._tracker.tables[JobKind.BUILD]))

    def _take(self, worker: Worker, choice: Choice, instance: InstanceContext) -> None:
        job = choice.tracked.job
        steps = job.steps
        if steps == _WHOLE and (
            not worker.info.can.eval or self._ranking.evaluator_is_idle(worker, choice.tracked)
        ):
            steps = (EvalStep.FETCH,)
        need = RamNeed.of(
            job,
            choice.tracked.history,
            outputs_present=choice.outputs_present,
            unmeasured_mb=instance.unmeasured_build_ram_mb,
        )
        assignment = Assignment(
            assignment_id=self._ids.new(),
            job_id=job.job_id,
            kind=job.kind,
            name=job.name,
            worker_id=worker.id,
            worker_name=worker.info.name,
            state=AssignmentState.CLAIMING,
            assigned_at=self._clock.monotonic(),
            job=job,
            steps=steps,
            missing_count=choice.missing_count,
            missing_nar_size=choice.missing_nar_size,
            ram_reserved_mb=need.reserved_mb,
            expected_secs=_expected_secs(choice.tracked.history),
            score_breakdown=choice.breakdown.as_json(),
            runner_up=choice.runner_up,
        )
        self._tracker.remove(job.job_id)
        self._offers.withdraw(choice.tracked)
        self.waiting.end_job(job.job_id)
        if self.histories is not None:
            self.histories.forget(job)
        self._pool.add(assignment)
        self._to_claim.append(assignment)
        self._claimable.set()

    # Claiming: one transaction at a time

    async def run_claims(self) -> None:
        """Claims what was decided, for ever."""
        while True:
            await self._claimable.wait()
            while self._to_claim:
                await self.claim_batch()

    @property
    def has_claims(self) -> bool:
        """Whether decisions wait for their claim."""
        return bool(self._to_claim)

    async def claim_batch(self) -> None:
        """Claims what waits, at most `CLAIM_BATCH`, and sends it."""
        if not self._to_claim:
            return
        size = min(len(self._to_claim), CLAIM_BATCH)
        batch = [self._to_claim.popleft() for _ in range(size)]
        # Not cancellable: a claim that nobody hears of would hold its job until a restart.
        with trio.CancelScope(shield=True):
            to_abandon = await self._claim(batch)
            if to_abandon:
                self._bus.publish(await self._store.abandon(to_abandon))

    async def _claim(self, batch: Sequence[Assignment]) -> list[str]:
        """Sends what is claimed. Returns what is, or may be, and must be given back."""
        try:
            jobs = await self._store.claim([_request(assignment) for assignment in batch])
        except ClaimsInDoubtError as error:
            log.error("claims are in doubt and taken back", count=len(batch), reason=str(error))
            for assignment in batch:
                self._claimed(assignment, None)
            return [assignment.assignment_id for assignment in batch]
        return [
            assignment.assignment_id
            for assignment, job in zip(batch, jobs, strict=True)
            if not self._claimed(assignment, job)
        ]

    def _claimed(self, assignment: Assignment, job: Job | None) -> bool:
        """Sends a claimed job. False: it is claimed and must be given back."""
        if self._pool.assignments.get(assignment.assignment_id) is not assignment:
            return job is None  # closed meanwhile
        if job is None:
            self._claim_lost(assignment)
            return True
        worker = self._pool.workers.get(assignment.worker_id)
        here = worker is not None and assignment.assignment_id in worker.assigned
        if worker is None or not here or worker.draining is not None or assignment.unwanted or self.stopping:
            return False
        assignment.state = AssignmentState.SENT
        assignment.sent_at = self._clock.monotonic()
        worker.outbox.send(
            AssignJob(job_id=assignment.job_id, assignment_id=assignment.assignment_id, job=job)
        )
        return True

    def _claim_lost(self, assignment: Assignment) -> None:
        """Nothing was written: the job is gone, the worker's wish stands again."""
        worker = self._pool.workers.get(assignment.worker_id)
        here = worker is not None and assignment.assignment_id in worker.assigned
        self._pool.remove(assignment.assignment_id)
        self.lost[assignment.job_id] = None
        if worker is not None and here:
            worker.slots[assignment.kind].wish = True
            self._pool.settle(worker, assignment.kind)
            self.try_assign(worker, assignment.kind)

    # Answers

    def answer_arrived(self, worker_id: str, response: AssignJobResponse) -> Assignment | None:
        """Notes the answer at once, so that the RequestJob behind it is heard. None: not to be stored.

        A second answer, and one to an assignment that is not (any more) this worker's, is ignored.
        """
        assignment = self._pool.assignments.get(response.assignment_id)
        if assignment is None or assignment.worker_id != worker_id or assignment.answered:
            return None
        if assignment.state is not AssignmentState.SENT:
            return None
        assignment.answered = True
        if response.accepted:
            assignment.state = AssignmentState.ACCEPTED
        self._no_longer_outstanding(assignment, rejected=not response.accepted)
        return assignment

    async def store_answer(self, assignment: Assignment, response: AssignJobResponse) -> None:
        """Commits an answer that `answer_arrived` noted; a member's goes to its attempt."""
        if assignment.cluster_attempt is not None:
            self.members.answered(assignment, response)
            return
        with trio.CancelScope(shield=True):
            if response.accepted:
                await self._store.accept(assignment.assignment_id, assignment.worker_id)
                return
            log.info(
                "a worker rejected a job",
                worker=assignment.worker_name,
                job=assignment.job_id,
                reason=response.reason,
            )
            self._bus.publish(await self._store.reject(assignment.assignment_id, assignment.worker_id))

    def unanswered(self) -> list[Assignment]:
        """Those sent 30 s ago in a living session, and not answered."""
        before = self._clock.monotonic() - ASSIGNMENT_ANSWER_SECS
        return [
            assignment
            for worker in self._pool
            for assignment in worker.assigned.values()
            if assignment.state is AssignmentState.SENT
            and not assignment.answered
            and assignment.sent_at is not None
            and assignment.sent_at <= before
        ]

    async def abort_unanswered(self, assignments: Sequence[Assignment]) -> None:
        """Each is aborted, and counts as rejected."""
        for assignment in assignments:
            if assignment.answered:
                continue
            assignment.answered = True
            self._no_longer_outstanding(assignment, rejected=True)
            text = f"not answered within {ASSIGNMENT_ANSWER_SECS:g} s"
            log.warning("an assignment was " + text, worker=assignment.worker_name, job=assignment.job_id)
            if assignment.cluster_attempt is not None:
                self.members.unanswered(assignment, text)
                continue
            with trio.CancelScope(shield=True):
                events = await self._store.abort(assignment.assignment_id, AbortReason.UNANSWERED, text)
                self._bus.publish(events)

    def _no_longer_outstanding(self, assignment: Assignment, *, rejected: bool) -> None:
        worker = self._pool.workers.get(assignment.worker_id)
        if worker is None:
            return
        if rejected:
            worker.excluded[assignment.job_id] = self._clock.monotonic() + REJECTED_JOB_SECS
        slots = worker.slots[assignment.kind]
        if slots.outstanding == assignment.assignment_id:
            slots.outstanding = None
            self._pool.settle(worker, assignment.kind)


def _expected_secs(history: HistoryPrediction) -> float | None:
    return None if math.isnan(history.build_time_ms) else history.build_time_ms / 1000.0


def _request(assignment: Assignment) -> ClaimRequest:
    job = assignment.job
    split = job is not None and assignment.steps != job.steps
    return ClaimRequest(
        assignment_id=assignment.assignment_id,
        job_id=assignment.job_id,
        worker_id=assignment.worker_id,
        steps=assignment.steps if split else None,
        missing_count=assignment.missing_count,
        missing_nar_size=assignment.missing_nar_size,
        dependency_count=None if job is None else job.dependency_count,
        score_breakdown=assignment.score_breakdown,
    )
