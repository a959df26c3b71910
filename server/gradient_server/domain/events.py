"""What a committed transaction changed, as data.

Functions that write the graph return a list of these; whoever ran the transaction publishes them
after the commit (`Bus.publish`), in order. Subscribers are synchronous and never wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradient_protocol.kinds import JobKind

from gradient_server.domain.cluster import ClusterInfo
from gradient_server.domain.job import PendingJob
from gradient_server.domain.status import AbortReason, ClusterStatus

__all__ = [
    "AbortWanted",
    "AssignmentClosed",
    "BuildChanged",
    "Bus",
    "ClusterChanged",
    "ClusterQueued",
    "EvaluationChanged",
    "Event",
    "ImportSettled",
    "JobQueued",
    "JobUnqueued",
    "LogGrew",
    "MemberReported",
    "NoteAdded",
    "PathForgotten",
    "PathStored",
    "SignalStored",
]


@dataclass(frozen=True, slots=True)
class JobQueued:
    """The job can be assigned (from `job.not_before` on). Replaces what was known of it."""

    job: PendingJob


@dataclass(frozen=True, slots=True)
class JobUnqueued:
    """The job can no longer be assigned: claimed elsewhere, ended, aborted, removed."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AssignmentClosed:
    """The assignment ended, however: its slot, stage and memory at the worker are free."""

    assignment_id: str
    job_id: str
    kind: JobKind
    worker_id: str


@dataclass(frozen=True, slots=True)
class AbortWanted:
    """The abort is stored: tell the worker (AbortJob), and reap it if nobody answers."""

    assignment_id: str
    worker_id: str
    reason: AbortReason
    text: str


@dataclass(frozen=True, slots=True)
class BuildChanged:
    """For people who watch. `worker` is the name of the host that has or had it."""

    build: str
    evaluations: tuple[str, ...]
    name: str
    status: str
    worker: str | None = None
    error: str | None = None
    attr: str | None = None


@dataclass(frozen=True, slots=True)
class EvaluationChanged:
    """For people who watch, and for limits per task."""

    evaluation: str
    status: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class NoteAdded:
    """An evaluation's warning or error was stored (or, `stored` False, is for display only)."""

    evaluation: str
    level: str
    message: str
    source: str | None = None
    stored: bool = True


@dataclass(frozen=True, slots=True)
class LogGrew:
    """The log of an assignment is readable up to `log_bytes` (uncompressed)."""

    assignment_id: str
    job_id: str
    log_bytes: int


@dataclass(frozen=True, slots=True)
class ImportSettled:
    """Every path of an import request is built or has finally failed: answer the worker."""

    query_id: str
    assignment_id: str
    worker_id: str
    ready: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PathStored:
    """The NAR store holds this path now."""

    path: str
    nar_size: int


@dataclass(frozen=True, slots=True)
class PathForgotten:
    """The NAR store lost this path."""

    path: str


@dataclass(frozen=True, slots=True)
class ClusterQueued:
    """The cluster waits for its members and for seats. Replaces what was known of it."""

    cluster: ClusterInfo


@dataclass(frozen=True, slots=True)
class ClusterChanged:
    """The cluster's status changed; a final one ends whatever attempt was open."""

    cluster_id: str
    status: ClusterStatus


@dataclass(frozen=True, slots=True)
class MemberReported:
    """A member's final report is stored, held for the verdict of its attempt."""

    attempt_id: str
    assignment_id: str


@dataclass(frozen=True, slots=True)
class SignalStored:
    """Signal `n` of the attempt is stored, to be forwarded to those it is for."""

    attempt_id: str
    n: int


@dataclass(frozen=True, slots=True)
class SignalDropped:
    """A signal that nobody gets: outside a started attempt, from or to no member of it. For a count."""

    attempt_id: str
    assignment_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ObjectUnused:
    """Nothing names this object of the NAR store any more: it can be deleted."""

    object: str


Event = (
    JobQueued
    | JobUnqueued
    | AssignmentClosed
    | AbortWanted
    | BuildChanged
    | EvaluationChanged
    | NoteAdded
    | LogGrew
    | ImportSettled
    | PathStored
    | PathForgotten
    | ClusterQueued
    | ClusterChanged
    | MemberReported
    | SignalStored
    | SignalDropped
    | ObjectUnused
)


class Bus:
    """Hands events to every subscriber, in the order of their subscription."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Event], None]] = []

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """`subscriber` is called for every event from now on; it must not wait."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Ends a subscription. ValueError if there is none."""
        self._subscribers.remove(subscriber)

    def publish(self, events: Sequence[Event]) -> None:
        """Call it only after the commit of what the events tell."""
        for event in events:
            for subscriber in tuple(self._subscribers):
                subscriber(event)
