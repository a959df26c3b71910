"""Clusters of a batch: rows that keep their members from ever starting alone (cluster-jobs.md).

The book that starts clusters is another part's; here a cluster is stored in the transaction that
stores its members, joined where it is under way or Completed, and made anew where it failed for good.
"""

from collections.abc import Sequence

from gradient_protocol.messages.shapes import Cluster

from gradient_server.domain.status import BuildStatus, ClusterStatus
from gradient_server.graph import sql
from gradient_server.graph.progress import reset_builds
from gradient_server.graph.work import Work

__all__ = ["store_clusters"]

_MEMBERS = sql.statement(
    "SELECT b.derivation, b.id, b.status, m.cluster_job, c.status FROM derivation_build b"
    " LEFT JOIN cluster_member m ON m.derivation_build = b.id LEFT JOIN cluster_job c ON c.id = m.cluster_job"
    " WHERE b.derivation IN [derivations] AND b.status IN ('Created', 'Queued', 'Assigned', 'Completed')"
)
_LEAVE = sql.statement("DELETE FROM cluster_member WHERE derivation_build IN [ids]")
_NEW_CLUSTER = sql.statement(
    "INSERT INTO cluster_job (id, project, name, status, same_zone, attempts, retry_budget, created_at)"
    " VALUES (:id, :project, :name, 'Queued', :same_zone, 0, :retry_budget, :now)"
)
_NEW_MEMBER = sql.statement(
    'INSERT INTO cluster_member (cluster_job, derivation_build, position, role, "index", "primary", pin)'
    " VALUES (:cluster_job, :build, :position, :role, :index, :primary, :pin)"
)


def store_clusters(work: Work, project: str, clusters: Sequence[Cluster], ids: dict[str, int]) -> list[str]:
    """Stores or joins each cluster; `ids` has the derivations of all members.

    Returns the builds that were reset, for the caller to advance.
    """
    reset: list[str] = []
    for cluster in clusters:
        derivations = [ids[member.drv_path] for member in cluster.members]
        parameters = {"derivations": sql.array(work.connection, derivations)}
        present = {row[0]: row[1:] for row in sql.run(work.connection, _MEMBERS, parameters)}
        alive = {
            joined
            for _, _, joined, status in present.values()
            if joined is not None and status not in (ClusterStatus.FAILED, ClusterStatus.ABORTED)
        }
        if alive or len(present) < len(derivations):
            # The paths of all members carry the whole cluster, so one that lives is this very one; and
            # a member without a current build has failed for this evaluation before, and the cluster too.
            continue
        done = [build for build, status, *_ in present.values() if status == BuildStatus.COMPLETED]
        _store(work, project, cluster, {derivation: row[0] for derivation, row in present.items()}, ids)
        # A member whose report settled it in a cluster that failed runs again with the others.
        reset_builds(work, done)
        reset.extend(done)
    return reset


def _store(
    work: Work,
    project: str,
    cluster: Cluster,
    builds: dict[int, str],
    ids: dict[str, int],
) -> None:
    members = {"ids": sql.array(work.connection, list(builds.values()))}
    sql.run(work.connection, _LEAVE, members)
    cluster_id = work.ids.new()
    row = {
        "id": cluster_id,
        "project": project,
        "name": cluster.name,
        "same_zone": cluster.same_zone,
        "retry_budget": cluster.retry_budget,
        "now": work.now,
    }
    sql.run(work.connection, _NEW_CLUSTER, row)
    taken: dict[str, int] = {}
    rows = []
    for position, member in enumerate(cluster.members):
        index = taken.get(member.role, 0)
        taken[member.role] = index + 1
        rows.append(
            {
                "cluster_job": cluster_id,
                "build": builds[ids[member.drv_path]],
                "position": position,
                "role": member.role,
                "index": index,
                "primary": member.primary,
                "pin": member.pin,
            }
        )
    sql.run_many(work.connection, _NEW_MEMBER, rows)
