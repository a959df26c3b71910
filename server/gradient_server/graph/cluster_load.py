"""Clusters as the book and the planner take them: a fixed number of statements, whatever waits."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from gradient_server.domain.cluster import ClusterInfo, MemberInfo, OpenAttempt, OpenMember, StoppingAttempt
from gradient_server.domain.job import build_key, eval_key
from gradient_server.domain.status import AssignmentStatus, ClusterStatus
from gradient_server.graph import sql

__all__ = ["load_clusters"]

_CLUSTERS = (
    "SELECT c.id, c.project, c.name, c.same_zone, c.created_at, c.status, c.attempts, c.retry_budget"
    " FROM cluster_job c WHERE"
)
_SOME = sql.statement(_CLUSTERS + " c.id IN [ids] ORDER BY c.created_at, c.id")
_UNFINISHED = sql.statement(
    _CLUSTERS + " c.status IN ('Queued', 'Running') AND c.finished_at IS NULL ORDER BY c.created_at, c.id"
)
# A cluster is prioritised if any member is.
_MEMBERS = sql.statement(
    'SELECT m.cluster_job, m.evaluation, m.derivation_build, m.role, m."index", m."primary", m.pin,'
    " COALESCE(b.prioritized, v.prioritized) FROM cluster_member m"
    " LEFT JOIN derivation_build b ON b.id = m.derivation_build LEFT JOIN evaluation v ON v.id = m.evaluation"
    " WHERE m.cluster_job IN [ids] ORDER BY m.cluster_job, m.position"
)
_ATTEMPTS = sql.statement(
    "SELECT t.cluster_job, t.id, t.instance, t.created_at, t.started_at FROM cluster_attempt t"
    " WHERE t.cluster_job IN [ids] AND t.finished_at IS NULL"
)
_STOPPING = sql.statement(
    "SELECT t.cluster_job, t.id, t.instance, t.survivors_until FROM cluster_attempt t"
    " WHERE t.cluster_job IN [ids] AND t.survivors_until IS NOT NULL ORDER BY t.created_at, t.id"
)
_ROWS = sql.statement(
    "SELECT a.cluster_attempt, a.id, a.job_key, a.worker, a.status, a.held_report IS NOT NULL,"
    " a.abort_requested_at, a.finished_at FROM dispatched_job a WHERE a.cluster_attempt IN [ids]"
    " ORDER BY a.id"
)


def load_clusters(connection: sa.Connection, cluster_ids: Sequence[str] | None) -> list[ClusterInfo]:
    """These clusters, whatever their state; None: all that have not ended. The oldest first."""
    if cluster_ids is None:
        rows = sql.run(connection, _UNFINISHED)
    else:
        rows = sql.run(connection, _SOME, {"ids": sql.array(connection, cluster_ids)})
    if not rows:
        return []
    by_id = {"ids": sql.array(connection, [row[0] for row in rows])}
    members: dict[str, list[MemberInfo]] = {row[0]: [] for row in rows}
    prioritized: set[str] = set()
    for row in sql.run(connection, _MEMBERS, by_id):
        members[row[0]].append(_member(row))
        if row[7]:
            prioritized.add(row[0])
    attempts = _open_attempts(connection, by_id)
    stopping = _stopping_attempts(connection, by_id)
    return [
        ClusterInfo(
            id=row[0],
            project=row[1],
            name=row[2],
            same_zone=bool(row[3]),
            prioritized=row[0] in prioritized,
            created_at=row[4],
            status=ClusterStatus(row[5]),
            attempts=row[6],
            retry_budget=row[7],
            members=tuple(members[row[0]]),
            open_attempt=attempts.get(row[0]),
            stopping_attempt=stopping.get(row[0]),
        )
        for row in rows
    ]


def _member(row: tuple[Any, ...]) -> MemberInfo:
    evaluation, build, role, index, primary, pin = row[1:7]
    key = build_key(build) if evaluation is None else eval_key(evaluation)
    return MemberInfo(job_key=key, role=role, index=index, primary=bool(primary), pin=pin)


def _open_attempts(connection: sa.Connection, by_cluster: dict[str, Any]) -> dict[str, OpenAttempt]:
    attempts = sql.run(connection, _ATTEMPTS, by_cluster)
    members = _rows_of(connection, [row[1] for row in attempts], are_open=True)
    return {
        cluster: OpenAttempt(
            id=attempt,
            instance_id=instance,
            created_at=created_at,
            started_at=started_at,
            members=members[attempt],
        )
        for cluster, attempt, instance, created_at, started_at in attempts
    }


def _stopping_attempts(connection: sa.Connection, by_cluster: dict[str, Any]) -> dict[str, StoppingAttempt]:
    """Of several the newest: it began once the survivors of those before had ended, or were given up."""
    newest = {row[0]: row for row in sql.run(connection, _STOPPING, by_cluster)}
    members = _rows_of(connection, [row[1] for row in newest.values()], are_open=False)
    return {
        cluster: StoppingAttempt(id=attempt, instance_id=instance, until=until, members=members[attempt])
        for cluster, attempt, instance, until in newest.values()
    }


def _rows_of(
    connection: sa.Connection, attempts: Sequence[str], *, are_open: bool
) -> dict[str, tuple[OpenMember, ...]]:
    """The open, or the closed, member rows of each attempt."""
    if not attempts:
        return {}
    found: dict[str, list[OpenMember]] = {attempt: [] for attempt in attempts}
    for attempt, assignment, job_key, worker, status, reported, abort_requested_at, finished_at in sql.run(
        connection, _ROWS, {"ids": sql.array(connection, attempts)}
    ):
        if (finished_at is None) is not are_open:
            continue
        found[attempt].append(
            OpenMember(
                assignment_id=assignment,
                job_key=job_key,
                worker_id=worker,
                accepted=status == AssignmentStatus.ACCEPTED,
                report_stored=bool(reported),
                abort_requested_at=abort_requested_at,
            )
        )
    return {attempt: tuple(members) for attempt, members in found.items()}
