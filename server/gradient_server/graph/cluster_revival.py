"""A cluster that has ended and whose member must be made again: the store lost its outputs, or it is a
helper that failed by itself in a cluster that its primary completed.

A member never runs alone, so the whole cluster runs again: the same cluster is Queued once more, with
a new build for each member that ended otherwise than by success, and every evaluation that still
waits for one of its members waits for all of them. Where that cannot be, because an evaluation is
among the members, the build leaves the cluster that is over and is made as a job of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradient_server.domain.events import BuildChanged, ClusterChanged
from gradient_server.domain.status import BuildStatus, ClusterStatus
from gradient_server.graph import sql
from gradient_server.graph.cluster_status import announce_cluster
from gradient_server.graph.work import Work

__all__ = ["Revived", "announce_revived", "revive_clusters", "revive_failed"]

_ENDED = sql.statement(
    "SELECT DISTINCT c.id, EXISTS (SELECT 1 FROM cluster_member e WHERE e.cluster_job = c.id"
    "  AND e.evaluation IS NOT NULL)"
    " FROM cluster_member m JOIN cluster_job c ON c.id = m.cluster_job"
    " WHERE m.derivation_build IN [ids] AND c.status IN ('Completed', 'Failed', 'Aborted') ORDER BY c.id"
)
# The primary's success completed it, and a helper had reported a failure of its own by then.
_HELPER_FAILED = sql.statement(
    "SELECT DISTINCT c.id FROM derivation_build b JOIN cluster_member m ON m.derivation_build = b.id"
    " JOIN cluster_job c ON c.id = m.cluster_job AND c.status = 'Completed'"
    " WHERE b.derivation IN [derivations] AND b.status IN ('Failed', 'DependencyFailed')"
    " AND NOT EXISTS (SELECT 1 FROM derivation_build o WHERE o.derivation = b.derivation"
    "  AND o.status IN ('Created', 'Queued', 'Assigned', 'Completed'))"
    " AND NOT EXISTS (SELECT 1 FROM cluster_member e WHERE e.cluster_job = c.id AND e.evaluation IS NOT NULL)"
    " ORDER BY c.id"
)
_LEAVE = sql.statement(
    "DELETE FROM cluster_member WHERE cluster_job = :cluster AND derivation_build IN [ids]"
)
_MEMBERS = sql.statement(
    "SELECT b.id, b.derivation, b.status, d.name FROM cluster_member m JOIN derivation_build b"
    " ON b.id = m.derivation_build JOIN derivation d ON d.id = b.derivation"
    " WHERE m.cluster_job = :cluster ORDER BY m.position"
)
_QUEUE = sql.statement(
    "UPDATE cluster_job SET status = 'Queued', attempts = 0, finished_at = NULL WHERE id = :cluster"
)
_NEW_BUILD = sql.statement(
    "INSERT INTO derivation_build (id, derivation, status, prioritized, build_request, ifd, created_at,"
    " attempts, inputs_unavailable_loops, substitute_misses, oom_retries, substituted)"
    " SELECT :new, derivation, 'Created', prioritized, build_request, ifd, :now, 0, 0, 0, 0, FALSE"
    " FROM derivation_build WHERE id = :old",
    "INSERT INTO derivation_build (id, derivation, status, prioritized, build_request, ifd, created_at,"
    " attempts, inputs_unavailable_loops, substitute_misses, oom_retries, substituted)"
    " SELECT CAST(:new AS TEXT), derivation, 'Created', prioritized, build_request, ifd,"
    " CAST(:now AS DOUBLE PRECISION), 0, 0, 0, 0, FALSE FROM derivation_build WHERE id = :old",
)
_SEAT = sql.statement("UPDATE cluster_member SET derivation_build = :new WHERE derivation_build = :old")
_MOVE_WISHES = sql.statement(
    "UPDATE build_job SET build = :new, outcome = NULL, finished_at = NULL WHERE build = :old"
    " AND EXISTS (SELECT 1 FROM evaluation v WHERE v.id = build_job.evaluation AND v.finished_at IS NULL)"
)
_WISH_ALL = sql.statement(
    "INSERT INTO build_job (evaluation, derivation, build)"
    " SELECT DISTINCT j.evaluation, b.derivation, b.id FROM cluster_member m"
    " JOIN build_job j ON j.build = m.derivation_build JOIN evaluation v ON v.id = j.evaluation"
    " JOIN cluster_member s ON s.cluster_job = m.cluster_job"
    " JOIN derivation_build b ON b.id = s.derivation_build"
    " WHERE m.cluster_job = :cluster AND v.finished_at IS NULL ON CONFLICT DO NOTHING"
)


@dataclass(frozen=True, slots=True)
class Revived:
    """What `revive_clusters` did: builds to reset beside the asked ones, and new ones to advance."""

    clusters: list[str] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)


def revive_clusters(work: Work, builds: Sequence[str]) -> Revived:
    """Has the ended clusters of these Completed builds run again, before the builds are reset."""
    revived = Revived()
    parameters = {"ids": sql.array(work.connection, builds)}
    for cluster, has_evaluation in sql.run(work.connection, _ENDED, parameters):
        if has_evaluation:
            sql.run(work.connection, _LEAVE, {**parameters, "cluster": cluster})
        else:
            _revive(work, cluster, revived)
    return revived


def revive_failed(work: Work, derivations: Sequence[int]) -> Revived:
    """Has completed clusters run again in which one of these, a helper, has failed by itself: who asks
    for it again wishes to try again, and it never runs alone.
    """
    revived = Revived()
    if derivations:
        parameters = {"derivations": sql.array(work.connection, derivations)}
        for (cluster,) in sql.run(work.connection, _HELPER_FAILED, parameters):
            _revive(work, cluster, revived)
    return revived


def announce_revived(work: Work, revived: Revived) -> None:
    """Tells the book, once the members' builds are reset."""
    for cluster in revived.clusters:
        work.events.append(ClusterChanged(cluster, ClusterStatus.QUEUED))
        announce_cluster(work, cluster)


def _revive(work: Work, cluster: str, revived: Revived) -> None:
    sql.run(work.connection, _QUEUE, {"cluster": cluster})
    revived.clusters.append(cluster)
    for build, _, status, name in sql.run(work.connection, _MEMBERS, {"cluster": cluster}):
        if status == BuildStatus.COMPLETED:
            revived.completed.append(build)
            continue
        fresh = work.ids.new()
        for statement in (_NEW_BUILD, _SEAT, _MOVE_WISHES):
            sql.run(work.connection, statement, {"old": build, "new": fresh, "now": work.now})
        revived.fresh.append(fresh)
        work.events.append(BuildChanged(fresh, (), name, BuildStatus.CREATED))
    sql.run(work.connection, _WISH_ALL, {"cluster": cluster})
