"""The words of the scheduler, and the figures that the specification fixes."""

import enum
from dataclasses import dataclass
from typing import Final, Protocol

from gradient_protocol.kinds import EvalStep, JobKind, JobStage
from gradient_protocol.limits import REJECTED_JOB_SECS
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.shapes import Capabilities
from gradient_protocol.messages.worker import WorkerCapabilities

from gradient_server.domain.job import PendingJob
from gradient_server.scoring.breakdown import RunnerUp

__all__ = [
    "ASSIGNMENT_ANSWER_SECS",
    "ASSIGNMENT_TICK_SECS",
    "CLAIM_BATCH",
    "DECISION_RING",
    "IDLE_SLOT_FRESH_SECS",
    "NEXT_CANDIDATES",
    "OFFER_WORKERS",
    "REJECTED_JOB_SECS",
    "AssignedJob",
    "Assignment",
    "AssignmentState",
    "Outbox",
    "SchedulerSettings",
    "WorkerInfo",
]

ASSIGNMENT_TICK_SECS: Final = 5.0
ASSIGNMENT_ANSWER_SECS: Final = 30.0
IDLE_SLOT_FRESH_SECS: Final = 25.0  # two heartbeats, and some
OFFER_WORKERS: Final = 32  # workers that a candidate is offered to first
NEXT_CANDIDATES: Final = 64  # candidates for a worker that finds nothing in its window
DECISION_RING: Final = 200
CLAIM_BATCH: Final = 64  # claims in one transaction


class Outbox(Protocol):
    """The way to one worker's session."""

    @property
    def control_has_room(self) -> bool:
        """Whether candidates may be sent now."""
        ...

    def send(self, message: Message) -> None:
        """Queue a control message; never waits, and takes one for an ended session in silence."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """`nar.maxConcurrentDownloads` and `upload.concurrency`; 0 is no limit."""

    download_slots: int = 16
    upload_slots: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker as its session knows it. `projects` None: a base worker, which serves every project."""

    id: str
    name: str
    projects: frozenset[str] | None
    can: Capabilities
    capabilities: WorkerCapabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedJob:
    """An assignment that the worker goes on with after a resume."""

    assignment_id: str
    job_id: str
    kind: JobKind
    name: str = ""
    accepted: bool = True
    stage: JobStage | None = None
    # What is known of the job, where the caller has it.
    job: PendingJob | None = None
    # MB that it is counted with. None: not known; a build then counts as an unmeasured one.
    ram_reserved_mb: float | None = None
    cluster_attempt: str | None = None


class AssignmentState(enum.StrEnum):
    """Claiming: decided, not yet in the database. Sent: the worker has not answered. Accepted."""

    CLAIMING = "claiming"
    SENT = "sent"
    ACCEPTED = "accepted"


@dataclass(slots=True, kw_only=True)
class Assignment:
    """A job on its way to a worker, or at it. Times on the monotonic clock."""

    assignment_id: str
    job_id: str
    kind: JobKind
    name: str
    worker_id: str
    worker_name: str
    state: AssignmentState
    assigned_at: float
    job: PendingJob | None = None
    steps: tuple[EvalStep, ...] = ()
    stage: JobStage | None = None
    sent_at: float | None = None
    missing_count: int | None = None
    missing_nar_size: int | None = None
    ram_reserved_mb: float = 0.0
    ram_observed_mb: float | None = None
    # How long it is expected to take, by its history; None without one.
    expected_secs: float | None = None
    # The decision that made it: the breakdown, and who came second.
    score_breakdown: dict[str, object] | None = None
    runner_up: RunnerUp | None = None
    # An abort was stored while the claim was under way: the job is not sent any more.
    unwanted: bool = False
    # JobQueued came while the assignment was open: what is true then is looked up at its end.
    requeued: bool = False
    # The worker's answer has arrived, and is on its way to the database.
    answered: bool = False
    # A member's attempt: its desk alone ends the assignment.
    cluster_attempt: str | None = None
