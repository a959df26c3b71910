"""Clusters as JSON: the graph's views of them."""

from pydantic import BaseModel

from gradient_server.graph.cluster_views import (
    ClusterAttemptView,
    ClusterSummary,
    ClusterView,
    MemberRun,
    MemberView,
)

__all__ = ["ClusterAnswer", "ClusterEntry", "cluster_answer", "cluster_entry"]


class ClusterEntry(BaseModel):
    """A cluster without its members, of which it has `size`.

    `attempts`: tries that started. `reason`: how the last try ended. Times in seconds since the epoch.
    """

    id: str
    name: str
    project: str
    status: str
    same_zone: bool
    attempts: int
    retry_budget: int
    created_at: float
    finished_at: float | None
    size: int
    reason: str | None


class MemberEntry(BaseModel):
    """A member and its job's own status. `waits_for`: names of what is to be built before it."""

    job: str
    name: str
    role: str
    index: int
    primary: bool
    pin: str | None
    status: str
    error: str | None
    waits_for: list[str]


class SpanEntry(BaseModel):
    """What a member did from `start` to `end`; `parent` is a place in its list of spans."""

    kind: str
    start: float
    end: float
    parent: int | None


class MemberRunEntry(BaseModel):
    """A member within a try. `finished_at` is the verdict's; `outcome` is None before it.

    `log` is the attempt to ask the job's log for.
    """

    role: str
    index: int
    job: str
    name: str
    log: str
    worker: str | None
    assigned_at: float
    accepted_at: float | None
    finished_at: float | None
    reported: bool
    lost_at: float | None
    outcome: str | None
    error: str | None
    spans: list[SpanEntry]


class TryEntry(BaseModel):
    """A try of the whole cluster. `started_at` is None where not every member accepted."""

    attempt: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    outcome: str | None
    reason: str | None
    signals: int
    members: list[MemberRunEntry]


class ClusterAnswer(ClusterEntry):
    """A cluster with its members and its newest tries, the oldest first; `left_off` are older ones.

    `path`: how each try that started ended, which is how the verdict came about.
    """

    members: list[MemberEntry]
    tries: list[TryEntry]
    left_off: int
    path: list[str]


def cluster_entry(summary: ClusterSummary) -> ClusterEntry:
    """One of a list."""
    return ClusterEntry(
        id=summary.id,
        name=summary.name,
        project=summary.project,
        status=summary.status,
        same_zone=summary.same_zone,
        attempts=summary.attempts,
        retry_budget=summary.retry_budget,
        created_at=summary.created_at,
        finished_at=summary.finished_at,
        size=summary.members,
        reason=summary.reason,
    )


def cluster_answer(view: ClusterView) -> ClusterAnswer:
    """All that is told of one cluster."""
    return ClusterAnswer(
        **cluster_entry(view.summary).model_dump(),
        members=[_member(one) for one in view.members],
        tries=[_try(one) for one in view.attempts],
        left_off=view.left_off,
        path=[one.reason for one in view.attempts if one.started_at is not None and one.reason is not None],
    )


def _member(member: MemberView) -> MemberEntry:
    return MemberEntry(
        job=member.job,
        name=member.name,
        role=member.role,
        index=member.index,
        primary=member.primary,
        pin=member.pin,
        status=member.status,
        error=member.error,
        waits_for=list(member.waits_for),
    )


def _try(one: ClusterAttemptView) -> TryEntry:
    return TryEntry(
        attempt=one.id,
        created_at=one.created_at,
        started_at=one.started_at,
        finished_at=one.finished_at,
        outcome=one.outcome,
        reason=one.reason,
        signals=one.signals,
        members=[_run(run) for run in one.members],
    )


def _run(run: MemberRun) -> MemberRunEntry:
    return MemberRunEntry(
        role=run.role,
        index=run.index,
        job=run.job,
        name=run.name,
        log=run.assignment,
        worker=run.worker,
        assigned_at=run.assigned_at,
        accepted_at=run.accepted_at,
        finished_at=run.finished_at,
        reported=run.reported,
        lost_at=run.lost_at,
        outcome=run.outcome,
        error=run.error,
        spans=[
            SpanEntry(kind=span.kind, start=span.start, end=span.end, parent=span.parent)
            for span in run.spans
        ],
    )
