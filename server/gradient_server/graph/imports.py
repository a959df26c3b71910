"""Imports: an evaluation waits for outputs that it reads as further recipes (operations.md).

The builds it waits for, and all that is unfinished below them, are marked (`ifd`), so that they go
before ordinary ones. The evaluation keeps its own slot and takes none of a build.
"""

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.worker import ImportRequest

from gradient_server.domain.events import Event
from gradient_server.domain.status import BuildStatus
from gradient_server.graph import sql
from gradient_server.graph.aftermath import carry_out
from gradient_server.graph.assignments import find_open
from gradient_server.graph.import_results import READY, answer_settled
from gradient_server.graph.lifting import lift_imported
from gradient_server.graph.progress import advance, reset_builds
from gradient_server.graph.work import Work

__all__ = ["request_import"]

# The last build that this evaluation's wish was served by; there is one wish a derivation.
_MAKERS = sql.statement(
    "SELECT o.path, b.id, b.status, b.error, EXISTS (SELECT 1 FROM cached_path p WHERE p.path = o.path)"
    " FROM derivation_output o JOIN build_job j ON j.derivation = o.derivation AND j.evaluation = :evaluation"
    " JOIN derivation_build b ON b.id = j.build WHERE o.path IN [paths] ORDER BY o.path, b.id"
)
_ASK = sql.statement(
    "INSERT INTO import_request (query, path, evaluation, assignment, build, created_at, result)"
    " VALUES (:query, :path, :evaluation, :assignment, :build, :now, :result) ON CONFLICT DO NOTHING"
)


def request_import(
    connection: sa.Connection,
    query: ImportRequest,
    *,
    worker_id: str,
    now: float,
    ids: IdSource,
) -> list[Event]:
    """Takes an import request. An `ImportSettled` event answers it: among these, or among later ones.

    Asked by someone who does not hold the assignment, it is ignored (no event).
    """
    work = Work(connection, now, ids)
    sql.lock_graph(connection)
    held = [a for a in find_open(work, [query.assignment_id]) if a.worker_id == worker_id]
    if not held:
        return []
    evaluation = held[0].job
    parameters = {"evaluation": evaluation, "paths": sql.array(connection, query.paths)}
    makers = {row[0]: row[1:] for row in sql.run(connection, _MAKERS, parameters)}
    lost = [
        build
        for build, status, _, is_held in makers.values()
        if status == BuildStatus.COMPLETED and not is_held
    ]
    again = reset_builds(work, sorted(set(lost)))
    rows = []
    for path in dict.fromkeys(query.paths):
        build, result = _answer_now(makers.get(path), set(lost), path)
        rows.append(
            {
                "query": query.query_id,
                "path": path,
                "evaluation": evaluation,
                "assignment": query.assignment_id,
                "build": build,
                "now": now,
                "result": result,
            }
        )
    sql.run_many(connection, _ASK, rows)
    lift_imported(work, [str(row["build"]) for row in rows if row["result"] is None])
    advance(work, again)
    answer_settled(work, [query.query_id])
    return carry_out(work)


def _answer_now(
    maker: tuple[str, str, str | None, bool] | None, lost: set[str], path: str
) -> tuple[str | None, str | None]:
    """The build that makes a path, and the result if it is known already."""
    if maker is None:
        return None, f"no build of this evaluation makes {path}"
    build, status, error, _ = maker
    if status == BuildStatus.COMPLETED:
        return build, None if build in lost else READY
    if BuildStatus(status).is_final:
        return build, error or f"its build is {status}"
    return build, None
