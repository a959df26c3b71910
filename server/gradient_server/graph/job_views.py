"""What the API shows of one job, and how people's words for a job become its key."""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from gradient_protocol.kinds import JobKind

from gradient_server.domain.job import build_key, eval_key, split_job_key
from gradient_server.graph import sql
from gradient_server.graph.views import MAX_MATCHES

__all__ = ["AttemptView", "JobOutputView", "JobView", "find_jobs", "job_view"]

MIN_PREFIX = 6
MAX_ATTEMPTS = 200


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One assignment of a job. `outcome` is None while it runs. Its log is kept under `assignment`."""

    assignment: str
    worker: str | None
    worker_id: str
    started_at: float
    accepted_at: float | None
    finished_at: float | None
    outcome: str | None
    error: str | None
    log_bytes: int | None
    log_truncated: bool
    score_breakdown: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class JobOutputView:
    """An output of a build. `nar_size` once the server holds it."""

    name: str
    path: str
    nar_size: int | None


@dataclass(frozen=True, slots=True)
class JobView:
    """A job. `projects` and `evaluations` are those that want it (names, ids).

    `waits_for`: names of unfinished dependencies of a build that waits, at most 20.
    """

    job: str
    kind: JobKind
    name: str
    status: str
    projects: list[str]
    evaluations: list[str]
    created_at: float
    queued_at: float | None
    ready_at: float | None
    not_before: float | None
    finished_at: float | None
    error: str | None
    cluster: str | None
    waits_for: list[str]
    attempts: list[AttemptView]
    outputs: list[JobOutputView]
    products: list[dict[str, Any]]


_BUILD = sql.statement(
    "SELECT d.name, b.status, b.created_at, b.queued_at, b.ready_at, b.not_before, b.finished_at, b.error,"
    " m.cluster_job, b.derivation, b.products FROM derivation_build b JOIN derivation d ON"
    " d.id = b.derivation"
    " LEFT JOIN cluster_member m ON m.derivation_build = b.id WHERE b.id = :id"
)
_WANTED_BY = sql.statement(
    "SELECT p.name, v.id FROM build_job j JOIN evaluation v ON v.id = j.evaluation"
    " JOIN project p ON p.id = v.project WHERE j.build = :id ORDER BY j.id LIMIT :limit"
)
_WAITS_FOR = sql.statement(
    "SELECT d.name FROM derivation_dependency e JOIN derivation d ON d.id = e.dependency"
    " WHERE e.derivation = :derivation AND NOT e.runtime_only AND NOT EXISTS"
    " (SELECT 1 FROM derivation_build c WHERE c.derivation = e.dependency AND c.status = 'Completed')"
    " ORDER BY d.name LIMIT :limit"
)
_OUTPUTS = sql.statement(
    "SELECT o.name, o.path, p.nar_size FROM derivation_output o LEFT JOIN cached_path p ON p.path = o.path"
    " WHERE o.derivation = :derivation ORDER BY o.position"
)
_EVALUATION = sql.statement(
    "SELECT p.name, t.name, v.status, v.created_at, v.queued_at, v.ready_at, v.not_before,"
    " v.finished_at, v.error,"
    " m.cluster_job FROM evaluation v JOIN project p ON p.id = v.project JOIN task t ON t.id = v.task"
    " LEFT JOIN cluster_member m ON m.evaluation = v.id WHERE v.id = :id"
)
_ATTEMPTS = sql.statement(
    "SELECT a.id, w.name, a.worker, a.assigned_at, a.accepted_at, a.finished_at,"
    " COALESCE(t.outcome, a.status),"
    " t.error, a.log_bytes, a.log_truncated, a.score_breakdown FROM dispatched_job a"
    " LEFT JOIN worker w ON w.id = a.worker LEFT JOIN build_attempt t ON t.assignment = a.id"
    " WHERE (a.derivation_build = :id OR a.evaluation = :id) AND a.job_key = :job_key"
    " ORDER BY a.assigned_at DESC, a.id DESC LIMIT :limit"
)
_BUILDS_BY_ID = sql.statement(
    "SELECT id FROM derivation_build WHERE substr(id, 1, :length) = :prefix ORDER BY id LIMIT :limit"
)
_EVALUATIONS_BY_ID = sql.statement(
    "SELECT id FROM evaluation WHERE substr(id, 1, :length) = :prefix ORDER BY id LIMIT :limit"
)
_BUILD_BY_NAME = sql.statement(
    "SELECT b.id FROM derivation_build b JOIN derivation d ON d.id = b.derivation"
    " WHERE d.name = :name OR d.pname = :name ORDER BY b.created_at DESC, b.id DESC LIMIT 1"
)


def find_jobs(connection: sa.Connection, text: str) -> list[str]:
    """Job keys that `text` may mean, at most 20: one is the answer, more are ambiguous, none is unknown.

    `text` is `build:ID` or `eval:ID` with a whole id or its beginning, a bare id, the beginning of one (at
    least 6 characters), or the name of a build, of which the newest counts.
    """
    prefix, kinds = text, [JobKind.BUILD, JobKind.EVAL]
    if text.startswith(("build:", "eval:")):
        try:
            kind, prefix = split_job_key(text)
        except ValueError:
            return []
        kinds = [kind]
    found = []
    if len(prefix) >= MIN_PREFIX:
        parameters = {"prefix": prefix, "length": len(prefix), "limit": MAX_MATCHES}
        if JobKind.BUILD in kinds:
            found += [build_key(row[0]) for row in sql.run(connection, _BUILDS_BY_ID, parameters)]
        if JobKind.EVAL in kinds:
            found += [eval_key(row[0]) for row in sql.run(connection, _EVALUATIONS_BY_ID, parameters)]
    if not found and len(kinds) > 1:
        found = [build_key(row[0]) for row in sql.run(connection, _BUILD_BY_NAME, {"name": text})]
    return found[:MAX_MATCHES]


def job_view(connection: sa.Connection, job_key: str) -> JobView | None:
    """One job with its assignments, the newest first. None if there is none of that key."""
    kind, job = split_job_key(job_key)
    if kind is JobKind.BUILD:
        return _build_view(connection, job_key, job)
    return _evaluation_job_view(connection, job_key, job)


def _build_view(connection: sa.Connection, job_key: str, build: str) -> JobView | None:
    rows = sql.run(connection, _BUILD, {"id": build})
    if not rows:
        return None
    row = rows[0]
    of_derivation = {"derivation": row[9], "limit": MAX_MATCHES}
    wanted_by = sql.run(connection, _WANTED_BY, {"id": build, "limit": MAX_ATTEMPTS})
    waits = row[1] == "Created"
    return JobView(
        job=job_key,
        kind=JobKind.BUILD,
        name=row[0],
        status=row[1],
        projects=list(dict.fromkeys(project for project, _ in wanted_by)),
        evaluations=[evaluation for _, evaluation in wanted_by],
        created_at=row[2],
        queued_at=row[3],
        ready_at=row[4],
        not_before=row[5],
        finished_at=row[6],
        error=row[7],
        cluster=row[8],
        waits_for=[found[0] for found in sql.run(connection, _WAITS_FOR, of_derivation)] if waits else [],
        attempts=_attempts(connection, job_key),
        outputs=[JobOutputView(*found) for found in sql.run(connection, _OUTPUTS, of_derivation)],
        products=sql.from_json(row[10]) or [],
    )


def _evaluation_job_view(connection: sa.Connection, job_key: str, evaluation: str) -> JobView | None:
    rows = sql.run(connection, _EVALUATION, {"id": evaluation})
    if not rows:
        return None
    project, task, status, created_at, queued_at, ready_at, not_before, finished_at, error, cluster = rows[0]
    return JobView(
        job=job_key,
        kind=JobKind.EVAL,
        name=f"{project}/{task}",
        status=status,
        projects=[project],
        evaluations=[evaluation],
        created_at=created_at,
        queued_at=queued_at,
        ready_at=ready_at,
        not_before=not_before,
        finished_at=finished_at,
        error=error,
        cluster=cluster,
        waits_for=[],
        attempts=_attempts(connection, job_key),
        outputs=[],
        products=[],
    )


def _attempts(connection: sa.Connection, job_key: str) -> list[AttemptView]:
    # By the id, which has an index: only open assignments have one by their job's key.
    parameters = {"id": split_job_key(job_key)[1], "job_key": job_key, "limit": MAX_ATTEMPTS}
    rows = sql.run(connection, _ATTEMPTS, parameters)
    return [
        AttemptView(
            assignment=row[0],
            worker=row[1],
            worker_id=row[2],
            started_at=row[3],
            accepted_at=row[4],
            finished_at=row[5],
            outcome=None if row[5] is None else row[6],
            error=row[7],
            log_bytes=None if row[5] is None else row[8],
            log_truncated=bool(row[9]),
            score_breakdown=sql.from_json(row[10]),
        )
        for row in rows
    ]
