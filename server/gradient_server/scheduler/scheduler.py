"""The scheduler: everything that waits, everyone who works, and what brings them together.

One object on the event loop. Every method but the two that say so is synchronous; what they decide
is written to the database by loops of its own (`run`). Messages go out through the workers'
outboxes, in the order of the calls.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog
import trio
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind, JobStage
from gradient_protocol.messages.worker import (
    AssignJobResponse,
    CandidateScores,
    WorkerCapabilities,
    WorkerMetrics,
)

from gradient_server.clock import Clock
from gradient_server.domain.events import AbortWanted, AssignmentClosed, Bus, Event, JobQueued, JobUnqueued
from gradient_server.domain.job import PendingJob
from gradient_server.history.book import HistoryBook
from gradient_server.scheduler.claims import ClaimStore
from gradient_server.scheduler.decisions import Decision, DecisionRing
from gradient_server.scheduler.dispatch import Dispatcher
from gradient_server.scheduler.loops import Loops
from gradient_server.scheduler.members import MemberDesk, NoMembers
from gradient_server.scheduler.model import (
    OFFER_WORKERS,
    AssignedJob,
    Assignment,
    AssignmentState,
    Outbox,
    SchedulerSettings,
    WorkerInfo,
)
from gradient_server.scheduler.offers import WINDOW_ENOUGH, Offers
from gradient_server.scheduler.ram import RamNeed
from gradient_server.scheduler.ranking import Ranking
from gradient_server.scheduler.snapshot import PoolSnapshot, take_snapshot
from gradient_server.scheduler.tracker import NO_HISTORY, JobTracker, Tracked
from gradient_server.scheduler.why import WhyAnswer, explain
from gradient_server.scheduler.worker import Worker
from gradient_server.scheduler.worker_pool import IdleSlot, WorkerPool
from gradient_server.scoring.contexts import HistoryPrediction, InstanceContext
from gradient_server.scoring.policy import ScoringPolicy

__all__ = ["Scheduler"]

log = structlog.get_logger(__name__)

_RESUMED: Final = frozenset({AssignmentState.SENT, AssignmentState.ACCEPTED})


class Scheduler:
    """Made once by `app`, subscribed to the bus, told by the sessions, asked by the API."""

    def __init__(
        self,
        *,
        store: ClaimStore,
        bus: Bus,
        clock: Clock,
        ids: IdSource,
        settings: SchedulerSettings,
        policy: ScoringPolicy,
        histories: HistoryBook | None = None,
    ) -> None:
        """`histories`: where predictions come from; None, or a policy without history: there are none."""
        self._clock = clock
        self.tracker = JobTracker()
        self.pool = WorkerPool(self.tracker.requirements, settings)
        self.offers = Offers(self.tracker, self.pool)
        self.decisions = DecisionRing()
        self.ranking = Ranking(self.pool, policy)
        self.dispatcher = Dispatcher(
            tracker=self.tracker,
            pool=self.pool,
            offers=self.offers,
            ranking=self.ranking,
            decisions=self.decisions,
            store=store,
            bus=bus,
            clock=clock,
            ids=ids,
        )
        self.loops = Loops(
            tracker=self.tracker,
            pool=self.pool,
            offers=self.offers,
            dispatcher=self.dispatcher,
            store=store,
            clock=clock,
            queue=self._queue,
        )
        self._members: MemberDesk = NoMembers()
        self._histories = histories if policy.uses_history else None
        self.dispatcher.histories = self._histories
        bus.subscribe(self.on_event)

    def set_members(self, members: MemberDesk) -> None:
        """Who starts clusters. Before anything is loaded."""
        self._members = self.dispatcher.members = members

    # What waits

    def load(self, jobs: Sequence[PendingJob]) -> None:
        """At start-up: everything that waits."""
        for job in jobs:
            self._queue(job)

    def on_event(self, event: Event) -> None:
        """A committed change of the graph."""
        if isinstance(event, JobQueued):
            self._queue(event.job)
        elif isinstance(event, JobUnqueued):
            self._unqueue(event.job_id)
        elif isinstance(event, AssignmentClosed):
            self._closed(event.assignment_id)
        elif isinstance(event, AbortWanted):
            assignment = self.pool.assignments.get(event.assignment_id)
            if assignment is not None:
                assignment.unwanted = True
            self._members.abort_wanted(event.assignment_id)

    def _queue(self, job: PendingJob) -> None:
        """The job can be assigned; replaces what was known of it."""
        assignment = self.pool.by_job.get(job.job_id)
        if assignment is not None:
            # Committed before the assignment, or told before its end: the end looks it up.
            assignment.requeued = True
            return
        known = self.tracker.members.get(job.job_id)
        if known is not None and known.cluster == job.cluster:
            # Told again: it never left, and does not begin to wait anew.
            self.tracker.members[job.job_id] = job
            self._members.arrived(job)
            return
        self._unqueue(job.job_id)
        self.dispatcher.lost.pop(job.job_id, None)
        history: HistoryPrediction | None = NO_HISTORY
        if self._histories is not None:
            # A member's is loaded too, for the memory that its seat reserves.
            history = self._histories.look(job)
        tracked = self.tracker.add(job, self._clock.now(), history)
        if tracked is None:
            if job.cluster is not None:
                self._members.arrived(job)
            self.loops.due_changed.set()
            return
        if not self.ranking.holds_unscored(job.kind):
            self._kick_for(tracked)
        if job.job_id in self.tracker.tables[job.kind]:
            self.offers.offer_new(tracked)
            self.loops.offers_changed.set()

    def _unqueue(self, job_id: str) -> None:
        if job_id in self.tracker.members:
            self._members.left(job_id)
        job = self.tracker.get(job_id)
        if self._histories is not None and job is not None:
            self._histories.forget(job)
        tracked = self.tracker.remove(job_id)
        if tracked is not None:
            self.offers.withdraw(tracked)
            self.loops.offers_changed.set()

    def set_history(self, job_id: str, history: HistoryPrediction) -> None:
        """A prediction was loaded: a job that waited for it may be assigned from now on."""
        tracked = self.tracker.candidate(job_id)
        if tracked is None or not self.tracker.tables[tracked.job.kind].set_history(job_id, history):
            return
        kind = tracked.job.kind
        if not self.ranking.holds_unscored(kind):
            self._kick_for(tracked)
            return
        for worker_id in tuple(tracked.offered_to):
            # Scored meanwhile, perhaps.
            if tracked.row >= 0 and worker_id in self.pool.waiting[kind]:
                self.dispatcher.try_assign(self.pool.workers[worker_id], kind)

    def set_windows(self, windows: InstanceContext) -> None:
        """Swaps in what the instance has measured."""
        self.pool.set_windows(windows)

    def _kick_for(self, tracked: Tracked) -> None:
        """A new job that needs no score: workers that wait may take it now."""
        self.pool.intern_fresh()
        kind = tracked.job.kind
        tried = 0
        for worker_id in tuple(self.pool.waiting[kind]):
            worker = self.pool.workers[worker_id]
            if tried == OFFER_WORKERS or tracked.row < 0:
                return
            if worker.eligible[tracked.requirement_id]:
                tried += 1
                self.dispatcher.try_assign(worker, kind)

    def _closed(self, assignment_id: str) -> None:
        assignment = self.pool.remove(assignment_id)
        if assignment is None:
            return
        if self._histories is not None and assignment.job is not None:
            self._histories.ended(assignment.job)
        if assignment.requeued:
            self.loops.look_up(assignment.job_id)
        worker = self.pool.workers.get(assignment.worker_id)
        if worker is not None:
            # Its RequestJob may have come before the report was committed, or waited for memory.
            for kind in JobKind:
                if worker.slots[kind].ready:
                    self._answer_wish(worker, kind)

    # Who works

    def worker_connected(
        self, worker: WorkerInfo, outbox: Outbox, open_assignments: Sequence[AssignedJob]
    ) -> None:
        """A session has resumed (ResumeAck is sent) and goes on with these assignments, and no others."""
        self.worker_disconnected(worker.id)
        state = Worker(worker, outbox)
        self.pool.connect(state)
        _warn_of(state, state.newly_doubted())
        adopted = {one.assignment_id for one in open_assignments}
        for known in self.pool.of_worker(worker.id):
            if known.assignment_id not in adopted and known.state in _RESUMED:
                self.pool.remove(known.assignment_id)
        for one in open_assignments:
            self._adopt(worker, one)
        self._members.worker_changed(state)

    def _adopt(self, worker: WorkerInfo, one: AssignedJob) -> None:
        known = self.pool.assignments.get(one.assignment_id)
        if known is not None:
            # Listing is acceptance.
            known.state = AssignmentState.ACCEPTED
            known.answered = True
            self.pool.adopt(known)
            return
        other = self.pool.by_job.get(one.job_id)
        if other is not None:
            self.pool.remove(other.assignment_id)
        self._unqueue(one.job_id)
        self.pool.add(
            Assignment(
                assignment_id=one.assignment_id,
                job_id=one.job_id,
                kind=one.kind,
                name=one.name,
                worker_id=worker.id,
                worker_name=worker.name,
                state=AssignmentState.ACCEPTED,
                assigned_at=self._clock.monotonic(),
                job=one.job,
                stage=one.stage,
                answered=True,
                ram_reserved_mb=self._adopted_ram_mb(one),
                cluster_attempt=one.cluster_attempt,
            )
        )

    def _adopted_ram_mb(self, one: AssignedJob) -> float:
        if one.ram_reserved_mb is not None:
            return one.ram_reserved_mb
        return self.dispatcher.instance().unmeasured_build_ram_mb if one.kind is JobKind.BUILD else 0.0

    def observed_peaks_mb(self, worker_id: str) -> dict[str, int]:
        """The memory (MB) that the worker's builds were last seen with, by assignment; of those measured."""
        return {
            one.assignment_id: math.ceil(one.ram_observed_mb)
            for one in self.pool.of_worker(worker_id)
            if one.kind is JobKind.BUILD and one.ram_observed_mb is not None
        }

    def worker_disconnected(self, worker_id: str) -> None:
        """The session ended. What the worker has stays assigned, for the grace."""
        worker = self.pool.disconnect(worker_id)
        if worker is not None:
            self.dispatcher.waiting.end_worker(worker_id)
            self.offers.close(worker)
            self._members.worker_disconnected(worker_id)

    def worker_lost(self, worker_id: str) -> None:
        """The grace is over. The graph requeues what was lost; here it holds nothing any more."""
        if worker_id in self.pool.workers:
            return
        for assignment in self.pool.of_worker(worker_id):
            if assignment.state is not AssignmentState.CLAIMING and assignment.cluster_attempt is None:
                self._closed(assignment.assignment_id)
        self._members.worker_lost(worker_id)

    def update_capabilities(self, worker_id: str, capabilities: WorkerCapabilities) -> None:
        """The host has changed."""
        worker = self.pool.workers.get(worker_id)
        if worker is not None:
            self._update(worker, replace(worker.info, capabilities=capabilities))

    def update_projects(self, worker_id: str, projects: frozenset[str] | None) -> None:
        """A re-authentication changed whom the worker serves. None: every project."""
        worker = self.pool.workers.get(worker_id)
        if worker is not None:
            self._update(worker, replace(worker.info, projects=projects))

    def _update(self, worker: Worker, info: WorkerInfo) -> None:
        self.pool.update(worker, info)
        _warn_of(worker, worker.newly_doubted())
        self.offers.prune(worker)
        self.loops.offers_changed.set()
        self._members.worker_changed(worker)
        for kind in JobKind:
            self.dispatcher.try_assign(worker, kind, widen=True)

    def heartbeat(self, worker_id: str, metrics: WorkerMetrics) -> None:
        """Live figures."""
        worker = self.pool.workers.get(worker_id)
        if worker is not None:
            worker.heartbeat(metrics)
            self.pool.sampled()
            _warn_of(worker, worker.newly_doubted(metrics))

    def stage(self, assignment_id: str, stage: JobStage) -> None:
        """A build job entered a stage."""
        self.pool.set_stage(assignment_id, stage)

    def draining(self, worker_id: str, reason: str) -> None:
        """The worker gets no more jobs; what runs goes on."""
        worker = self.pool.workers.get(worker_id)
        if worker is None:
            return
        worker.draining = reason
        self.dispatcher.waiting.end_worker(worker_id)
        self.offers.empty(worker)
        for kind in JobKind:
            self.pool.settle(worker, kind)
        self._members.worker_changed(worker)
        self.loops.offers_changed.set()

    def undrain(self, worker_id: str) -> None:
        """The worker gets jobs again: what it asked for while it was drained stands."""
        worker = self.pool.workers.get(worker_id)
        if worker is None:
            return
        worker.draining = None
        self._members.worker_changed(worker)
        for kind in JobKind:
            self.pool.settle(worker, kind)
            if worker.slots[kind].ready:
                self._answer_wish(worker, kind)

    # What workers ask and answer

    def request_job_list(self, worker_id: str) -> None:
        """The worker's window anew, filled up."""
        worker = self.pool.workers.get(worker_id)
        if worker is None:
            return
        if worker.draining is None:
            for kind in JobKind:
                self.dispatcher.offer_next(worker, kind, WINDOW_ENOUGH)
        self._members.list_requested(worker)
        self.offers.list_requested(worker)
        self.loops.offers_changed.set()

    def candidate_scores(self, worker_id: str, message: CandidateScores) -> None:
        """The worker scored candidates: a build that waited for it may be assigned."""
        worker = self.pool.workers.get(worker_id)
        if worker is None:
            return
        for kind, window in worker.windows.items():
            scored = [window.score(score) for score in message.scores]
            if any(scored):
                self.dispatcher.try_assign(worker, kind)
        if worker.members_offered:
            self._members.scored(worker_id, message.scores)

    def request_job(self, worker_id: str, kind: JobKind) -> None:
        """A slot is free at the worker. Ignored while an AssignJob of the kind is unanswered."""
        worker = self.pool.workers.get(worker_id)
        if worker is None:
            return
        slots = worker.slots[kind]
        if slots.outstanding is not None:
            return
        slots.wish = True
        self.pool.settle(worker, kind)
        self._answer_wish(worker, kind)

    def _answer_wish(self, worker: Worker, kind: JobKind) -> None:
        """A job for a worker that asks, or more candidates and an idle slot on record."""
        slots = worker.slots[kind]
        if not self.dispatcher.try_assign(worker, kind, widen=True) and slots.ready:
            now = self._clock.monotonic()
            slots.idle_since = now if slots.idle_since is None else slots.idle_since
            slots.idle_seen = now
            self._members.slot_idle(worker.id, kind)
        self.loops.offers_changed.set()

    def answer_arrived(self, worker_id: str, response: AssignJobResponse) -> None:
        """For the reader, before it queues the answer: the RequestJob right behind it is heard then."""
        self.loops.note_answer(self.dispatcher.answer_arrived(worker_id, response))

    async def assignment_answered(self, worker_id: str, response: AssignJobResponse) -> None:
        """Commits the worker's answer, which `answer_arrived` may have noted already."""
        assignment = self.loops.take_answer(response.assignment_id)
        if assignment is None:
            assignment = self.dispatcher.answer_arrived(worker_id, response)
        if assignment is not None:
            await self.dispatcher.store_answer(assignment, response)

    def take_acceptance(self, worker_id: str, response: AssignJobResponse) -> bool:
        """For a caller that stores an acceptance itself, with the reports behind it: whether it is to.

        Not for rejections, and not for members of clusters.
        """
        noted = self.loops.take_answer(response.assignment_id)
        return noted is not None or self.dispatcher.answer_arrived(worker_id, response) is not None

    # Seats of members: only their desk calls these

    def take_seats(self, assignments: Sequence[Assignment]) -> bool:
        """Takes all of these slots and their jobs in one step; nothing, if one went busy meanwhile."""
        for one in assignments:
            worker = self.pool.workers.get(one.worker_id)
            if worker is None or worker.draining is not None or self.dispatcher.stopping:
                return False
            if not worker.slots[one.kind].ready or one.job_id in self.pool.by_job:
                return False
        for one in assignments:
            one.ram_reserved_mb = self._seat_ram_mb(one.job)
            self.tracker.remove(one.job_id)
            if self._histories is not None and one.job is not None:
                self._histories.forget(one.job)
            self.pool.add(one)
        return True

    def _seat_ram_mb(self, job: PendingJob | None) -> float:
        if job is None:
            return 0.0
        history = NO_HISTORY if self._histories is None else self._histories.known(job)
        unmeasured_mb = self.dispatcher.instance().unmeasured_build_ram_mb
        return RamNeed.of(job, history, outputs_present=False, unmeasured_mb=unmeasured_mb).reserved_mb

    def free_seat(self, assignment_id: str, *, unsent: bool) -> None:
        """The seat is free again. `unsent`: the worker was not told of it, and still waits."""
        assignment = self.pool.assignments.get(assignment_id)
        worker = None if assignment is None else self.pool.workers.get(assignment.worker_id)
        unsent = unsent and worker is not None and assignment_id in worker.assigned
        if unsent and worker is not None and assignment is not None:
            worker.slots[assignment.kind].wish = True
        self._closed(assignment_id)

    # Running and asking

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The loops. A crash of one ends all, and with them the server: never silence."""
        await self.loops.run(task_status=task_status)

    def drain(self) -> None:
        """The server stops: no new assignments."""
        self.dispatcher.stopping = True

    @property
    def idle_slots(self) -> list[IdleSlot]:
        """The slots that were found idle, fresh ones alone: what a placement may use."""
        return self.pool.idle_slots(self._clock.monotonic())

    def why(self, job_id: str) -> WhyAnswer:
        """Why the job waits, or why it went where it went."""
        return explain(
            job_id,
            tracker=self.tracker,
            pool=self.pool,
            ranking=self.ranking,
            instance=self.dispatcher.instance(),
            now=self._clock.now(),
            monotonic=self._clock.monotonic(),
        )

    def recent_decisions(self) -> list[Decision]:
        """The last 200 decisions, the newest first."""
        return self.decisions.newest_first()

    def snapshot(self) -> PoolSnapshot:
        """Workers, slots, stages, lengths of queues."""
        return take_snapshot(self.tracker, self.pool, self._clock.monotonic())


def _warn_of(worker: Worker, figures: Mapping[str, float]) -> None:
    """One line for what a worker says of itself and cannot be; each counts as unknown."""
    if figures:
        log.warning("figures that cannot be true are left out", worker=worker.info.name, figures=figures)
