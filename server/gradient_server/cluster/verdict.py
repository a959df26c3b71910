"""What becomes of a started attempt, from the stored reports of its members (cluster-jobs.md, Recovery).

An evaluation's abort decides Abort. Otherwise the first deciding report does, in the order in which
the reports were stored: a success of the primary, the success that makes all of them successes, or
any failure or loss. A success of another member decides nothing by itself. After a failure the
attempt is retried if the budget has a try left and every member can still start; `attempts` counts
started attempts, this one included (design.md, Rows and verdicts).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from gradient_protocol.kinds import FailureKind

__all__ = ["MemberReport", "MemberState", "Verdict", "decide"]


class MemberState(enum.StrEnum):
    """Where a member of a started attempt stands.

    Lost: with its worker, or reaped after an unconfirmed abort. Aborted: it reported that it was
    stopped. Held: it has not begun to run, or has not said so.
    """

    HELD = "held"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    ABORTED = "aborted"


_FAILURES = frozenset({MemberState.FAILED, MemberState.LOST, MemberState.ABORTED})


class Verdict(enum.StrEnum):
    """The four ends of a started attempt."""

    COMPLETE = "Complete"
    RETRY = "Retry"
    FAIL = "Fail"
    ABORT = "Abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """One member. `can_start`: its held report aside, its job could be assigned again."""

    role: str
    index: int
    primary: bool
    state: MemberState
    failure_kind: FailureKind | None = None
    can_start: bool = True


def decide(
    reports: Sequence[MemberReport], *, attempts: int, retry_budget: int, evaluation_aborted: bool
) -> Verdict | None:
    """The verdict; None while none of the reports decides.

    `reports` has every member once: those with a report in the order in which these were stored (a
    loss at the time of its declaration), then the rest.
    """
    if evaluation_aborted:
        return Verdict.ABORT
    succeeded = 0
    for report in reports:
        if report.state in _FAILURES:
            may_retry = attempts <= retry_budget and all(member.can_start for member in reports)
            return Verdict.RETRY if may_retry else Verdict.FAIL
        if report.state is MemberState.SUCCEEDED:
            succeeded += 1
            if report.primary or succeeded == len(reports):
                return Verdict.COMPLETE
    return None
