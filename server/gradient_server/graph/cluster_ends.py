"""The end of a waiting cluster whose member can no longer start (design.md, Rows and verdicts).

A cluster with an open attempt is decided by its verdict, which is another part's.
"""

from collections.abc import Sequence

from gradient_server.domain.status import BuildStatus, ClusterStatus
from gradient_server.graph import sql
from gradient_server.graph.states import BuildEvent, build_target
from gradient_server.graph.work import Work

__all__ = ["end_waiting_clusters"]

_END = sql.statement(
    "UPDATE cluster_job SET status = :status, finished_at = :now WHERE status = 'Queued'"
    " AND id IN (SELECT m.cluster_job FROM cluster_member m WHERE m.derivation_build IN [ids])"
    " AND NOT EXISTS (SELECT 1 FROM cluster_attempt a WHERE a.cluster_job = cluster_job.id"
    " AND a.finished_at IS NULL)"
    " RETURNING id"
)
_OTHERS = sql.statement(
    "SELECT b.id FROM cluster_member m JOIN derivation_build b ON b.id = m.derivation_build"
    " WHERE m.cluster_job IN [clusters] AND b.finished_at IS NULL ORDER BY b.id"
)


def end_waiting_clusters(work: Work, builds: Sequence[str], event: BuildEvent) -> list[str]:
    """Ends the waiting clusters that these ended builds are members of; their other"
    " members, to be aborted."""
    status = ClusterStatus.ABORTED if build_target(event) is BuildStatus.ABORTED else ClusterStatus.FAILED
    parameters = {"ids": sql.array(work.connection, builds), "status": status.value, "now": work.now}
    ended = [row[0] for row in sql.run(work.connection, _END, parameters)]
    if not ended:
        return []
    rows = sql.run(work.connection, _OTHERS, {"clusters": sql.array(work.connection, ended)})
    return [row[0] for row in rows]
