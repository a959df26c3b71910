"""The clusters that have not ended, each with a line that says where it stands."""

import sqlalchemy as sa
from pydantic import BaseModel

from gradient_server.graph.cluster_views import (
    ClusterSummary,
    MemberView,
    active_clusters,
    cluster_members,
    cluster_summary,
)
from gradient_server.net.services import Services
from gradient_server.web.auth import Access
from gradient_server.web.cluster_why import ClusterWhyAnswer, cluster_why, with_expected_start

__all__ = ["MAX_SHOWN", "ClusterStanding", "cluster_standings", "why_of_cluster"]

MAX_SHOWN = 20


class ClusterStanding(BaseModel):
    """`stage` is what it waits for, or does; `summary` the same as a line for people."""

    cluster: str
    name: str
    project: str
    status: str
    stage: str
    summary: str
    size: int
    attempts: int
    retry_budget: int


async def cluster_standings(services: Services, access: Access) -> list[ClusterStanding]:
    """Those of the key's project that have not ended, the oldest first, at most 20."""

    def find(connection: sa.Connection) -> list[tuple[ClusterSummary, list[MemberView]]]:
        found = active_clusters(connection, access.project, MAX_SHOWN)
        return [(one, cluster_members(connection, one.id)) for one in found]

    return [
        _standing(cluster_why(services, summary, members, access))
        for summary, members in await services.database.read(find)
    ]


def _standing(why: ClusterWhyAnswer) -> ClusterStanding:
    return ClusterStanding(
        cluster=why.cluster,
        name=why.name,
        project=why.project,
        status=why.status,
        stage=why.stage,
        summary=why.summary,
        size=len(why.members),
        attempts=why.attempts,
        retry_budget=why.retry_budget,
    )


async def why_of_cluster(services: Services, cluster_id: str, access: Access) -> ClusterWhyAnswer | None:
    """Why the cluster of a member waits; None if it is gone, or is not to be seen."""

    def find(connection: sa.Connection) -> tuple[ClusterSummary, list[MemberView]] | None:
        found = cluster_summary(connection, cluster_id, access.project)
        return None if found is None else (found, cluster_members(connection, cluster_id))

    found = await services.database.read(find)
    if found is None:
        return None
    return await with_expected_start(services, cluster_why(services, *found, access))
