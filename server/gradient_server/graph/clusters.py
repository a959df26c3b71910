"""Clusters of a batch: rows that keep their members from ever starting alone (cluster-jobs.md).

A cluster is stored in the transaction that stores its members (operations.md, Recipes). Submitted
again, it is joined where it is under way, skipped where it is Completed, and run anew where it failed
for good; then a member whose own report settled it as Completed runs again with the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradient_protocol.messages.shapes import Cluster

from gradient_server.db.queries.clusters import lock_jobs
from gradient_server.domain.job import build_key
from gradient_server.domain.status import BuildStatus
from gradient_server.graph import sql
from gradient_server.graph.cluster_checks import find_circle, find_needed_helper, find_shared_pin
from gradient_server.graph.cluster_revival import announce_revived, revive_failed
from gradient_server.graph.cluster_rows import NewMember, insert_cluster, is_alive
from gradient_server.graph.cluster_status import announce_cluster
from gradient_server.graph.progress import reset_builds
from gradient_server.graph.work import Work

__all__ = [
    "ClusterRefusedError",
    "finished_helpers",
    "refuse_needed_helpers",
    "run_failed_again",
    "store_clusters",
]

_MEMBERS = sql.statement(
    "SELECT b.derivation, b.id, b.status, m.cluster_job, c.status, d.name FROM derivation_build b"
    " JOIN derivation d ON d.id = b.derivation"
    " LEFT JOIN cluster_member m ON m.derivation_build = b.id LEFT JOIN cluster_job c ON c.id = m.cluster_job"
    " WHERE b.derivation IN [derivations] AND b.status IN ('Created', 'Queued', 'Assigned', 'Completed')"
)
_FINISHED_HELPERS = sql.statement(
    "SELECT b.derivation, b.id, b.status, c.id, c.status, d.name FROM derivation_build b"
    " JOIN derivation d ON d.id = b.derivation"
    ' JOIN cluster_member m ON m.derivation_build = b.id AND NOT m."primary"'
    " JOIN cluster_job c ON c.id = m.cluster_job AND c.status = 'Completed'"
    " WHERE b.derivation IN [derivations] AND b.status = 'Aborted'"
    ' AND EXISTS (SELECT 1 FROM cluster_member p WHERE p.cluster_job = c.id AND p."primary")'
)
_SIZE = sql.statement("SELECT COUNT(*) FROM cluster_member WHERE cluster_job = :cluster")
_LEAVE = sql.statement("DELETE FROM cluster_member WHERE derivation_build IN [ids]")
_MARK = sql.statement("UPDATE derivation SET clustered = TRUE WHERE id IN [derivations] AND NOT clustered")


class ClusterRefusedError(Exception):
    """A cluster of a batch cannot be: the whole batch is refused, with this reason."""


@dataclass(frozen=True, slots=True)
class _Present:
    """The build that serves a member, and the cluster that it is in."""

    build: str
    status: str
    cluster: str | None
    cluster_status: str | None
    name: str


def finished_helpers(work: Work, derivations: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Builds, with their status, that the success of their cluster's primary ended: nobody runs them
    again, and for who wants them they count as succeeded.
    """
    if not derivations:
        return {}
    parameters = {"derivations": sql.array(work.connection, derivations)}
    return {row[0]: (row[1], row[2]) for row in sql.run(work.connection, _FINISHED_HELPERS, parameters)}


def run_failed_again(work: Work, derivations: Sequence[int]) -> list[str]:
    """Runs completed clusters again in which one of these wished derivations failed by itself.

    Returns the builds that are Created now, for the caller to advance.
    """
    revived = revive_failed(work, derivations)
    reset = reset_builds(work, revived.completed)
    announce_revived(work, revived)
    return [*reset, *revived.fresh]


def store_clusters(work: Work, project: str, clusters: Sequence[Cluster], ids: dict[str, int]) -> list[str]:
    """Stores, joins or skips each cluster; `ids` has the derivations of all members.

    Returns the builds that were reset, for the caller to advance. ClusterRefusedError where one cannot
    be; the caller undoes what this has written.
    """
    reset: list[str] = []
    for cluster in clusters:
        derivations = [ids[member.drv_path] for member in cluster.members]
        present = _present(work, derivations)
        if len(present) < len(derivations):
            # A member without a current build has failed for this evaluation before, and the cluster too.
            continue
        joined = _joined(work, cluster, present)
        if joined is None:
            reset.extend(_store(work, project, cluster, derivations, present))
        else:
            # Its members may have become prioritised.
            announce_cluster(work, joined)
    return reset


def refuse_needed_helpers(
    work: Work, derivations: Sequence[int], clusters: Sequence[Cluster], ids: dict[str, int]
) -> None:
    """ClusterRefusedError where something of the batch, or a waiting build, needs a helper's output."""
    helpers = [
        ids[member.drv_path]
        for cluster in clusters
        if any(member.primary for member in cluster.members)
        for member in cluster.members
        if not member.primary
    ]
    reason = find_needed_helper(work, derivations, helpers)
    if reason is not None:
        raise ClusterRefusedError(reason)


def _present(work: Work, derivations: Sequence[int]) -> dict[int, _Present]:
    parameters = {"derivations": sql.array(work.connection, derivations)}
    rows = sql.run(work.connection, _FINISHED_HELPERS, parameters)
    # A current build goes before one that has ended.
    rows += sql.run(work.connection, _MEMBERS, parameters)
    return {row[0]: _Present(*row[1:]) for row in rows}


def _joined(work: Work, cluster: Cluster, present: dict[int, _Present]) -> str | None:
    """The cluster under way, or Completed, that this one is; None if there is none."""
    alive = {entry.cluster for entry in present.values() if is_alive(entry.cluster_status)}
    if not alive:
        return None
    joined = min(name for name in alive if name is not None)
    outside = [entry.name for entry in present.values() if entry.cluster != joined]
    size = sql.run(work.connection, _SIZE, {"cluster": joined})[0][0]
    if outside or size != len(present):
        name = next(entry.name for entry in present.values() if entry.cluster == joined)
        raise ClusterRefusedError(f"cluster {cluster.name!r}: its member {name!r} is in a cluster already")
    return joined


def _store(
    work: Work, project: str, cluster: Cluster, derivations: Sequence[int], present: dict[int, _Present]
) -> list[str]:
    builds = [present[derivation].build for derivation in derivations]
    lock_jobs(work.connection, [build_key(build) for build in builds])
    for entry in _present(work, derivations).values():
        if entry.status == BuildStatus.ASSIGNED:
            raise ClusterRefusedError(f"cluster {cluster.name!r}: its member {entry.name!r} has started")
    shared = find_shared_pin(work, [member.pin for member in cluster.members])
    if shared is not None:
        raise ClusterRefusedError(f"cluster {cluster.name!r}: two members are pinned to {shared!r}")
    circle = find_circle(work, derivations)
    if circle is not None:
        raise ClusterRefusedError(
            f"cluster {cluster.name!r}: its member {circle!r} would have to end before"
            " another member could start, and they start together"
        )
    sql.run(work.connection, _LEAVE, {"ids": sql.array(work.connection, builds)})
    members = [
        NewMember(role=member.role, build=build, primary=member.primary, pin=member.pin)
        for member, build in zip(cluster.members, builds, strict=True)
    ]
    stored = insert_cluster(
        work,
        project=project,
        name=cluster.name,
        same_zone=cluster.same_zone,
        retry_budget=cluster.retry_budget,
        members=members,
    )
    sql.run(work.connection, _MARK, {"derivations": sql.array(work.connection, derivations)})
    done = [entry.build for entry in present.values() if entry.status == BuildStatus.COMPLETED]
    # A member whose report settled it in a cluster that failed runs again with the others.
    again = reset_builds(work, done)
    announce_cluster(work, stored)
    return again
