"""Executes what the machines say and feeds the results back: the attempts' way to workers and database.

Transactions run as tasks of their own, and their results come back as events. The result of a
transaction reaches the machine before what was published with it, so that a machine knows its own
doing.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import structlog
import trio
from gradient_protocol.messages.server import AbortCluster, AssignJob, StartCluster
from gradient_protocol.messages.shapes import ClusterSeat

from gradient_server.clock import Clock
from gradient_server.cluster import events as e
from gradient_server.cluster import instructions as i
from gradient_server.cluster.attempts import Attempt, Attempts, SeatRecord
from gradient_server.cluster.settings import SURVIVORS_SECS, ClusterSettings
from gradient_server.cluster.states import AttemptState
from gradient_server.cluster.store import ClusterStore, MemberClaim
from gradient_server.domain.events import Bus, ClusterChanged
from gradient_server.domain.status import ClusterStatus
from gradient_server.scheduler.model import AssignmentState
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scheduler.signal import Signal

__all__ = ["AttemptWatcher", "Executor"]

log = structlog.get_logger(__name__)


class AttemptWatcher(Protocol):
    """Whoever keeps the book of the clusters."""

    def rejected(self, attempt: Attempt, seat: SeatRecord) -> None:
        """A member fell out before the start, by its worker's doing."""
        ...

    def started(self, attempt: Attempt) -> None:
        """The start is committed; the members are told right after."""
        ...

    def start_member(self, attempt: Attempt, seat: SeatRecord) -> None:
        """Tell the member."""
        ...

    def finished(self, attempt: Attempt, finish: i.Finish) -> None:
        """Nothing of the attempt is left."""
        ...

    def deadline_set(self) -> None:
        """A timer was started."""
        ...


class Executor:
    """Drives every attempt that is under way."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        store: ClusterStore,
        bus: Bus,
        clock: Clock,
        settings: ClusterSettings,
        watcher: AttemptWatcher,
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._store = store
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._watcher = watcher
        self.attempts = Attempts()
        self._work: deque[tuple[Attempt, i.Persist]] = deque()
        self._work_wanted = Signal()

    def begin(self, attempt: Attempt, instructions: Sequence[i.Instruction]) -> None:
        """A new attempt, or one that is taken up again, with the first instructions of its machine."""
        self.attempts.add(attempt)
        self._execute(attempt, instructions)

    def member_event(self, event: e.MemberEvent) -> None:
        """Something happened to an assignment; nothing follows if it is of no attempt here."""
        attempt = self.attempts.of_assignment(event.assignment_id)
        if attempt is not None:
            self.feed(attempt, event)

    def feed(self, attempt: Attempt, event: e.Event) -> None:
        """One event, and everything that follows from it at once."""
        machine = attempt.machine
        instructions = machine.handle(event)
        if isinstance(event, e.Rejected | e.ReportStored) and machine.state is AttemptState.FAILING:
            self._watcher.rejected(attempt, attempt.seats[event.assignment_id])
        elif isinstance(event, e.StartCommitted) and machine.started:
            self._watcher.started(attempt)
        self._execute(attempt, instructions)

    def send(self, worker_id: str, message: AssignJob | StartCluster | AbortCluster) -> None:
        """To the worker's session, if there is one; what it missed it learns at its resume."""
        worker = self._pool.workers.get(worker_id)
        if worker is not None:
            worker.outbox.send(message)

    def _execute(self, attempt: Attempt, instructions: Sequence[i.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, i.Persist):
                self._work.append((attempt, instruction))
                self._work_wanted.set()
            elif isinstance(instruction, i.SendAssign):
                self._assign(attempt, attempt.seats[instruction.assignment_id])
            elif isinstance(instruction, i.SendStart):
                self._watcher.start_member(attempt, attempt.seats[instruction.assignment_id])
            elif isinstance(instruction, i.SendAbort):
                seat = attempt.seats[instruction.assignment_id]
                self.send(seat.worker_id, AbortCluster(attempt=attempt.id, reason=instruction.reason))
            elif isinstance(instruction, i.Release):
                self._scheduler.free_seat(instruction.assignment_id, unsent=instruction.unsent)
            elif isinstance(instruction, i.StartTimer):
                self._start_timer(attempt, instruction.timer)
            elif isinstance(instruction, i.StopTimer):
                attempt.timer = attempt.deadline = None
            else:
                self.attempts.remove(attempt)
                self._watcher.finished(attempt, instruction)

    def _start_timer(self, attempt: Attempt, timer: i.Timer) -> None:
        secs = self._settings.prepare_timeout_secs if timer is i.Timer.PREPARE else SURVIVORS_SECS
        attempt.timer = timer
        attempt.deadline = self._clock.monotonic() + secs
        self._watcher.deadline_set()

    def _assign(self, attempt: Attempt, seat: SeatRecord) -> None:
        assignment = self._pool.assignments[seat.assignment_id]
        job, seat.wire_job = seat.wire_job, None
        assert job is not None
        assignment.state = AssignmentState.SENT
        assignment.sent_at = self._clock.monotonic()
        member = seat.member
        self.send(
            seat.worker_id,
            AssignJob(
                job_id=member.job_key,
                assignment_id=seat.assignment_id,
                job=job,
                cluster=ClusterSeat(
                    attempt=attempt.id,
                    role=member.role,
                    index=member.index,
                    hold_secs=self._settings.hold_secs,
                ),
            ),
        )

    # Timers

    def expire(self, now: float) -> None:
        """Timers that have run out: prepares, survivors, aborts that nobody confirmed."""
        for attempt in self.attempts:
            if attempt.deadline is not None and attempt.deadline <= now:
                timer, attempt.timer, attempt.deadline = attempt.timer, None, None
                if timer is i.Timer.PREPARE:
                    late = ", ".join(seat.worker_name for seat in attempt.awaited())
                    log.info("a prepare timed out", cluster=attempt.cluster_id, waited_for=late)
                    self.feed(attempt, e.PrepareTimedOut())
                else:
                    self.feed(attempt, e.SurvivorsTimedOut())
            for seat in attempt.seats.values():
                if seat.abort_due is not None and seat.abort_due <= now:
                    seat.abort_due = None
                    reason = f"{seat.worker_name} did not confirm an abort"
                    self.member_event(e.MemberLost(seat.assignment_id, reason))

    # Transactions

    @property
    def has_work(self) -> bool:
        """Whether transactions wait to be begun."""
        return bool(self._work)

    async def work_one(self) -> None:
        """Begins and ends the next transaction. For `run`, and for tests."""
        await self._persist(*self._work.popleft())

    async def _persist(self, attempt: Attempt, instruction: i.Persist) -> None:
        # Not cancellable: a commit that nobody hears of would hold its seats until a restart.
        with trio.CancelScope(shield=True):
            if isinstance(instruction, i.PersistClaim):
                await self._claim(attempt)
            elif isinstance(instruction, i.PersistStart):
                seats = [(seat.assignment_id, seat.worker_id) for seat in attempt.seats.values()]
                started = await self._store.start(attempt.id, seats)
                self.feed(attempt, e.StartCommitted() if started else e.StartLost())
                if started:
                    self._bus.publish([ClusterChanged(attempt.cluster_id, ClusterStatus.RUNNING)])
            elif isinstance(instruction, i.PersistPrepareFailed):
                events = await self._store.fail_prepare(attempt.id, instruction.reason)
                self.feed(attempt, e.PrepareClosed())
                self._bus.publish(events)
            elif isinstance(instruction, i.PersistSurvivorsEnded):
                await self._store.survivors_ended(attempt.id)
            else:
                verdict, events = await self._store.settle(attempt.id, dict(instruction.lost))
                self.feed(attempt, e.Undecided() if verdict is None else e.Settled(verdict))
                self._bus.publish(events)

    async def _claim(self, attempt: Attempt) -> None:
        seats = list(attempt.seats.values())
        claims = [self._member_claim(seat) for seat in seats]
        jobs = await self._store.claim(attempt.id, attempt.cluster_id, claims)
        if jobs is None:
            self.feed(attempt, e.ClaimLost())
            return
        for seat, job in zip(seats, jobs, strict=True):
            seat.wire_job = job
            unfit = self._unfit(seat)
            if unfit is not None:
                self.feed(attempt, e.MemberLost(seat.assignment_id, unfit))
        self.feed(attempt, e.Claimed())

    def _member_claim(self, seat: SeatRecord) -> MemberClaim:
        assignment = self._pool.assignments.get(seat.assignment_id)
        return MemberClaim(
            assignment_id=seat.assignment_id,
            member=seat.member,
            worker_id=seat.worker_id,
            missing_nar_size=None if assignment is None else assignment.missing_nar_size,
            dependency_count=None
            if assignment is None or assignment.job is None
            else assignment.job.dependency_count,
        )

    def _unfit(self, seat: SeatRecord) -> str | None:
        """Why the seat cannot be used although it is claimed: the world went on meanwhile."""
        worker = self._pool.workers.get(seat.worker_id)
        assignment = self._pool.assignments.get(seat.assignment_id)
        if worker is None or assignment is None or seat.assignment_id not in worker.assigned:
            return f"{seat.worker_name} left"
        if worker.draining is not None:
            return f"{seat.worker_name} is draining"
        if assignment.unwanted:
            return "an abort was requested"
        return "the server is stopping" if self._scheduler.dispatcher.stopping else None

    def deadlines(self) -> list[float]:
        """When something runs out, on the monotonic clock."""
        times = [attempt.deadline for attempt in self.attempts if attempt.deadline is not None]
        for attempt in self.attempts:
            times += [seat.abort_due for seat in attempt.seats.values() if seat.abort_due is not None]
        return times

    async def run(self) -> None:
        """Begins transactions, for ever; one that fails ends it."""
        async with trio.open_nursery() as nursery:
            while True:
                while self._work:
                    nursery.start_soon(self._persist, *self._work.popleft())
                await self._work_wanted.wait()
