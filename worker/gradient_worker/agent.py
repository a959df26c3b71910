"""The agent's state and what it decides, apart from sessions: jobs, slots, holds, the drain.

Everything here is decided synchronously; tasks (jobs, sessions, timers) call in and are told. One
agent has at most one session, through `link`.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog
import trio
from gradient_protocol.kinds import FailureKind, JobKind, ResumeState
from gradient_protocol.messages.common import Draining
from gradient_protocol.messages.server import AssignJob, ClusterSignal, StartCluster
from gradient_protocol.messages.shapes import BuildJob, Started
from gradient_protocol.messages.worker import JobUpdate, RequestJob, WorkerCapabilities

from gradient_worker.executor.execute import execute
from gradient_worker.executor.failure import Failure, failure
from gradient_worker.executor.job import Job, Member, Phase, Stop, StopCause
from gradient_worker.executor.outputs import all_paths
from gradient_worker.executor.reporter import Reporter
from gradient_worker.executor.spans import SpanLog
from gradient_worker.executor.workshop import Workshop
from gradient_worker.holds import Abort, Drop, Holds, Release, Run
from gradient_worker.identity import Peers
from gradient_worker.jobs import Jobs
from gradient_worker.journal_keeper import Recovered
from gradient_worker.logs import LogShipper
from gradient_worker.member_signals import Receipt
from gradient_worker.runner.values import build_directory
from gradient_worker.slots import Slots
from gradient_worker.wakeup import Wakeup

__all__ = ["Agent", "WorkerFacts"]

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a session tells of this worker. `incarnation` is made at each start of the agent."""

    worker_id: str
    name: str
    incarnation: str
    capabilities: WorkerCapabilities


class Agent:
    """One worker. `nursery` runs its jobs and outlives sessions; `clean` removes what a job left on disk."""

    def __init__(
        self,
        *,
        facts: WorkerFacts,
        shop: Workshop,
        nursery: trio.Nursery,
        clean: Callable[[Job], Awaitable[None]],
    ) -> None:
        self.facts = facts
        self.shop = shop
        self.peers = Peers({})
        self.holds = Holds()
        self.holds_changed = Wakeup()
        self.idle = Wakeup()
        self.peers_changed = Wakeup()
        self.draining: str | None = None
        self.server_draining = False
        self.signals_dropped = 0
        maximum = {
            JobKind.BUILD: facts.capabilities.max_concurrent_builds,
            JobKind.EVAL: facts.capabilities.max_concurrent_evaluations,
        }
        self.slots = Slots(maximum)
        self.jobs = Jobs(link=shop.link, slots=self.slots, slot_freed=self.request, forgotten=self._forgotten)
        self._nursery = nursery
        self._clean = clean

    # Requests

    def request(self, kind: JobKind) -> None:
        """Say that a slot of this kind is free, if one is and anybody listens."""
        self.idle.set()
        if not self.server_draining and self.slots.free(kind):
            self.shop.link.post(RequestJob(kind=kind))

    def request_all(self) -> None:
        """Name every kind with a free slot."""
        for kind in JobKind:
            self.request(kind)

    # Assignments

    def accept(self, assign: AssignJob) -> str | None:
        """Take an assignment. Returns why it is rejected, None where it is (or was) accepted."""
        assignment_id = assign.assignment_id
        if self.jobs.get(assignment_id) is not None:
            return None
        if self.draining is not None:
            return "worker draining"
        if self.jobs.is_stopping(assign.job_id):
            return "this worker is still stopping this job"
        kind = JobKind.BUILD if isinstance(assign.job, BuildJob) else JobKind.EVAL
        try:
            build_directory(self.shop.base_dir, assignment_id)
        except ValueError as error:
            return str(error)
        if not self.slots.take(kind, assignment_id):
            return f"no free {kind.value} slot"
        if assign.cluster is not None:
            seat = assign.cluster
            refusal = self.holds.hold(assignment_id, seat.attempt, seat.hold_secs, trio.current_time())
            if refusal is not None:
                self.slots.give_back(assignment_id)
                return refusal.value
            self.holds_changed.set()
        self._add(assign)
        self.shop.journal.accepted(assign)
        return None

    def _add(self, assign: AssignJob) -> None:
        job = Job(assign=assign, reports=self._reporter(assign.assignment_id), spans=SpanLog(self.shop.clock))
        if assign.cluster is not None:
            job.state = ResumeState.HELD
        self.jobs.add(job)

    def begin(self, assignment_id: str) -> None:
        """Start an accepted job, unless it is held or runs already."""
        job = self.jobs.get(assignment_id)
        if job is not None and job.state is ResumeState.RUNNING and not job.begun:
            self._start(job)

    def recover(self, found: Recovered, *, at_runner: bool, agents_died: int | None = None) -> None:
        """Take up an assignment that an earlier agent left (protocol.md, "Lost connections").

        `at_runner`: its runner still runs the build, or it ended unread. `agents_died`: it is given up,
        for so many agents died of it.
        """
        assign = found.assign
        job = Job(
            assign=assign,
            reports=self._reporter(assign.assignment_id, found),
            spans=SpanLog(self.shop.clock),
        )
        if assign.cluster is not None and found.start is not None:
            job.member = Member(assign.cluster, found.start, found.remembered)
        self.jobs.add(job)
        if job.reports.finished:
            job.state = ResumeState.DONE
        else:
            self.slots.adopt(job.kind, assign.assignment_id)
            lost = _lost_with_the_agent(found, at_runner=at_runner, agents_died=agents_died)
            if lost is not None:
                self.jobs.finish(job, lost)
            elif found.built:
                job.phase = Phase.BUILT
            elif at_runner:
                job.phase = Phase.STARTED
            if lost is None and assign.cluster is not None:
                self.holds.take_up(assign.assignment_id, assign.cluster.attempt)
        self._start(job, log_offset=found.log_offset)

    def start_member(self, run: Run, start: StartCluster) -> None:
        """Every member accepted: the held job runs."""
        job = self.jobs.get(run.assignment_id)
        if job is None or job.assign.cluster is None:
            return
        job.member = Member(job.assign.cluster, start)
        job.state = ResumeState.RUNNING
        self.shop.journal.started(job.assignment_id, start)
        self.shop.link.post(JobUpdate(assignment_id=job.assignment_id, update=Started()))
        self._start(job)

    def receive_signal(self, signal: ClusterSignal) -> Receipt | None:
        """Keep a signal for the member that it is for. None where none of its attempt runs here: it is
        dropped, and counted.
        """
        assignment_id = self.holds.member_of(signal.attempt)
        job = None if assignment_id is None else self.jobs.get(assignment_id)
        if job is None or job.member is None or job.reports.finished:
            self.signals_dropped += 1
            logger.info(
                "a signal was dropped: no member of its attempt runs here",
                attempt=signal.attempt,
                n=signal.n,
                dropped=self.signals_dropped,
            )
            return None
        receipt = job.member.signals.receive(signal)
        if receipt is Receipt.KEPT:
            self.shop.journal.signal_received(job.assignment_id, signal)
            job.member.changed()
        return receipt

    def note_refused(self, job: Job, seq: int, reason: str) -> None:
        """The server refused a signal of a member, whose `send` fails. Before its acknowledgement."""
        if job.member is not None and job.member.signals.note_refused(seq, reason):
            self.shop.journal.signal_refused(job.assignment_id, seq, reason)
        else:
            logger.warning("a report was refused", assignment_id=job.assignment_id, seq=seq, reason=reason)

    def carry_out(self, instruction: Drop | Release | Abort | None) -> None:
        """Do what the holds decided."""
        if instruction is None:
            return
        job = self.jobs.get(instruction.assignment_id)
        if job is None:
            return
        match instruction:
            case Drop():
                self.jobs.forget(job)
            case Release(reason=reason):
                self.jobs.finish(job, failure(FailureKind.ABORTED, reason))
                self.jobs.flush(job)
            case Abort(reason=reason):
                job.stop(Stop(StopCause.ABORTED, reason))

    def drop(self, job: Job) -> None:
        """The server does not know the assignment any more: stop it and forget it without a report."""
        self.holds.forget(job.assignment_id)
        if job.begun and not job.reports.finished:
            job.stop(Stop(StopCause.FORGOTTEN, "the server dropped it"))
        else:
            self.jobs.forget(job)

    def _start(self, job: Job, *, log_offset: int = 0) -> None:
        build = job.assign.job
        if isinstance(build, BuildJob) and build.command and job.log is None:
            job.log = self._log(job, log_offset)
        if isinstance(build, BuildJob):
            self.shop.store.pin(job.assignment_id, all_paths(build))
        job.begun = True
        self._nursery.start_soon(self._run, job)

    async def _run(self, job: Job) -> None:
        await execute(self.shop, self.jobs, job)
        self.holds.ended(job.assignment_id)
        self.idle.set()
        if job.gone.is_set():
            await self._clean(job)

    def _reporter(self, assignment_id: str, found: Recovered | None = None) -> Reporter:
        def changed() -> None:
            job = self.jobs.get(assignment_id)
            if job is not None:
                self.jobs.flush(job)
            self.idle.set()

        if found is None:
            return Reporter(assignment_id, self.shop.journal, changed)
        return Reporter(
            assignment_id,
            self.shop.journal,
            changed,
            acknowledged=found.acknowledged,
            pending=found.pending,
        )

    def _log(self, job: Job, offset: int) -> LogShipper:
        assignment_id, journal = job.assignment_id, self.shop.journal
        return LogShipper(
            assignment_id,
            build_directory(self.shop.base_dir, assignment_id).log,
            limits=self.shop.log_limits,
            link=self.shop.link,
            threads=self.shop.threads,
            acknowledged=lambda end: journal.log_offset(assignment_id, end),
            settled_changed=lambda: self.jobs.flush(job),
            offset=offset,
        )

    def _forgotten(self, job: Job) -> None:
        self.shop.journal.forget(job.assignment_id)
        self.shop.store.unpin(job.assignment_id)
        self.idle.set()

    # Leaving

    def stop_taking_jobs(self, reason: str) -> None:
        """Drain or hand-over: held jobs are released, then the server is told."""
        if self.draining is not None:
            return
        self.draining = reason
        self.slots.close()
        for release in self.holds.drain():
            self.carry_out(release)
        self.shop.link.post(Draining(reason=reason))

    def stop_all(self, stop: Stop) -> None:
        """Stop every job that has no final report."""
        for job in self.jobs:
            if not job.reports.finished:
                if stop.cause is StopCause.HANDED_OVER:
                    self.shop.journal.left(job.assignment_id)
                job.stop(stop)

    def resumed(self) -> None:
        """A session is live: what it has to be told first."""
        if self.draining is not None:
            self.shop.link.post(Draining(reason=self.draining))

    def heartbeat_peaks(self, *, live: bool) -> Mapping[str, int] | None:
        """Peaks for a heartbeat: empty before ResumeAck, None where builds are not measured."""
        peaks = self.shop.meters.peaks_mb()
        return peaks if live or peaks is None else {}


def _lost_with_the_agent(found: Recovered, *, at_runner: bool, agents_died: int | None) -> Failure | None:
    """Why a journalled assignment cannot go on; None where it can."""
    if agents_died is not None:
        text = f"{agents_died} agents of the worker died while they had it"
        return failure(FailureKind.TRANSIENT, text)
    if found.state is ResumeState.HELD:
        return failure(FailureKind.ABORTED, "the worker's agent was restarted")
    if not isinstance(found.assign.job, BuildJob):
        return failure(FailureKind.TRANSIENT, "the worker's agent was restarted during the evaluation")
    if found.assign.cluster is not None and not at_runner and not found.built:
        return failure(FailureKind.TRANSIENT, "the worker's agent was restarted")
    return None
