"""The states of an attempt and of its members: two coupled tables (cluster-jobs.md, Prepare and Start,
Recovery; the diagrams of docs/clusters.md are generated from here).

A member is Seated while its claim is written, Sent until it answers, Held until every member is, then
Starting while the start is written, and Running. Its end is Reported once its final report is stored,
Lost where none will come, Spoiled where it fell out before the start. When the attempt is closed, a
member that ran is Stopping until it has confirmed; all others are Ended at once, for a hold ends
without a report.

What happens to one member moves that member alone (`MEMBER_MOVES`; what comes too late for its state
moves nothing). What the members are, together, moves the attempt (`JOINT_TRIGGERS`): all Held, one
Spoiled, a report or loss not weighed yet, all Ended. The attempt's own moves (`ATTEMPT_MOVES`) carry
the members along (`GROUP_MOVES`).

Claiming: the claim is being written. Withdrawn: the cluster ended meanwhile. Preparing: members are
asked. Starting, Failing, Settling: start, failed prepare or verdict are being written. Running: all
members have their StartCluster. Ending: closed, and survivors are stopping. Over: nothing is left.
"""

import enum
from typing import Final

from gradient_server.cluster import events as e

__all__ = [
    "ATTEMPT_MOVES",
    "GROUP_MOVES",
    "LATE_RESULTS",
    "MEMBER_MOVES",
    "AttemptState",
    "Seat",
    "Trigger",
    "attempt_diagram",
    "member_diagram",
]


class Seat(enum.StrEnum):
    """Where a member stands."""

    SEATED = "Seated"
    SENT = "Sent"
    HELD = "Held"
    STARTING = "Starting"
    RUNNING = "Running"
    REPORTED = "Reported"
    LOST = "Lost"
    SPOILED = "Spoiled"
    STOPPING = "Stopping"
    ENDED = "Ended"


class AttemptState(enum.StrEnum):
    """Where the attempt stands."""

    CLAIMING = "Claiming"
    WITHDRAWN = "Withdrawn"
    PREPARING = "Preparing"
    STARTING = "Starting"
    FAILING = "Failing"
    RUNNING = "Running"
    SETTLING = "Settling"
    ENDING = "Ending"
    OVER = "Over"


class Trigger(enum.StrEnum):
    """What the members are together, where that moves the attempt."""

    ALL_HELD = "all held"
    ONE_SPOILED = "one spoiled"
    TO_WEIGH = "a report or loss"
    ALL_ENDED = "all ended"


_FALLS_OUT: Final[dict[type[e.MemberEvent], Seat]] = {
    e.Rejected: Seat.SPOILED,
    e.ReportStored: Seat.SPOILED,
    e.Disconnected: Seat.SPOILED,
    e.MemberLost: Seat.SPOILED,
}

MEMBER_MOVES: Final[dict[Seat, dict[type[e.MemberEvent], Seat]]] = {
    Seat.SEATED: {e.Disconnected: Seat.SPOILED, e.MemberLost: Seat.SPOILED},
    Seat.SENT: {e.Accepted: Seat.HELD, **_FALLS_OUT},
    Seat.HELD: _FALLS_OUT,
    # From here on a broken connection has its grace, and ends nothing.
    Seat.STARTING: {e.ReportStored: Seat.REPORTED, e.MemberLost: Seat.LOST},
    Seat.RUNNING: {e.ReportStored: Seat.REPORTED, e.MemberLost: Seat.LOST},
    # A member whose report is stored can no longer be lost.
    Seat.REPORTED: {},
    Seat.LOST: {e.ReportStored: Seat.REPORTED},
    Seat.SPOILED: {},
    Seat.STOPPING: {e.ReportStored: Seat.ENDED, e.MemberLost: Seat.ENDED},
    Seat.ENDED: {},
}

_S = AttemptState
ATTEMPT_MOVES: Final[dict[AttemptState, dict[type[e.Event] | Trigger, AttemptState]]] = {
    _S.CLAIMING: {
        e.Claimed: _S.PREPARING,
        e.ClaimLost: _S.OVER,
        e.ClosedElsewhere: _S.WITHDRAWN,
    },
    _S.WITHDRAWN: {e.Claimed: _S.OVER, e.ClaimLost: _S.OVER, e.ClosedElsewhere: _S.WITHDRAWN},
    _S.PREPARING: {
        Trigger.ALL_HELD: _S.STARTING,
        Trigger.ONE_SPOILED: _S.FAILING,
        e.PrepareTimedOut: _S.FAILING,
        e.ClosedElsewhere: _S.ENDING,
    },
    _S.STARTING: {
        e.StartCommitted: _S.RUNNING,
        e.StartLost: _S.FAILING,
        e.ClosedElsewhere: _S.ENDING,
    },
    _S.FAILING: {e.PrepareClosed: _S.ENDING, e.ClosedElsewhere: _S.ENDING},
    _S.RUNNING: {Trigger.TO_WEIGH: _S.SETTLING, e.ClosedElsewhere: _S.ENDING},
    _S.SETTLING: {
        e.Settled: _S.ENDING,
        e.Undecided: _S.RUNNING,
        e.ClosedElsewhere: _S.ENDING,
    },
    _S.ENDING: {Trigger.ALL_ENDED: _S.OVER, e.SurvivorsTimedOut: _S.OVER},
    _S.OVER: {},
}

# Results of a transaction that was under way when somebody else closed the attempt: nothing follows.
LATE_RESULTS: Final = frozenset({_S.ENDING, _S.OVER})

_CLOSE: Final[dict[Seat, Seat]] = {
    Seat.SEATED: Seat.ENDED,
    Seat.SENT: Seat.ENDED,
    Seat.HELD: Seat.ENDED,
    Seat.STARTING: Seat.ENDED,
    Seat.SPOILED: Seat.ENDED,
    Seat.REPORTED: Seat.ENDED,
    Seat.LOST: Seat.ENDED,
    Seat.RUNNING: Seat.STOPPING,
}

GROUP_MOVES: Final[dict[tuple[AttemptState, AttemptState], dict[Seat, Seat]]] = {
    (_S.CLAIMING, _S.PREPARING): {Seat.SEATED: Seat.SENT},
    (_S.PREPARING, _S.STARTING): {Seat.HELD: Seat.STARTING},
    (_S.STARTING, _S.RUNNING): {Seat.STARTING: Seat.RUNNING},
    **{
        (before, _S.ENDING): _CLOSE
        for before in (_S.PREPARING, _S.STARTING, _S.FAILING, _S.RUNNING, _S.SETTLING)
    },
    (_S.ENDING, _S.OVER): {Seat.STOPPING: Seat.ENDED},
    (_S.CLAIMING, _S.OVER): _CLOSE,
    (_S.WITHDRAWN, _S.OVER): _CLOSE,
}


def _diagram(rows: list[tuple[str, str, str]], first: str) -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {first}"]
    merged: dict[tuple[str, str], list[str]] = {}
    for before, after, label in rows:
        merged.setdefault((before, after), []).append(label)
    lines += [f"    {before} --> {after}: {', '.join(labels)}" for (before, after), labels in merged.items()]
    return "\n".join(lines)


def attempt_diagram() -> str:
    """The attempt's table as a Mermaid state diagram."""
    rows = [
        (str(before), str(after), str(cause) if isinstance(cause, Trigger) else cause.__name__)
        for before, moves in ATTEMPT_MOVES.items()
        for cause, after in moves.items()
        if before is not after
    ]
    return _diagram(rows, AttemptState.CLAIMING)


def member_diagram() -> str:
    """The members' moves, their own and those with the group, as a Mermaid state diagram."""
    rows = [
        (str(before), str(after), cause.__name__)
        for before, moves in MEMBER_MOVES.items()
        for cause, after in moves.items()
    ]
    rows += [
        (str(before), str(after), f"attempt {group_after}")
        for (_, group_after), moves in GROUP_MOVES.items()
        for before, after in moves.items()
    ]
    return _diagram(list(dict.fromkeys(rows)), Seat.SEATED)
