"""What the API shows of clusters. For `database.read`; nothing here writes.

Times are wall seconds since the epoch on the server's clock, None unknown or not yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from gradient_server.domain.job import build_key, eval_key
from gradient_server.graph import sql

__all__ = [
    "ClusterAttemptView",
    "ClusterSummary",
    "ClusterView",
    "MemberRun",
    "MemberView",
    "SpanView",
    "active_clusters",
    "cluster_members",
    "cluster_summary",
    "cluster_view",
    "clusters_of_evaluation",
    "find_clusters",
    "list_clusters",
    "usual_build_secs",
]

MIN_PREFIX = 6
MAX_MATCHES = 20
MAX_ATTEMPTS = 50
MAX_SPANS = 5_000
# The newest runs of a package that tell how long it usually takes.
USUAL_RUNS = 20


@dataclass(frozen=True, slots=True)
class ClusterSummary:
    """A cluster without its members. `attempts` that started; `reason`: how the last one ended."""

    id: str
    name: str
    project_id: str
    project: str
    status: str
    same_zone: bool
    attempts: int
    retry_budget: int
    created_at: float
    finished_at: float | None
    members: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member's job as it stands: its own status, or its evaluation's. `waits_for`: names, at most 20."""

    job: str
    name: str
    role: str
    index: int
    primary: bool
    pin: str | None
    status: str
    error: str | None
    waits_for: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpanView:
    """A span of a member's report; `parent` is a place in the member's list."""

    kind: str
    start: float
    end: float
    parent: int | None


@dataclass(frozen=True, slots=True)
class MemberRun:
    """A member within one attempt. `outcome` is None while its assignment is open.

    `finished_at` is when its assignment was closed, by the verdict; when its own work ended, the spans
    tell. `reported`: its final report is stored.
    """

    role: str
    index: int
    job: str
    name: str
    assignment: str
    worker: str | None
    assigned_at: float
    accepted_at: float | None
    finished_at: float | None
    reported: bool
    lost_at: float | None
    outcome: str | None
    error: str | None
    spans: tuple[SpanView, ...]


@dataclass(frozen=True, slots=True)
class ClusterAttemptView:
    """One try. `started_at` is None where it never started; `reason` is how it ended, in a line."""

    id: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    outcome: str | None
    reason: str | None
    signals: int
    members: tuple[MemberRun, ...]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster with its members and its newest attempts, at most 50, the oldest first.

    `left_off`: older attempts that are not shown.
    """

    summary: ClusterSummary
    members: list[MemberView]
    attempts: list[ClusterAttemptView]
    left_off: int


_SUMMARY = (
    "SELECT c.id, c.name, c.project, p.name, c.status, c.same_zone, c.attempts, c.retry_budget, c.created_at,"
    " c.finished_at, (SELECT COUNT(*) FROM cluster_member m WHERE m.cluster_job = c.id),"
    " (SELECT t.reason FROM cluster_attempt t WHERE t.cluster_job = c.id AND t.finished_at IS NOT NULL"
    "  ORDER BY t.created_at DESC, t.id DESC LIMIT 1)"
    " FROM cluster_job c JOIN project p ON p.id = c.project"
)
_LATEST = sql.statement(
    _SUMMARY + " WHERE (CAST(:project AS TEXT) IS NULL OR c.project = :project)"
    " ORDER BY c.created_at DESC, c.id DESC LIMIT :limit"
)
_SOME = sql.statement(_SUMMARY + " WHERE c.id IN [ids] ORDER BY c.created_at, c.id")
_ACTIVE = sql.statement(
    _SUMMARY + " WHERE c.finished_at IS NULL AND c.status IN ('Queued', 'Running')"
    " AND (CAST(:project AS TEXT) IS NULL OR c.project = :project) ORDER BY c.created_at, c.id LIMIT :limit"
)
_BY_ID = sql.statement(
    _SUMMARY + " WHERE substr(c.id, 1, :length) = :text"
    " AND (CAST(:project AS TEXT) IS NULL OR c.project = :project) ORDER BY c.id LIMIT :limit"
)
_BY_NAME = sql.statement(
    _SUMMARY + " WHERE c.name = :text AND (CAST(:project AS TEXT) IS NULL OR c.project = :project)"
    " ORDER BY c.created_at DESC, c.id DESC LIMIT 1"
)
_OF_EVALUATION = sql.statement(
    "SELECT DISTINCT m.cluster_job FROM cluster_member m JOIN build_job j ON j.build = m.derivation_build"
    " WHERE j.evaluation = :id UNION SELECT m.cluster_job FROM cluster_member m WHERE m.evaluation = :id"
)
_MEMBERS = sql.statement(
    'SELECT m.evaluation, m.derivation_build, COALESCE(d.name, t.name), m.role, m."index", m."primary",'
    " m.pin, COALESCE(b.status, v.status), COALESCE(b.error, v.error), b.derivation FROM cluster_member m"
    " LEFT JOIN derivation_build b ON b.id = m.derivation_build"
    " LEFT JOIN derivation d ON d.id = b.derivation"
    " LEFT JOIN evaluation v ON v.id = m.evaluation LEFT JOIN task t ON t.id = v.task"
    " WHERE m.cluster_job = :id ORDER BY m.position"
)
_WAITS_FOR = sql.statement(
    "SELECT DISTINCT d.name FROM derivation_dependency e JOIN derivation d ON d.id = e.dependency"
    " WHERE e.derivation = :derivation AND NOT e.runtime_only AND NOT EXISTS (SELECT 1"
    "  FROM derivation_build b WHERE b.derivation = e.dependency AND b.status = 'Completed')"
    " ORDER BY d.name LIMIT :limit"
)
_ATTEMPTS = sql.statement(
    "SELECT id, created_at, started_at, finished_at, outcome, reason, signal_count FROM cluster_attempt"
    " WHERE cluster_job = :id ORDER BY created_at DESC, id DESC LIMIT :limit"
)
_COUNT_ATTEMPTS = sql.statement("SELECT COUNT(*) FROM cluster_attempt WHERE cluster_job = :id")
_RUNS = sql.statement(
    "SELECT a.cluster_attempt, a.cluster_role, a.cluster_index, a.job_key, COALESCE(d.name, a.job_key), a.id,"
    " w.name, a.assigned_at, a.accepted_at, a.finished_at, a.held_report IS NOT NULL, a.lost_at,"
    " COALESCE(r.outcome, a.status), r.error FROM dispatched_job a LEFT JOIN worker w ON w.id = a.worker"
    " LEFT JOIN build_attempt r ON r.assignment = a.id"
    " LEFT JOIN derivation_build b ON b.id = a.derivation_build"
    " LEFT JOIN derivation d ON d.id = b.derivation"
    " WHERE a.cluster_attempt IN [ids] ORDER BY a.cluster_attempt, a.id"
)
_SPANS = sql.statement(
    'SELECT s.assignment, s.kind, s.start, s."end", s.parent FROM span s WHERE s.assignment IN'
    " (SELECT a.id FROM dispatched_job a WHERE a.cluster_attempt IN [ids])"
    " ORDER BY s.assignment, s.position LIMIT :limit"
)
_USUAL = sql.statement(
    "SELECT AVG(m.build_time_ms) FROM (SELECT m.build_time_ms FROM derivation_metric m"
    " JOIN derivation d ON d.history_name = m.history_name JOIN derivation_build b ON b.derivation = d.id"
    " WHERE b.id = :build AND m.build_time_ms IS NOT NULL AND NOT m.oom_killed"
    " ORDER BY m.created_at DESC LIMIT :limit) m"
)


def list_clusters(connection: sa.Connection, project: str | None, limit: int) -> list[ClusterSummary]:
    """The newest clusters of a project (its id), or of all, the newest first."""
    rows = sql.run(connection, _LATEST, {"project": project, "limit": limit})
    return [_summary(row) for row in rows]


def active_clusters(connection: sa.Connection, project: str | None, limit: int) -> list[ClusterSummary]:
    """Those of a project (its id), or of all, that have not ended, the oldest first."""
    rows = sql.run(connection, _ACTIVE, {"project": project, "limit": limit})
    return [_summary(row) for row in rows]


def cluster_summary(connection: sa.Connection, cluster_id: str, project: str | None) -> ClusterSummary | None:
    """The cluster of this id; None for none, or where it is of another project (its id) than `project`."""
    rows = sql.run(connection, _SOME, {"ids": sql.array(connection, [cluster_id])})
    found = [_summary(row) for row in rows]
    return next((one for one in found if project is None or one.project_id == project), None)


def find_clusters(connection: sa.Connection, text: str, project: str | None) -> list[ClusterSummary]:
    """Clusters that `text` may mean, of a project (its id) or of all: one is the answer.

    An id, at least 6 characters of its beginning (at most 20 are returned), or else a name, of which
    the newest counts.
    """
    parameters = {"text": text, "length": len(text), "project": project, "limit": MAX_MATCHES}
    rows = sql.run(connection, _BY_ID, parameters) if len(text) >= MIN_PREFIX else []
    rows = rows or sql.run(connection, _BY_NAME, {"text": text, "project": project})
    return [_summary(row) for row in rows]


def clusters_of_evaluation(connection: sa.Connection, evaluation: str) -> list[ClusterSummary]:
    """Clusters with a member that the evaluation wants to have built, or is; the oldest first."""
    ids = [row[0] for row in sql.run(connection, _OF_EVALUATION, {"id": evaluation})]
    if not ids:
        return []
    return [_summary(row) for row in sql.run(connection, _SOME, {"ids": sql.array(connection, ids)})]


def cluster_members(connection: sa.Connection, cluster_id: str) -> list[MemberView]:
    """The members of a cluster in its order."""
    return [_member(connection, row) for row in sql.run(connection, _MEMBERS, {"id": cluster_id})]


def cluster_view(connection: sa.Connection, cluster_id: str) -> ClusterView | None:
    """One cluster with everything that is told of it. None if there is none of that id."""
    rows = sql.run(connection, _SOME, {"ids": sql.array(connection, [cluster_id])})
    if not rows:
        return None
    members = cluster_members(connection, cluster_id)
    newest = sql.run(connection, _ATTEMPTS, {"id": cluster_id, "limit": MAX_ATTEMPTS})
    runs = _runs(connection, [row[0] for row in newest])
    places = {(member.role, member.index): place for place, member in enumerate(members)}
    attempts = []
    for row in reversed(newest):
        own = sorted(runs.get(row[0], ()), key=lambda run: places.get((run.role, run.index), len(places)))
        attempts.append(
            ClusterAttemptView(
                id=row[0],
                created_at=row[1],
                started_at=row[2],
                finished_at=row[3],
                outcome=row[4],
                reason=row[5],
                signals=row[6],
                members=tuple(own),
            )
        )
    total = sql.run(connection, _COUNT_ATTEMPTS, {"id": cluster_id})[0][0]
    return ClusterView(_summary(rows[0]), members, attempts, int(total) - len(attempts))


def usual_build_secs(connection: sa.Connection, builds: Sequence[str]) -> dict[str, float]:
    """How long builds of these packages took on average, of the builds of which it is known."""
    found = {}
    for build in builds:
        (mean_ms,) = sql.run(connection, _USUAL, {"build": build, "limit": USUAL_RUNS})[0]
        if mean_ms is not None:
            found[build] = float(mean_ms) / 1_000
    return found


def _summary(row: tuple[Any, ...]) -> ClusterSummary:
    values = list(row)
    values[5] = bool(row[5])
    return ClusterSummary(*values)


def _member(connection: sa.Connection, row: tuple[Any, ...]) -> MemberView:
    evaluation, build, name, role, index, primary, pin, status, error, derivation = row
    waits: list[tuple[Any, ...]] = []
    if status == "Created" and derivation is not None:
        waits = sql.run(connection, _WAITS_FOR, {"derivation": derivation, "limit": MAX_MATCHES})
    return MemberView(
        job=build_key(build) if evaluation is None else eval_key(evaluation),
        name=name,
        role=role,
        index=index,
        primary=bool(primary),
        pin=pin,
        status=status,
        error=error,
        waits_for=tuple(found[0] for found in waits),
    )


def _runs(connection: sa.Connection, attempts: list[str]) -> dict[str, list[MemberRun]]:
    if not attempts:
        return {}
    parameters = {"ids": sql.array(connection, attempts)}
    spans: dict[str, list[SpanView]] = {}
    for assignment, kind, start, end, parent in sql.run(
        connection, _SPANS, {**parameters, "limit": MAX_SPANS}
    ):
        spans.setdefault(assignment, []).append(SpanView(kind, start, end, parent))
    found: dict[str, list[MemberRun]] = {}
    for row in sql.run(connection, _RUNS, parameters):
        run = MemberRun(
            role=row[1],
            index=row[2],
            job=row[3],
            name=row[4],
            assignment=row[5],
            worker=row[6],
            assigned_at=row[7],
            accepted_at=row[8],
            finished_at=row[9],
            reported=bool(row[10]),
            lost_at=row[11],
            outcome=None if row[9] is None else row[12],
            error=row[13],
            spans=tuple(spans.get(row[5], ())),
        )
        found.setdefault(row[0], []).append(run)
    return found
