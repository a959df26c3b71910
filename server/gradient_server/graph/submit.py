"""Submission: a new evaluation of a task."""

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.shapes import PathSource, Source

from gradient_server.domain.events import Event
from gradient_server.graph import sql
from gradient_server.graph.evaluations import announce_evaluation
from gradient_server.graph.work import Work

__all__ = ["submit_evaluation"]

_INSERT = sql.statement(
    "INSERT INTO evaluation (id, project, task, status, source, source_path, attrs,"
    " prioritized, build_request,"
    " created_at, queued_at, ready_at, last_progress_at, attempts) VALUES (:id, :project, :task, 'Queued',"
    " :source, :source_path, :attrs, :prioritized, :build_request, :now, :now, :now, :now, 0)"
)


def submit_evaluation(
    connection: sa.Connection,
    *,
    project: str,
    task: str,
    source: Source,
    source_path: str | None,
    attrs: Sequence[str],
    prioritized: bool,
    build_request: bool,
    now: float,
    ids: IdSource,
) -> tuple[str, list[Event]]:
    """Stores an evaluation of `task` (both ids) and queues it, if the task's limit lets it in.

    `source_path` where the server holds the source: such an evaluation has nothing to fetch.
    """
    work = Work(connection, now, ids)
    # A task's evaluations are counted: on PostgreSQL two submissions must see each other.
    sql.lock_graph(connection)
    evaluation = ids.new()
    if source_path is None and isinstance(source, PathSource):
        source_path = source.path
    parameters = {
        "id": evaluation,
        "project": project,
        "task": task,
        "source": sql.to_json(msgspec.to_builtins(source)),
        "source_path": source_path,
        "attrs": sql.to_json(list(attrs)),
        "prioritized": prioritized,
        "build_request": build_request,
        "now": now,
    }
    sql.run(connection, _INSERT, parameters)
    announce_evaluation(work, evaluation)
    return evaluation, work.events
