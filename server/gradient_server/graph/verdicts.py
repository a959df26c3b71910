"""The verdict of a started attempt, and its end by an abort: one transaction, computed from the stored
reports (cluster-jobs.md, Recovery; design.md, Rows and verdicts).

The attempt is closed, its member rows with it, the members' jobs settle, and the cluster gets its
status. Doing it twice does nothing: the second finds no open attempt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gradient_protocol.kinds import JobKind

from gradient_server.cluster.settings import SURVIVORS_SECS
from gradient_server.cluster.verdict import MemberReport, MemberState, Verdict, decide
from gradient_server.db.queries.uploads import drop_waiting_uploads
from gradient_server.domain.events import Event, ObjectUnused
from gradient_server.domain.status import AbortReason, AttemptOutcome, ClusterStatus
from gradient_server.graph import sql
from gradient_server.graph.cluster_status import announce_cluster, set_cluster_status
from gradient_server.graph.member_reports import lose_member
from gradient_server.graph.verdict_members import close_member, put_back, settle_member
from gradient_server.graph.verdict_rows import Attempt, Member, find_attempt, find_members, member_reports
from gradient_server.graph.work import Work

__all__ = ["Settlement", "abort_attempt", "settle_started"]

_ENDS: Final = {
    Verdict.COMPLETE: (AttemptOutcome.SUCCEEDED, ClusterStatus.COMPLETED),
    Verdict.RETRY: (AttemptOutcome.FAILED, ClusterStatus.QUEUED),
    Verdict.FAIL: (AttemptOutcome.FAILED, ClusterStatus.FAILED),
    Verdict.ABORT: (AttemptOutcome.ABORTED, ClusterStatus.ABORTED),
}
_MAX_REASON_CHARACTERS: Final = 1_000

_CLOSE = sql.statement(
    "UPDATE cluster_attempt SET finished_at = :now, outcome = :outcome, reason = :reason,"
    " survivors_until = :survivors_until WHERE id = :id AND finished_at IS NULL RETURNING id"
)
_ABORTED_EVALUATIONS = sql.statement(
    "SELECT id FROM evaluation WHERE id IN [ids] AND (status = 'Aborted' OR abort_requested_at IS NOT NULL)"
)


@dataclass(slots=True)
class Settlement:
    """What was decided and done. `survivors`: assignments that were open without a report, to be told."""

    verdict: Verdict
    reason: str
    events: list[Event] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)


def settle_started(
    work: Work, attempt_id: str, *, lost: Mapping[str, str], instance_id: str
) -> Settlement | None:
    """Stores the losses (assignment, why) and settles a started attempt if its reports decide it.

    None: nothing decides yet, or it is not open, not started, or another instance's.
    """
    attempt = find_attempt(work, attempt_id)
    if attempt is None or attempt.instance_id != instance_id or not attempt.started:
        return None
    members = find_members(work, attempt)
    if lost:
        for member in members:
            if member.assignment.id in lost:
                lose_member(work, member.assignment, lost[member.assignment.id])
        members = find_members(work, attempt)
    reports = member_reports(work, members)
    verdict = decide(
        reports,
        attempts=attempt.attempts,
        retry_budget=attempt.retry_budget,
        evaluation_aborted=_evaluation_aborted(work, members),
    )
    if verdict is None:
        return None
    return _settle(work, attempt, members, verdict, _reason(verdict, reports, members, attempt))


def abort_attempt(work: Work, attempt_id: str, text: str) -> Settlement | None:
    """An abort reached a member: attempt and cluster are Aborted at once, started or not.

    What a held member reported before the start counts for nothing. None where it is not open.
    """
    attempt = find_attempt(work, attempt_id)
    if attempt is None:
        return None
    members = find_members(work, attempt)
    if not attempt.started:
        members = [_unreported(member) for member in members]
    return _settle(work, attempt, members, Verdict.ABORT, text)


def _settle(
    work: Work, attempt: Attempt, members: Sequence[Member], verdict: Verdict, reason: str
) -> Settlement | None:
    outcome, status = _ENDS[verdict]
    survivors = [member.assignment.id for member in members if member.report is None]
    is_awaited = verdict is Verdict.RETRY and bool(survivors)
    parameters = {
        "survivors_until": work.now + SURVIVORS_SECS if is_awaited else None,
        "id": attempt.id,
        "outcome": outcome.value,
        "reason": reason[:_MAX_REASON_CHARACTERS],
        "now": work.now,
    }
    if not sql.run(work.connection, _CLOSE, parameters):
        return None
    # Before anything cascades: the cluster is no longer one that waits or runs.
    set_cluster_status(work, attempt.cluster, status)
    for member in members:
        close_member(work, member)
    for member in members:
        if verdict is Verdict.RETRY:
            put_back(work, member)
        else:
            settle_member(work, member, verdict, f"its cluster attempt ended: {reason}")
    dropped = drop_waiting_uploads(work.connection, [member.assignment.id for member in members])
    work.events.extend(ObjectUnused(name) for name in dropped)
    if verdict is Verdict.RETRY:
        announce_cluster(work, attempt.cluster)
    return Settlement(verdict, reason, work.events, survivors)


def _unreported(member: Member) -> Member:
    return Member(
        assignment=member.assignment,
        role=member.role,
        index=member.index,
        primary=member.primary,
        report=None,
        output=None,
        order=None,
        lost=False,
        uploads=member.uploads,
    )


def _evaluation_aborted(work: Work, members: Sequence[Member]) -> bool:
    reasons = {member.assignment.abort_reason for member in members}
    if reasons & {AbortReason.USER, AbortReason.EVALUATION}:
        return True
    jobs = [m.assignment.job for m in members if m.assignment.kind is JobKind.EVAL]
    return bool(
        jobs and sql.run(work.connection, _ABORTED_EVALUATIONS, {"ids": sql.array(work.connection, jobs)})
    )


def _reason(
    verdict: Verdict, reports: Sequence[MemberReport], members: Sequence[Member], attempt: Attempt
) -> str:
    """The verdict's path in one line: "client 1: exit status 1; retry 1 of 2"."""
    if verdict is Verdict.ABORT:
        return "aborted"
    if verdict is Verdict.COMPLETE:
        primary = next((r for r in reports if r.primary and r.state is MemberState.SUCCEEDED), None)
        return "every member succeeded" if primary is None else f"{primary.role} {primary.index} succeeded"
    failed = min(
        (member for member in members if member.failure is not None),
        key=lambda member: (member.order is None, member.order or 0),
    )
    assert failed.failure is not None
    text = (
        f"{failed.address}: {failed.failure[1].splitlines()[0] if failed.failure[1] else failed.failure[0]}"
    )
    budget = attempt.retry_budget
    if verdict is Verdict.RETRY:
        return f"{text}; retry {attempt.attempts} of {budget}"
    if attempt.attempts <= budget:
        return f"{text}; not retried, for a member can no longer start"
    return text if budget == 0 else f"{text}; no retry of {budget} is left"
