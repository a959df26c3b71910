"""What the API shows of evaluations, builds and jobs. For `database.read`; nothing here writes.

Times are wall seconds since the epoch, sizes bytes, None unknown or not yet.
"""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from gradient_server.graph import sql

__all__ = [
    "BuildView",
    "EvaluationSummary",
    "EvaluationView",
    "NoteView",
    "OutputView",
    "evaluation_counts",
    "evaluation_view",
    "find_evaluations",
    "list_evaluations",
]

MAX_BUILDS = 20_000
MAX_NOTES = 1_000
MAX_MATCHES = 20


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """An evaluation without its builds. `counts`: builds by status, of those that it wants."""

    id: str
    project: str
    task: str
    status: str
    created_at: float
    finished_at: float | None
    error: str | None
    source_path: str | None
    source: dict[str, Any]
    attrs: list[str]
    prioritized: bool
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class BuildView:
    """A shared build as one evaluation sees it.

    `worker` is the name of the host that has it, or had it last. `status` is the build's own, or its
    outcome for this evaluation where that is settled. `assignment` names its newest log.
    """

    id: str
    name: str
    drv_path: str
    attr: str | None
    status: str
    created_at: float
    finished_at: float | None
    worker: str | None
    assignment: str | None
    attempts: int
    error: str | None
    substituted: bool


@dataclass(frozen=True, slots=True)
class NoteView:
    """A warning or error of an evaluation's walk."""

    level: str
    source: str | None
    message: str


@dataclass(frozen=True, slots=True)
class OutputView:
    """An output of a build that was asked for. Sizes are of the uncompressed NAR, once it is held."""

    build: str
    attr: str | None
    name: str
    output: str
    path: str
    nar_size: int | None
    contains_store_dir: bool


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """An evaluation with what it wants, at most 20,000 builds (`truncated` says if there are more)."""

    summary: EvaluationSummary
    builds: list[BuildView]
    notes: list[NoteView]
    outputs: list[OutputView]
    truncated: bool


_SUMMARY = (
    "SELECT v.id, p.name, t.name, v.status, v.created_at, v.finished_at, v.error, v.source_path, v.source,"
    " v.attrs, v.prioritized FROM evaluation v JOIN project p ON p.id = v.project JOIN task"
    " t ON t.id = v.task"
)
_LATEST = sql.statement(
    _SUMMARY + " WHERE (CAST(:project AS TEXT) IS NULL OR v.project = :project)"
    " ORDER BY v.created_at DESC, v.id DESC LIMIT :limit"
)
_ONE = sql.statement(_SUMMARY + " WHERE v.id = :id")
_COUNTS = sql.statement(
    "SELECT j.evaluation, COALESCE(j.outcome, b.status), COUNT(*) FROM build_job j"
    " JOIN derivation_build b ON b.id = j.build WHERE j.evaluation IN [ids] GROUP BY 1, 2 ORDER BY 1, 2"
)
_BUILDS = sql.statement(
    "SELECT b.id, d.name, d.drv_path, j.attr, COALESCE(j.outcome, b.status), b.created_at, b.finished_at,"
    " b.attempts, b.error, b.substituted FROM build_job j JOIN derivation_build b ON b.id = j.build"
    " JOIN derivation d ON d.id = j.derivation WHERE j.evaluation = :id ORDER BY j.id LIMIT :limit"
)
# Ids sort by the time they were made: the last is the newest.
_LAST_ASSIGNMENTS = sql.statement(
    "SELECT a.derivation_build, a.id, w.name FROM dispatched_job a LEFT JOIN worker w ON w.id = a.worker"
    " WHERE a.derivation_build IN (SELECT j.build FROM build_job j WHERE j.evaluation = :id)"
    " AND a.status <> 'Rejected' ORDER BY a.assigned_at, a.id"
)
_NOTES = sql.statement(
    "SELECT level, source, message FROM evaluation_note WHERE evaluation = :id ORDER BY id LIMIT :limit"
)
_OUTPUTS = sql.statement(
    "SELECT j.build, j.attr, d.name, o.name, o.path, p.nar_size, o.contains_store_dir FROM build_job j"
    " JOIN derivation d ON d.id = j.derivation JOIN derivation_output o ON o.derivation = d.id"
    " LEFT JOIN cached_path p ON p.path = o.path"
    " WHERE j.evaluation = :id AND j.attr IS NOT NULL ORDER BY j.id, o.position LIMIT :limit"
)
_FIND = sql.statement(
    "SELECT id FROM evaluation WHERE substr(id, 1, :length) = :prefix ORDER BY id LIMIT :limit"
)
_BY_STATUS = sql.statement("SELECT status, COUNT(*) FROM evaluation GROUP BY status ORDER BY status")


def list_evaluations(connection: sa.Connection, project: str | None, limit: int) -> list[EvaluationSummary]:
    """The newest evaluations of a project (its id), or of all, the newest first."""
    rows = sql.run(connection, _LATEST, {"project": project, "limit": limit})
    return _summaries(connection, rows)


def evaluation_view(connection: sa.Connection, evaluation_id: str) -> EvaluationView | None:
    """One evaluation with its builds, notes and asked-for outputs. None if there is none of that id."""
    rows = sql.run(connection, _ONE, {"id": evaluation_id})
    if not rows:
        return None
    builds = _builds(connection, evaluation_id)
    notes = sql.run(connection, _NOTES, {"id": evaluation_id, "limit": MAX_NOTES})
    outputs = sql.run(connection, _OUTPUTS, {"id": evaluation_id, "limit": MAX_BUILDS})
    return EvaluationView(
        summary=_summaries(connection, rows)[0],
        builds=builds[:MAX_BUILDS],
        notes=[NoteView(*row) for row in notes],
        outputs=[OutputView(row[0], row[1], row[2], row[3], row[4], row[5], bool(row[6])) for row in outputs],
        truncated=len(builds) > MAX_BUILDS,
    )


def find_evaluations(connection: sa.Connection, prefix: str) -> list[str]:
    """Ids of evaluations that begin with `prefix`, at most 20."""
    parameters = {"prefix": prefix, "length": len(prefix), "limit": MAX_MATCHES}
    return [row[0] for row in sql.run(connection, _FIND, parameters)]


def evaluation_counts(connection: sa.Connection) -> dict[str, int]:
    """All evaluations by status."""
    return {row[0]: int(row[1]) for row in sql.run(connection, _BY_STATUS)}


def _summaries(connection: sa.Connection, rows: list[tuple[Any, ...]]) -> list[EvaluationSummary]:
    counts: dict[str, dict[str, int]] = {row[0]: {} for row in rows}
    parameters = {"ids": sql.array(connection, list(counts))}
    for evaluation, status, number in sql.run(connection, _COUNTS, parameters):
        counts[evaluation][status] = int(number)
    return [
        EvaluationSummary(
            id=row[0],
            project=row[1],
            task=row[2],
            status=row[3],
            created_at=row[4],
            finished_at=row[5],
            error=row[6],
            source_path=row[7],
            source=sql.from_json(row[8]),
            attrs=sql.from_json(row[9]),
            prioritized=bool(row[10]),
            counts=counts[row[0]],
        )
        for row in rows
    ]


def _builds(connection: sa.Connection, evaluation_id: str) -> list[BuildView]:
    of_evaluation = {"id": evaluation_id, "limit": MAX_BUILDS + 1}
    last: dict[str, tuple[str, str | None]] = {}
    for build, assignment, worker in sql.run(connection, _LAST_ASSIGNMENTS, of_evaluation):
        last[build] = (assignment, worker)
    builds = []
    for row in sql.run(connection, _BUILDS, of_evaluation):
        assignment, worker = last.get(row[0], (None, None))
        builds.append(
            BuildView(
                id=row[0],
                name=row[1],
                drv_path=row[2],
                attr=row[3],
                status=row[4],
                created_at=row[5],
                finished_at=row[6],
                worker=worker,
                assignment=assignment,
                attempts=row[7],
                error=row[8],
                substituted=bool(row[9]),
            )
        )
    return builds
