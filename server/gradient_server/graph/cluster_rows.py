"""The rows of a new cluster: the job and its members, each with its index within its role."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradient_server.domain.status import ClusterStatus
from gradient_server.graph import sql
from gradient_server.graph.work import Work

__all__ = ["NewMember", "insert_cluster", "is_alive"]

_CLUSTER = sql.statement(
    "INSERT INTO cluster_job (id, project, name, status, same_zone, attempts, retry_budget, created_at)"
    " VALUES (:id, :project, :name, 'Queued', :same_zone, 0, :retry_budget, :now)"
)
_MEMBER = sql.statement(
    "INSERT INTO cluster_member"
    ' (cluster_job, evaluation, derivation_build, position, role, "index", "primary", pin)'
    " VALUES (:cluster, :evaluation, :build, :position, :role, :index, :primary, :pin)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMember:
    """A member to be stored: one of `build` and `evaluation`."""

    role: str
    build: str | None = None
    evaluation: str | None = None
    primary: bool = False
    pin: str | None = None


def insert_cluster(
    work: Work,
    *,
    project: str,
    name: str,
    same_zone: bool,
    retry_budget: int,
    members: Sequence[NewMember],
) -> str:
    """Stores a Queued cluster; its id. The caller has checked it, and locked its jobs."""
    cluster = work.ids.new()
    row = {
        "id": cluster,
        "project": project,
        "name": name,
        "same_zone": same_zone,
        "retry_budget": retry_budget,
        "now": work.now,
    }
    sql.run(work.connection, _CLUSTER, row)
    taken: dict[str, int] = {}
    rows = []
    for position, member in enumerate(members):
        index = taken.get(member.role, 0)
        taken[member.role] = index + 1
        rows.append(
            {
                "cluster": cluster,
                "evaluation": member.evaluation,
                "build": member.build,
                "position": position,
                "role": member.role,
                "index": index,
                "primary": member.primary,
                "pin": member.pin,
            }
        )
    sql.run_many(work.connection, _MEMBER, rows)
    return cluster


def is_alive(status: str | None) -> bool:
    """Whether a cluster of this status is under way or Completed: it is not run again."""
    return status in (ClusterStatus.QUEUED, ClusterStatus.RUNNING, ClusterStatus.COMPLETED)
