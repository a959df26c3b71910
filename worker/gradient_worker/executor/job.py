"""One assignment, from its acceptance to the acknowledgement of its final report.

A job outlives sessions: it lives in the agent, and what it has to say waits in its Reporter, its
LogShipper and the journal until a session can carry it.
"""

import enum
from dataclasses import dataclass, field

import trio
from gradient_protocol.kinds import EvalStage, JobKind, JobStage, ResumeState
from gradient_protocol.messages.server import AssignJob, StartCluster
from gradient_protocol.messages.shapes import BuildJob, ClusterSeat, EvalStageUpdate, Stage
from gradient_protocol.messages.worker import BuildProgress, EvalProgress, JobUpdate, ResumedJob

from gradient_worker.executor.reporter import Reporter
from gradient_worker.executor.spans import SpanLog
from gradient_worker.logs import LogShipper
from gradient_worker.member_signals import MemberSignals, Remembered
from gradient_worker.wire import Wire

__all__ = ["Job", "Member", "Phase", "Stop", "StopCause"]


class StopCause(enum.Enum):
    """Why a job is stopped, which decides what becomes of it."""

    ABORTED = "aborted"
    """AbortJob or AbortCluster: killed, JobFailed Aborted."""
    CANCELED = "canceled"
    """The drain's time is over: killed, JobFailed Canceled."""
    REFUSED = "refused"
    """The content of a report was refused: killed; its JobFailed Permanent exists already."""
    FORGOTTEN = "forgotten"
    """ResumeAck dropped it: killed, no report."""
    HANDED_OVER = "handed over"
    """The agent goes: what runs goes on with the runner, for the next agent."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A wish to stop a job."""

    cause: StopCause
    reason: str


class Phase(enum.StrEnum):
    """How far a build came; the next agent learns it from the runner and the reports."""

    ACCEPTED = "accepted"
    STARTED = "started"
    """The runner has been told to start it."""
    BUILT = "built"
    """Its outputs are in the store and its BuildOutput exists."""


class Member:
    """A running member of a cluster attempt. `changed` wakes everyone who waits for what it says."""

    def __init__(self, seat: ClusterSeat, start: StartCluster, remembered: Remembered | None = None) -> None:
        self.attempt = seat.attempt
        self.signals = MemberSignals(seat.role, seat.index, start.roster, remembered)
        self._change = trio.Event()

    def changed(self) -> None:
        """A signal came, an acknowledgement, or an end."""
        self._change.set()
        self._change = trio.Event()

    async def wait_for_change(self) -> None:
        """Return after the next `changed`."""
        await self._change.wait()


@dataclass(slots=True, eq=False)
class Job:
    """The state of one assignment.

    `state` is what ResumeJobs says of it; `begun`: it has a task; `gone`: nothing of it is kept any more.
    `member`: of a cluster attempt, once that has started. `progress`: done and total of what the present
    stage counts: inputs fetched, outputs uploaded, builds found; None where it counts nothing.
    """

    assign: AssignJob
    reports: Reporter
    spans: SpanLog
    state: ResumeState = ResumeState.RUNNING
    stage: JobStage | EvalStage | None = None
    progress: tuple[int, int] | None = None
    phase: Phase = Phase.ACCEPTED
    log: LogShipper | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    stopped: Stop | None = None
    member: Member | None = None
    begun: bool = False
    gone: trio.Event = field(default_factory=trio.Event)

    @property
    def assignment_id(self) -> str:
        """The id that every report carries."""
        return self.assign.assignment_id

    @property
    def kind(self) -> JobKind:
        """Which slots it takes."""
        return JobKind.BUILD if isinstance(self.assign.job, BuildJob) else JobKind.EVAL

    @property
    def is_member(self) -> bool:
        """Whether it belongs to a cluster attempt."""
        return self.assign.cluster is not None

    def stop(self, stop: Stop) -> None:
        """Stop it. The first wish stands, but for one that forgets the job: nobody wants its report."""
        if self.stopped is None or stop.cause is StopCause.FORGOTTEN:
            self.stopped = stop
        self.scope.cancel()

    def acknowledged(self, seq: int) -> None:
        """The server has stored everything up to `seq`."""
        self.reports.acknowledge(seq)
        if self.member is not None:
            self.member.changed()

    def log_first(self, wire: Wire) -> bool:
        """Whether the final report has to wait for the log on this session."""
        return self.log is not None and not self.log.settled(wire)

    def stage_update(self) -> JobUpdate | None:
        """The present stage as a message; None before the first."""
        if self.stage is None:
            return None
        update = (
            Stage(stage=self.stage) if isinstance(self.stage, JobStage) else EvalStageUpdate(stage=self.stage)
        )
        return JobUpdate(assignment_id=self.assignment_id, update=update)

    def count(self, done: int, total: int) -> None:
        """So much of the present stage is done. The session tells it at its next look."""
        self.progress = (done, total)

    def progress_message(self) -> BuildProgress | EvalProgress | None:
        """How far the present stage is; None where it counts nothing."""
        if self.progress is None:
            return None
        done, total = self.progress
        kind = BuildProgress if self.kind is JobKind.BUILD else EvalProgress
        return kind(assignment_id=self.assignment_id, done=done, total=total)

    def resumed(self) -> ResumedJob:
        """Its entry in ResumeJobs."""
        return ResumedJob(
            assignment_id=self.assignment_id,
            job_id=self.assign.job_id,
            state=self.state,
            seq=self.reports.acknowledged,
            signal_n=None if self.member is None else self.member.signals.last_n,
        )
