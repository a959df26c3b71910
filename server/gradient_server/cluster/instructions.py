"""What the machine wants done, as data: one runner executes it and feeds the results back as events.

Each Persist is one transaction, and its result comes as one of the events named with it, if there are any.
"""

import enum
from dataclasses import dataclass

__all__ = [
    "Ending",
    "Finish",
    "Instruction",
    "Persist",
    "PersistClaim",
    "PersistPrepareFailed",
    "PersistStart",
    "PersistSurvivorsEnded",
    "PersistVerdict",
    "Release",
    "SendAbort",
    "SendAssign",
    "SendStart",
    "StartTimer",
    "StopTimer",
    "Timer",
]


class Timer(enum.StrEnum):
    """An attempt has one timer at a time: for its prepare, then for its survivors."""

    PREPARE = "prepare"
    SURVIVORS = "survivors"


class Ending(enum.StrEnum):
    """How an attempt left its cluster.

    ClaimLost: nothing was written, look the members up again. PrepareFailed: waiting again, after
    30 s. Retry: waiting again. Final: the cluster has ended.
    """

    CLAIM_LOST = "claim lost"
    PREPARE_FAILED = "prepare failed"
    RETRY = "retry"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class PersistClaim:
    """`claim_cluster`: Claimed or ClaimLost."""


@dataclass(frozen=True, slots=True)
class PersistStart:
    """Acceptances and `start_cluster_attempt`: StartCommitted or StartLost."""


@dataclass(frozen=True, slots=True)
class PersistPrepareFailed:
    """`close_cluster_attempt` as PrepareFailed, members Queued again: PrepareClosed."""

    reason: str


@dataclass(frozen=True, slots=True)
class PersistVerdict:
    """The verdict from the stored reports and these losses (assignment, why): Settled or Undecided."""

    lost: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PersistSurvivorsEnded:
    """Other instances may try the cluster again. Nothing waits for it, and no event comes of it."""


@dataclass(frozen=True, slots=True)
class SendAssign:
    """AssignJob with `cluster` to the member's session."""

    assignment_id: str


@dataclass(frozen=True, slots=True)
class SendStart:
    """StartCluster with the roster to the member's session."""

    assignment_id: str


@dataclass(frozen=True, slots=True)
class SendAbort:
    """AbortCluster to the member's session."""

    assignment_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """The member's seat is free. `unsent`: it was never told of, so its worker still waits."""

    assignment_id: str
    unsent: bool


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Starts the attempt's timer, in place of one that runs."""

    timer: Timer


@dataclass(frozen=True, slots=True)
class StopTimer:
    """No timer runs."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The attempt is over: its cluster may be tried again, or has ended."""

    ending: Ending
    reason: str


Persist = PersistClaim | PersistStart | PersistPrepareFailed | PersistVerdict | PersistSurvivorsEnded
Instruction = Persist | SendAssign | SendStart | SendAbort | Release | StartTimer | StopTimer | Finish
