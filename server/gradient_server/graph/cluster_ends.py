"""The end of a waiting cluster whose member can no longer start (design.md, Rows and verdicts).

A cluster with an open attempt is decided by its verdict (verdicts.py). A member that is an evaluation
never ends a waiting cluster: the cluster is held back until somebody aborts it.
"""

from collections.abc import Sequence

from gradient_server.db.queries.clusters import lock_cluster
from gradient_server.domain.status import BuildStatus, ClusterStatus
from gradient_server.graph import sql
from gradient_server.graph.cluster_status import set_cluster_status
from gradient_server.graph.states import BuildEvent, build_target
from gradient_server.graph.work import Work

__all__ = ["end_members", "end_waiting_clusters"]

_WAITING = sql.statement(
    "SELECT DISTINCT m.cluster_job FROM cluster_member m JOIN cluster_job c ON c.id = m.cluster_job"
    " WHERE m.derivation_build IN [ids] AND c.status = 'Queued' ORDER BY m.cluster_job"
)
# Asked once the cluster is locked: a claim that was faster has an open attempt by now.
_HAS_ATTEMPT = sql.statement(
    "SELECT 1 FROM cluster_attempt WHERE cluster_job = :cluster AND finished_at IS NULL"
)
_OPEN_MEMBERS = sql.statement(
    "SELECT b.id, v.id FROM cluster_member m"
    " LEFT JOIN derivation_build b ON b.id = m.derivation_build AND b.finished_at IS NULL"
    " LEFT JOIN evaluation v ON v.id = m.evaluation AND v.finished_at IS NULL"
    " WHERE m.cluster_job = :cluster ORDER BY m.position"
)


def end_waiting_clusters(work: Work, builds: Sequence[str], event: BuildEvent, error: str) -> list[str]:
    """Ends the waiting clusters that these ended builds are members of: Aborted where the build was,
    Failed otherwise. Their other builds are returned, to be aborted by the caller.
    """
    if not builds:
        return []
    status = ClusterStatus.ABORTED if build_target(event) is BuildStatus.ABORTED else ClusterStatus.FAILED
    others: list[str] = []
    for (cluster,) in sql.run(work.connection, _WAITING, {"ids": sql.array(work.connection, builds)}):
        lock_cluster(work.connection, cluster)
        if sql.run(work.connection, _HAS_ATTEMPT, {"cluster": cluster}):
            continue
        if set_cluster_status(work, cluster, status):
            others.extend(end_members(work, cluster, f"its cluster ended: {error}"))
    return others


def end_members(work: Work, cluster: str, error: str) -> list[str]:
    """The members of a cluster that ended while it waited: builds that are open, to be aborted by the
    caller; its evaluations are aborted at the end of the transaction (aftermath.py).
    """
    builds = []
    for build, evaluation in sql.run(work.connection, _OPEN_MEMBERS, {"cluster": cluster}):
        if build is not None:
            builds.append(build)
        if evaluation is not None:
            work.evaluations_to_abort.setdefault(evaluation, error)
    return builds
