"""What a cluster's row says: its status, and who may still change it.

A cluster that ended leaves the reservation of the pool in the same transaction.
"""

from gradient_server.domain.events import ClusterChanged, ClusterQueued
from gradient_server.domain.status import ClusterStatus
from gradient_server.graph import sql
from gradient_server.graph.cluster_load import load_clusters
from gradient_server.graph.work import Work

__all__ = ["announce_cluster", "set_cluster_status"]

_SET = sql.statement(
    "UPDATE cluster_job SET status = :status, finished_at = :finished_at WHERE id = :id"
    " AND status IN ('Queued', 'Running') RETURNING id"
)
_FREE = sql.statement("DELETE FROM cluster_reservation WHERE cluster_job = :id")


def set_cluster_status(work: Work, cluster: str, status: ClusterStatus) -> bool:
    """Moves a cluster that has not ended; False, and nothing, if it has."""
    final = status.is_final
    parameters = {"id": cluster, "status": status.value, "finished_at": work.now if final else None}
    if not sql.run(work.connection, _SET, parameters):
        return False
    if final:
        sql.run(work.connection, _FREE, {"id": cluster})
    work.events.append(ClusterChanged(cluster, status))
    return True


def announce_cluster(work: Work, cluster: str) -> None:
    """Tells the book of a cluster that waits (again)."""
    for info in load_clusters(work.connection, [cluster]):
        if info.status is ClusterStatus.QUEUED:
            work.events.append(ClusterQueued(info))
