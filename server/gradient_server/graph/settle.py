"""What ends an attempt from outside the graph: its runner, when reports are stored or members lost, and
a person who aborts the cluster."""

from collections.abc import Mapping

import sqlalchemy as sa
from gradient_protocol.ids import IdSource

from gradient_server.db.queries.clusters import lock_cluster, lock_jobs
from gradient_server.domain.events import Event
from gradient_server.domain.status import ClusterStatus
from gradient_server.graph import sql
from gradient_server.graph.aftermath import carry_out
from gradient_server.graph.cluster_ends import end_members
from gradient_server.graph.cluster_load import load_clusters
from gradient_server.graph.cluster_status import set_cluster_status
from gradient_server.graph.progress import abort_builds
from gradient_server.graph.settings import GraphSettings
from gradient_server.graph.verdicts import Settlement, settle_started
from gradient_server.graph.work import Work

__all__ = ["abort_cluster", "settle_verdict"]


def settle_verdict(
    connection: sa.Connection,
    attempt_id: str,
    *,
    instance_id: str,
    now: float,
    ids: IdSource,
    settings: GraphSettings | None = None,
    lost: Mapping[str, str] | None = None,
) -> Settlement | None:
    """The verdict of a started attempt from what its members reported, and everything that follows.

    `lost` are assignments that the caller declares lost, with the reason, stored in the same
    transaction in their place after the reports that came before. None: not decided yet, closed before, not
    started (`fail_prepare` then), or another instance's.
    """
    work = Work(connection, now, ids, settings or GraphSettings())
    sql.lock_graph(connection)
    settlement = settle_started(work, attempt_id, lost=lost or {}, instance_id=instance_id)
    carry_out(work)
    return settlement


def abort_cluster(
    connection: sa.Connection,
    cluster_id: str,
    *,
    now: float,
    ids: IdSource,
    error: str = "aborted on request",
) -> list[Event] | None:
    """Ends a cluster as Aborted: its open attempt, started or not, and every member that has not ended.

    Nothing of it waits for a worker: who holds or runs a member is told after the commit
    (`ClusterChanged`). None if there is no such cluster, or it has ended.
    """
    work = Work(connection, now, ids)
    sql.lock_graph(connection)
    found = load_clusters(connection, [cluster_id])
    if not found or found[0].status not in (ClusterStatus.QUEUED, ClusterStatus.RUNNING):
        return None
    # A claim may be under way: whoever locks the jobs first is seen by the other.
    if found[0].open_attempt is None:
        lock_jobs(connection, [member.job_key for member in found[0].members])
        lock_cluster(connection, cluster_id)
        found = load_clusters(connection, [cluster_id])
    attempt = found[0].open_attempt
    if attempt is not None:
        work.attempts_to_abort[attempt.id] = error
    elif set_cluster_status(work, cluster_id, ClusterStatus.ABORTED):
        others = end_members(work, cluster_id, f"its cluster was aborted: {error}")
        abort_builds(work, others, error=f"its cluster was aborted: {error}")
    return carry_out(work)
