"""What happens to an attempt, as data: the machine's whole input (machine.py).

Those of members name the assignment; they come from workers and their sessions, and may come late.
The others are the results of what the machine asked for, its timer, and a close by somebody else.
"""

from dataclasses import dataclass

from gradient_server.cluster.verdict import Verdict

__all__ = [
    "Accepted",
    "ClaimLost",
    "Claimed",
    "ClosedElsewhere",
    "Disconnected",
    "Event",
    "MemberEvent",
    "MemberLost",
    "PrepareClosed",
    "PrepareTimedOut",
    "Rejected",
    "ReportStored",
    "Settled",
    "StartCommitted",
    "StartLost",
    "SurvivorsTimedOut",
    "Undecided",
]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The worker took the slot and holds the job."""

    assignment_id: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The worker did not take it, cannot read it, or left it unanswered."""

    assignment_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReportStored:
    """The member's final report is stored; of a survivor: it came, and changes nothing."""

    assignment_id: str
    reason: str = "it ended before the start"


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The worker's session ended. Before the start there is no grace (protocol.md, Lost connections)."""

    assignment_id: str


@dataclass(frozen=True, slots=True)
class MemberLost:
    """The worker has it no more, did not come back, or did not confirm an abort."""

    assignment_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """Attempt and assignments are rows."""


@dataclass(frozen=True, slots=True)
class ClaimLost:
    """Nothing was written."""


@dataclass(frozen=True, slots=True)
class StartCommitted:
    """The attempt is started and the cluster Running."""


@dataclass(frozen=True, slots=True)
class StartLost:
    """The attempt could not be started: closed, or a member's row is no longer as it was."""


@dataclass(frozen=True, slots=True)
class PrepareClosed:
    """The failed prepare is closed, by this or before."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The verdict and everything that follows from it is stored."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Undecided:
    """The stored reports decide nothing yet, or the attempt was closed before."""


@dataclass(frozen=True, slots=True)
class ClosedElsewhere:
    """Another transaction ended the cluster and closed the attempt: an abort."""

    reason: str


@dataclass(frozen=True, slots=True)
class PrepareTimedOut:
    """`scheduler.clusterPrepareTimeoutSecs` passed without every acceptance."""


@dataclass(frozen=True, slots=True)
class SurvivorsTimedOut:
    """300 s after AbortCluster a survivor has still not reported."""


MemberEvent = Accepted | Rejected | ReportStored | Disconnected | MemberLost
Event = (
    MemberEvent
    | Claimed
    | ClaimLost
    | StartCommitted
    | StartLost
    | PrepareClosed
    | Settled
    | Undecided
    | ClosedElsewhere
    | PrepareTimedOut
    | SurvivorsTimedOut
)
