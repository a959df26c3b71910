"""A cluster as the book and the planner see it (cluster-jobs.md, Tables). Owned values only."""

from dataclasses import dataclass

from gradient_server.domain.status import ClusterStatus

__all__ = ["ClusterInfo", "MemberInfo", "OpenAttempt", "OpenMember", "StoppingAttempt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberInfo:
    """One member job. `index` counts from 0 within the role; `pin` is a worker's id or name."""

    job_key: str
    role: str
    index: int
    primary: bool = False
    pin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMember:
    """A member's open assignment within an open attempt. Wall times."""

    assignment_id: str
    job_key: str
    worker_id: str
    accepted: bool
    # The final report is stored: the member can no longer be lost.
    report_stored: bool
    abort_requested_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAttempt:
    """The try that is under way. `started_at` is None until every member accepted. Wall times."""

    id: str
    instance_id: str
    created_at: float
    started_at: float | None
    members: tuple[OpenMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingAttempt:
    """The last try, closed to be repeated, while members of it stop. `until`: at the latest; wall time.

    `members` of it, in no order; `report_stored` of those that had reported before the close.
    """

    id: str
    instance_id: str
    until: float
    members: tuple[OpenMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """A cluster that has not ended. `members` in the order of the cluster; `attempts` that started."""

    id: str
    project: str
    name: str
    same_zone: bool
    prioritized: bool
    created_at: float
    status: ClusterStatus
    attempts: int
    retry_budget: int
    members: tuple[MemberInfo, ...]
    open_attempt: OpenAttempt | None = None
    stopping_attempt: StoppingAttempt | None = None
