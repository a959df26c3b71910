"""The one shell of cluster jobs: the scheduler's desk for members, committed changes, the loops.

Attempts are driven by `executor`, their members spoken to by `sessions`; what waits is in the book, and
planned by `passes`. What it decides, it decides in memory and at once.
"""

from collections.abc import Sequence

import structlog
import trio
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind
from gradient_protocol.limits import REJECTED_JOB_SECS
from gradient_protocol.messages.worker import AssignJobResponse, CandidateScore

from gradient_server.clock import Clock
from gradient_server.cluster import events as e
from gradient_server.cluster import instructions as i
from gradient_server.cluster.attempts import Attempt, Attempts, SeatRecord
from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.continuation import Continuation
from gradient_server.cluster.executor import Executor
from gradient_server.cluster.figures import ClusterFigures, take_figures
from gradient_server.cluster.floor import Floor
from gradient_server.cluster.loader import ClusterLoader
from gradient_server.cluster.offers import MemberOffers
from gradient_server.cluster.passes import Passes
from gradient_server.cluster.reservation import Release
from gradient_server.cluster.reserver import Reserver
from gradient_server.cluster.seating import Seating
from gradient_server.cluster.settings import UNCONFIRMED_ABORT_SECS, ClusterSettings
from gradient_server.cluster.signals import AdoptedMember, MemberSessions
from gradient_server.cluster.states import Seat
from gradient_server.cluster.store import ClusterStore
from gradient_server.cluster.why import ClusterWhy, explain_cluster
from gradient_server.domain.events import (
    Bus,
    ClusterChanged,
    ClusterQueued,
    Event,
    MemberReported,
)
from gradient_server.domain.job import PendingJob
from gradient_server.domain.status import ClusterStatus
from gradient_server.scheduler.model import Assignment
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scheduler.worker import Worker

__all__ = ["ClusterRunner"]

log = structlog.get_logger(__name__)


class ClusterRunner:
    """Made once by the composition root, after the scheduler; `load` before its loops run.

    It is the scheduler's `MemberDesk` and the executor's `AttemptWatcher`.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        store: ClusterStore,
        bus: Bus,
        clock: Clock,
        ids: IdSource,
        settings: ClusterSettings,
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._store = store
        self._bus = bus
        self._clock = clock
        self.settings = settings
        self.book = ClusterBook()
        self.floor = Floor()
        self.reserver = Reserver(scheduler=scheduler, store=store, clock=clock, settings=settings)
        self.desk = self.reserver.desk
        self.backfill_secs = self.reserver.backfill_secs
        self.offers = MemberOffers(self.book, self.floor, scheduler)
        self.executor = Executor(
            scheduler=scheduler, store=store, bus=bus, clock=clock, settings=settings, watcher=self
        )
        self.sessions = MemberSessions(
            scheduler=scheduler,
            store=store,
            executor=self.executor,
            is_connected=self.floor.__contains__,
        )
        self.seating = Seating(
            book=self.book,
            floor=self.floor,
            offers=self.offers,
            executor=self.executor,
            scheduler=scheduler,
            ids=ids,
        )
        self.passes = Passes(
            book=self.book,
            floor=self.floor,
            scheduler=scheduler,
            executor=self.executor,
            reserver=self.reserver,
            seating=self.seating,
            offers=self.offers,
            clock=clock,
        )
        self.continuation = Continuation(
            book=self.book,
            executor=self.executor,
            scheduler=scheduler,
            store=store,
            clock=clock,
            is_connected=self.floor.__contains__,
        )
        self.loader = ClusterLoader(
            book=self.book,
            attempts=self.executor.attempts,
            scheduler=scheduler,
            store=store,
            clock=clock,
            changed=self.deadline_set,
        )
        self.prepares_failed = 0
        self.attempts_started = 0
        scheduler.set_members(self)
        bus.subscribe(self.on_event)

    @property
    def attempts(self) -> Attempts:
        """Those that are under way, stopping survivors included."""
        return self.executor.attempts

    # Start

    async def load(self) -> None:
        """At start-up, before any session: clusters that have not ended, and attempts that go on."""
        await self.continuation.load()

    async def take_up(self) -> bool:
        """After this instance succeeded another one: the attempts that it has now.

        False: not all, for a cluster has a seat or a survivor of an earlier attempt here; try again soon.
        """
        return await self.continuation.take_up()

    def awaited_workers(self) -> list[str]:
        """The workers of all attempts under way: those that are not connected have a grace to come back."""
        return list(dict.fromkeys(seat.worker_id for one in self.attempts for seat in one.seats.values()))

    # The scheduler's desk for members

    def arrived(self, job: PendingJob) -> None:
        """A member joins the book."""
        now = self._clock.monotonic()
        due_at = 0.0 if job.not_before is None else now + (job.not_before - self._clock.now())
        self.book.arrive(job, now, due_at)
        assert job.cluster is not None
        entry = self.book.get(job.cluster)
        if entry is None:
            self.loader.load_soon(job.cluster)
        elif entry.is_complete:
            self.passes.want()

    def left(self, job_key: str) -> None:
        """A member is not able to start any more: its cluster is held back."""
        self.book.leave(job_key)
        self.offers.withdraw(job_key)
        self.passes.want()

    def answered(self, assignment: Assignment, response: AssignJobResponse) -> None:
        """Accepted and held, or rejected."""
        one = assignment.assignment_id
        if response.accepted:
            self.executor.member_event(e.Accepted(one))
        else:
            reason = f"{assignment.worker_name} rejected: {response.reason or 'no reason given'}"
            self.executor.member_event(e.Rejected(one, reason))

    def unanswered(self, assignment: Assignment, reason: str) -> None:
        """Counts as rejected."""
        reason = f"{assignment.worker_name}: {reason}"
        self.executor.member_event(e.Rejected(assignment.assignment_id, reason))

    def unreadable(self, assignment_id: str, reason: str) -> None:
        """The worker cannot read the job: counts as rejected (protocol.md, Reports)."""
        self.executor.member_event(e.Rejected(assignment_id, f"the worker cannot read the job: {reason}"))

    def abort_wanted(self, assignment_id: str) -> None:
        """One that is not confirmed within 300 s makes the member a loss."""
        attempt = self.attempts.of_assignment(assignment_id)
        if attempt is not None:
            seat = attempt.seats[assignment_id]
            seat.abort_due = seat.abort_due or self._clock.monotonic() + UNCONFIRMED_ABORT_SECS
            self.passes.want()

    def worker_changed(self, worker: Worker) -> None:
        """A column of the floor."""
        self.floor.connect(worker.info)
        self.floor.take_jobs(worker.id, takes=worker.draining is None)
        for _, seat in self.attempts.at_worker(worker.id):
            seat.worker_name = worker.info.name
            seat.endpoint = worker.info.capabilities.endpoint
        if worker.draining is not None:
            self.offers.forget_worker(worker)
        self.passes.want()

    def worker_disconnected(self, worker_id: str) -> None:
        """What was not started at it has no grace."""
        self.floor.disconnect(worker_id)
        self.offers.worker_left(worker_id)
        for attempt, seat in self.attempts.at_worker(worker_id):
            self.sessions.left(seat)
            self.executor.feed(attempt, e.Disconnected(seat.assignment_id))
        if worker_id in self.desk.workers:
            self.passes.want()

    def worker_lost(self, worker_id: str) -> None:
        """The grace is over: whoever has not reported is lost."""
        for attempt, seat in self.attempts.at_worker(worker_id):
            reason = f"{seat.worker_name} did not come back"
            self.executor.feed(attempt, e.MemberLost(seat.assignment_id, reason))

    def slot_idle(self, worker_id: str, kind: JobKind) -> None:
        """A seat for whoever waits."""
        del worker_id, kind
        if self.book.has_waiting:
            self.passes.want()

    def list_requested(self, worker: Worker) -> None:
        """What was offered is offered again."""
        self.offers.forget_worker(worker, tell=False)
        if self.book.has_waiting:
            self.passes.want()

    def scored(self, worker_id: str, scores: Sequence[CandidateScore]) -> None:
        """What each seat would have to fetch."""
        for score in scores:
            if score.job_id in self.book:
                self.floor.score(worker_id, score.job_id, score.missing_nar_size)

    # Sessions, reports and committed changes

    def worker_resumed(self, worker_id: str, adopted: list[AdoptedMember], lost: list[str]) -> None:
        """After ResumeAck: the members that it adopted, and those that the worker has no more."""
        self.sessions.resumed(worker_id, adopted, lost)

    def final_report(self, assignment_id: str) -> None:
        """A final report was acknowledged. Of a survivor: it has ended, and nothing else follows."""
        attempt = self.attempts.of_assignment(assignment_id)
        if attempt is not None and attempt.machine.seats[assignment_id] is Seat.STOPPING:
            self.executor.feed(attempt, e.ReportStored(assignment_id))

    def on_event(self, event: Event) -> None:
        """Committed changes of clusters and their members."""
        if isinstance(event, ClusterQueued):
            self.book.learn(event.cluster, self._clock.monotonic())
            self.passes.want()
        elif isinstance(event, ClusterChanged):
            self._cluster_changed(event)
        elif isinstance(event, MemberReported):
            self._reported(event.assignment_id)
        else:
            self.sessions.on_event(event)

    def _cluster_changed(self, event: ClusterChanged) -> None:
        attempt = self.attempts.of_cluster(event.cluster_id)
        if not event.status.is_final:
            self.book.set_status(event.cluster_id, event.status)
        elif attempt is None:
            self.book.forget(event.cluster_id)
        else:
            # While its members stop it may be Queued once more, which is then what counts.
            self.book.set_status(event.cluster_id, event.status)
            self.executor.feed(attempt, e.ClosedElsewhere(f"the cluster is {event.status}"))
        self.passes.want()

    def _reported(self, assignment_id: str) -> None:
        attempt = self.attempts.of_assignment(assignment_id)
        if attempt is None:
            return
        # The worker gave the slot back when it sent the report.
        self._scheduler.free_seat(assignment_id, unsent=False)
        name = attempt.seats[assignment_id].worker_name
        self.executor.feed(attempt, e.ReportStored(assignment_id, f"{name} ended it before the start"))

    # What the executor tells

    def rejected(self, attempt: Attempt, seat: SeatRecord) -> None:
        """The worker does not get this member again for a while."""
        attempt.rejecting = attempt.rejecting or seat.worker_id
        worker = self._pool.workers.get(seat.worker_id)
        if worker is not None:
            worker.excluded[seat.member.job_key] = self._clock.monotonic() + REJECTED_JOB_SECS

    def started(self, attempt: Attempt) -> None:
        """The cluster is Running: its reservation ends, and its aging."""
        self.attempts_started += 1
        self.book.started(attempt.cluster_id)
        self.book.set_status(attempt.cluster_id, ClusterStatus.RUNNING)
        self.reserver.release_of(attempt.cluster_id, Release.STARTED)
        log.info(
            "a cluster started",
            cluster=attempt.cluster_id,
            attempt=attempt.id,
            members=len(attempt.seats),
            after_secs=round(self._clock.monotonic() - attempt.planned_at, 4),
        )

    def start_member(self, attempt: Attempt, seat: SeatRecord) -> None:
        """StartCluster, now or after the resume."""
        self.sessions.start(attempt, seat)

    def deadline_set(self) -> None:
        """The loop of the passes looks at the time anew."""
        self.passes.want()

    def finished(self, attempt: Attempt, finish: i.Finish) -> None:
        """Back to the book, or out of it."""
        now = self._clock.monotonic()
        if finish.ending is i.Ending.RETRY:
            self.book.set_status(attempt.cluster_id, ClusterStatus.QUEUED)
        elif finish.ending is i.Ending.PREPARE_FAILED:
            self.prepares_failed += 1
            self.desk.prepare_failed(attempt.cluster_id, attempt.rejecting, now)
        elif finish.ending is i.Ending.CLAIM_LOST:
            # Back to the assignment passes, which read their cluster anew: at the next tick, for what
            # is in the way now may be for a moment longer.
            for seat in attempt.seats.values():
                self._scheduler.dispatcher.lost[seat.member.job_key] = None
            self.loader.load_soon(attempt.cluster_id)
        self.book.give_back(attempt.cluster_id, finish.ending, finish.reason, now)
        log.info(
            "a cluster attempt is over",
            cluster=attempt.cluster_id,
            attempt=attempt.id,
            ending=str(finish.ending),
            reason=finish.reason,
        )
        self.passes.want()

    # For people

    def explain(self, cluster_id: str) -> ClusterWhy:
        """Why the cluster waits, or where its attempt stands."""
        return explain_cluster(
            cluster_id,
            book=self.book,
            floor=self.floor,
            desk=self.desk,
            attempt=self.attempts.of_cluster(cluster_id),
            pool=self._pool,
            now=self._clock.monotonic(),
        )

    def figures(self) -> ClusterFigures:
        """What clusters do now, in numbers."""
        return take_figures(
            self.book,
            self.attempts,
            self.desk,
            self._clock.monotonic(),
            started=self.attempts_started,
            prepares_failed=self.prepares_failed,
            signals_forwarded=self.sessions.signals_forwarded,
            signals_dropped=self.sessions.signals_dropped,
        )

    # Loops

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """All loops. A crash of one, or of a transaction, ends all, and with them the server."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.executor.run)
            nursery.start_soon(self.sessions.run)
            nursery.start_soon(self.reserver.rows.run)
            nursery.start_soon(self.loader.run)
            if self._store.is_shared:
                nursery.start_soon(self.loader.run_refreshes)
            nursery.start_soon(self.passes.run)
            task_status.started()
