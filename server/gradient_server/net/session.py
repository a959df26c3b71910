"""One authenticated worker's session, as the event loop sees it."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
import trio
from gradient_protocol.connection import Connection
from gradient_protocol.errors import ProtocolError, SessionClosed
from gradient_protocol.kinds import EvalStage, JobKind
from gradient_protocol.limits import MAX_UNACKNOWLEDGED_REPORTS
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import AssignJob
from gradient_protocol.messages.shapes import BuildJob, Capabilities, Job
from gradient_protocol.messages.worker import WorkerCapabilities
from gradient_protocol.state import SessionOrder

from gradient_server.db.queries.registry import SERVER_PEER
from gradient_server.domain.job import split_job_key
from gradient_server.net.lanes import KeyedLanes
from gradient_server.net.work import OrderedWork

__all__ = ["HeldAssignment", "RefusedJob", "RefusedReport", "Session", "WorkItem"]

log = structlog.get_logger(__name__)

# Assignments that ended in this session are remembered, because their logs may come after them.
_ENDED_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class RefusedReport:
    """A numbered report whose content could not be read; takes its place in the order."""

    assignment_id: str
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class RefusedJob:
    """An `AssignJob` that the worker could not read, or that was too large to be sent."""

    assignment_id: str
    reason: str


WorkItem = Message | RefusedReport | RefusedJob


@dataclass(slots=True)
class HeldAssignment:
    """An assignment of this session. `outputs`: the paths it may upload; None until looked up."""

    assignment_id: str
    job_id: str
    is_member: bool
    outputs: frozenset[str] | None = None
    ended: bool = False
    # What is stored of its log, in uncompressed bytes, and whether some of it could not be.
    log_bytes: int = 0
    log_broken: bool = False
    unacknowledged: int = 0
    # For people who watch: an evaluation's stage, and done and total of what the present stage counts.
    eval_stage: EvalStage | None = None
    progress: tuple[int, int] | None = None

    @property
    def kind(self) -> JobKind:
        """Build or Eval."""
        return split_job_key(self.job_id)[0]


class Session:
    """State of one session. `serve` (net/serve.py) drives it; the scheduler uses it as its outbox."""

    def __init__(
        self,
        connection: Connection,
        *,
        worker_id: str,
        name: str,
        incarnation: str,
        capabilities: Capabilities,
        peers: frozenset[str],
    ) -> None:
        self.connection = connection
        self.worker_id = worker_id
        self.name = name
        self.incarnation = incarnation
        # What both sides have.
        self.capabilities = capabilities
        self.peers = peers
        # Ends the session from outside; `end` says why.
        self.scope = trio.CancelScope()
        self.end_reason: str | None = None
        self.done = trio.Event()
        self.work: OrderedWork[WorkItem] = OrderedWork()
        self.order = SessionOrder()
        # Set once the session runs.
        self.lanes: KeyedLanes[Message]
        self.nursery: trio.Nursery
        self.worker_capabilities: WorkerCapabilities | None = None
        self.resumed = False
        self.replaced = False
        # Its tasks have ended, and no new one can begin.
        self.is_over = False
        self.worker_draining = False
        self._open: dict[str, HeldAssignment] = {}
        self._ended: OrderedDict[str, HeldAssignment] = OrderedDict()
        # Counts the reports of assignments that are not of this session; the graph acknowledges them.
        self._strays = HeldAssignment("", "", is_member=False)

    @property
    def projects(self) -> frozenset[str] | None:
        """The projects it works for; None: every one (a base worker)."""
        return None if SERVER_PEER in self.peers else self.peers

    def silent_secs(self, now: float) -> float:
        """How long nothing has come from the worker."""
        return now - self.connection.last_received

    def start_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        """A task of the session's own. Nothing happens if the session is ending already."""
        if not self.is_over:
            self.nursery.start_soon(work)

    def end(self, reason: str) -> None:
        """Ends the session from anywhere; what is queued for the worker still goes out."""
        self.end_reason = self.end_reason or reason
        self.scope.cancel()

    # Outbox

    @property
    def control_has_room(self) -> bool:
        """Whether candidates may be sent now."""
        return self.connection.control_has_room

    def send(self, message: Message) -> None:
        """Queue a control message. A session that has ended takes it in silence: its end is known."""
        if type(message) is AssignJob:
            self._assigned(message)
        try:
            self.connection.send(message)
        except SessionClosed:
            return
        except ValueError as error:
            if type(message) is not AssignJob:
                raise
            # A job over the size of any message can be given to nobody.
            log.error("a job cannot be sent", assignment=message.assignment_id, reason=str(error))
            self.work.put(RefusedJob(message.assignment_id, f"the job cannot be sent: {error}"))

    async def logs_stored(self, assignment_id: str) -> None:
        """Returns once all that came of the assignment's log is stored."""
        await self.lanes.wait_idle(("log", assignment_id))

    async def worked_off(self) -> None:
        """Returns once all that came is in the database or on disk; at once before the resume."""
        if not self.resumed:
            return
        await self.lanes.wait_all_idle()
        await self.work.wait_idle()

    # Assignments

    def _assigned(self, message: AssignJob) -> None:
        self.hold(
            message.assignment_id,
            message.job_id,
            is_member=message.cluster is not None,
            outputs=_output_paths(message.job),
        )

    def hold(
        self,
        assignment_id: str,
        job_id: str,
        *,
        is_member: bool,
        outputs: frozenset[str] | None = None,
        log_bytes: int = 0,
    ) -> None:
        """The worker has this assignment (sent just now, or adopted)."""
        self._open[assignment_id] = HeldAssignment(
            assignment_id, job_id, is_member, outputs, log_bytes=log_bytes
        )

    @property
    def has_jobs(self) -> bool:
        """Whether the worker has open assignments."""
        return bool(self._open)

    def held(self, assignment_id: str) -> HeldAssignment | None:
        """The worker's open assignment, None for any other id."""
        return self._open.get(assignment_id)

    def held_or_ended(self, assignment_id: str) -> HeldAssignment | None:
        """The same, or one that ended in this session not long ago."""
        return self._open.get(assignment_id) or self._ended.get(assignment_id)

    def assignment_ended(self, assignment_id: str) -> None:
        """The assignment was closed, for whatever reason."""
        held = self._open.pop(assignment_id, None)
        if held is None:
            return
        held.ended = True
        self._ended[assignment_id] = held
        if len(self._ended) > _ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def count_report(self, assignment_id: str) -> None:
        """A numbered report came. ProtocolError 413 beyond the window of its assignment."""
        held = self.held_or_ended(assignment_id) or self._strays
        held.unacknowledged += 1
        if held.unacknowledged > MAX_UNACKNOWLEDGED_REPORTS:
            raise ProtocolError(
                413, f"more than {MAX_UNACKNOWLEDGED_REPORTS} unacknowledged reports of {assignment_id}"
            )

    def report_done(self, assignment_id: str) -> None:
        """One of them was acknowledged or refused."""
        held = self.held_or_ended(assignment_id) or self._strays
        held.unacknowledged = max(0, held.unacknowledged - 1)


def _output_paths(job: Job) -> frozenset[str] | None:
    return frozenset(output.path for output in job.outputs) if isinstance(job, BuildJob) else None
