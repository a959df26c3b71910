"""The states of a shared build and of an evaluation. Pure: the rules, the two tables, little code.

A build (`derivation_build`) is Created when an evaluation wants its derivation. It is Queued once
every dependency that holds it back is Completed, and Assigned while a worker has it. A worker gives
it back (rejected, lost, canceled, a transient failure) by a release; if it has to look at its
dependencies anew, it waits again instead. It ends by success, by a final failure of its own, by a
dependency's, or by an abort: at once where no worker has it (withdrawn), else when the worker
confirms. A build whose outputs the store holds already is Completed without a worker. Completed is
the one final state that is left again: by a reset, when the store lost what the build made. A build
that ended otherwise never comes back; asking again makes a new row.

An evaluation is Queued until a worker takes its job, and Assigned while one has it. The fetch half of
a split job puts it back into the queue, and so does a release. Once its job has completed it is
Building until every build it wants has a final state, and then Completed or Failed. A final failure or
an abort ends it from any state before that.

An event that the table does not allow raises `IllegalTransitionError` and changes nothing.
"""

import enum

from gradient_server.domain.status import BuildStatus, EvaluationStatus

__all__ = [
    "BUILD_TRANSITIONS",
    "EVALUATION_TRANSITIONS",
    "BuildEvent",
    "EvaluationEvent",
    "IllegalTransitionError",
    "build_sources",
    "build_target",
    "evaluation_sources",
    "evaluation_target",
    "next_build_status",
    "next_evaluation_status",
]


class IllegalTransitionError(Exception):
    """An event met a state that does not allow it: a bug, never an expected outcome."""


class BuildEvent(enum.Enum):
    """What happens to a shared build."""

    READY = enum.auto()
    OUTPUTS_HELD = enum.auto()
    CLAIMED = enum.auto()
    RELEASED = enum.auto()
    WAITS_AGAIN = enum.auto()
    SUCCEEDED = enum.auto()
    FAILED = enum.auto()
    DEPENDENCY_FAILED = enum.auto()
    ABORTED = enum.auto()
    WITHDRAWN = enum.auto()
    RESET = enum.auto()


class EvaluationEvent(enum.Enum):
    """What happens to an evaluation."""

    CLAIMED = enum.auto()
    RELEASED = enum.auto()
    FETCHED = enum.auto()
    WALKED = enum.auto()
    ALL_BUILT = enum.auto()
    FAILED = enum.auto()
    ABORTED = enum.auto()


_B = BuildStatus
BUILD_TRANSITIONS: dict[BuildEvent, tuple[tuple[BuildStatus, ...], BuildStatus]] = {
    BuildEvent.READY: ((_B.CREATED,), _B.QUEUED),
    BuildEvent.OUTPUTS_HELD: ((_B.CREATED,), _B.COMPLETED),
    BuildEvent.CLAIMED: ((_B.QUEUED,), _B.ASSIGNED),
    BuildEvent.RELEASED: ((_B.ASSIGNED,), _B.QUEUED),
    BuildEvent.WAITS_AGAIN: ((_B.QUEUED, _B.ASSIGNED), _B.CREATED),
    BuildEvent.SUCCEEDED: ((_B.ASSIGNED,), _B.COMPLETED),
    BuildEvent.FAILED: ((_B.CREATED, _B.QUEUED, _B.ASSIGNED), _B.FAILED),
    BuildEvent.DEPENDENCY_FAILED: ((_B.CREATED,), _B.DEPENDENCY_FAILED),
    BuildEvent.ABORTED: ((_B.ASSIGNED,), _B.ABORTED),
    BuildEvent.WITHDRAWN: ((_B.CREATED, _B.QUEUED), _B.ABORTED),
    BuildEvent.RESET: ((_B.COMPLETED,), _B.CREATED),
}

_E = EvaluationStatus
_OPEN = (_E.QUEUED, _E.ASSIGNED, _E.BUILDING)
EVALUATION_TRANSITIONS: dict[EvaluationEvent, tuple[tuple[EvaluationStatus, ...], EvaluationStatus]] = {
    EvaluationEvent.CLAIMED: ((_E.QUEUED,), _E.ASSIGNED),
    EvaluationEvent.RELEASED: ((_E.ASSIGNED,), _E.QUEUED),
    EvaluationEvent.FETCHED: ((_E.ASSIGNED,), _E.QUEUED),
    EvaluationEvent.WALKED: ((_E.ASSIGNED,), _E.BUILDING),
    EvaluationEvent.ALL_BUILT: ((_E.BUILDING,), _E.COMPLETED),
    EvaluationEvent.FAILED: (_OPEN, _E.FAILED),
    EvaluationEvent.ABORTED: (_OPEN, _E.ABORTED),
}


def build_sources(event: BuildEvent) -> tuple[BuildStatus, ...]:
    """The states in which a build takes `event`."""
    return BUILD_TRANSITIONS[event][0]


def build_target(event: BuildEvent) -> BuildStatus:
    """The state that `event` leads a build to."""
    return BUILD_TRANSITIONS[event][1]


def evaluation_sources(event: EvaluationEvent) -> tuple[EvaluationStatus, ...]:
    """The states in which an evaluation takes `event`."""
    return EVALUATION_TRANSITIONS[event][0]


def evaluation_target(event: EvaluationEvent) -> EvaluationStatus:
    """The state that `event` leads an evaluation to."""
    return EVALUATION_TRANSITIONS[event][1]


def next_build_status(status: BuildStatus, event: BuildEvent) -> BuildStatus:
    """The state after `event`. IllegalTransitionError where the table has none."""
    sources, target = BUILD_TRANSITIONS[event]
    if status not in sources:
        raise IllegalTransitionError(f"a build that is {status} cannot take {event.name}")
    return target


def next_evaluation_status(status: EvaluationStatus, event: EvaluationEvent) -> EvaluationStatus:
    """The state after `event`. IllegalTransitionError where the table has none."""
    sources, target = EVALUATION_TRANSITIONS[event]
    if status not in sources:
        raise IllegalTransitionError(f"an evaluation that is {status} cannot take {event.name}")
    return target
