"""Tasks of a project: their limits, and what a change of them does to evaluations that wait."""

from dataclasses import dataclass

import sqlalchemy as sa
from gradient_protocol.ids import IdSource

from gradient_server.db.queries.registry import ensure_task
from gradient_server.db.tables import task
from gradient_server.domain.events import Event, JobQueued, JobUnqueued
from gradient_server.domain.job import eval_key
from gradient_server.graph import sql
from gradient_server.graph.pending import load_queued_evaluations

__all__ = ["TaskLimits", "TaskView", "list_tasks", "set_task_limits"]

_WAITING = sql.statement("SELECT id FROM evaluation WHERE task = :task AND status = 'Queued' ORDER BY id")


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """So many unfinished evaluations at once, each job so many seconds. None: no limit of its own."""

    max_concurrent_evaluations: int | None
    evaluation_timeout_secs: float | None


@dataclass(frozen=True, slots=True)
class TaskView:
    """A task by its name, and its limits."""

    name: str
    limits: TaskLimits


def set_task_limits(
    connection: sa.Connection, project: str, name: str, limits: TaskLimits, *, now: float, ids: IdSource
) -> list[Event]:
    """Limits a task of the project (its id), which is made if it is not there.

    Evaluations that wait are let in or held back by the new limit; what runs goes on.
    RegistryError for a name that cannot be one.
    """
    sql.lock_graph(connection)
    task_id = ensure_task(connection, project, name, now=now, ids=ids)
    connection.execute(
        task.update()
        .where(task.c.id == task_id)
        .values(
            max_concurrent_evaluations=limits.max_concurrent_evaluations,
            evaluation_timeout_secs=limits.evaluation_timeout_secs,
        )
    )
    waiting = [row[0] for row in sql.run(connection, _WAITING, {"task": task_id})]
    admitted = {job.job_id: job for job in load_queued_evaluations(connection, waiting)}
    events: list[Event] = [JobQueued(job) for job in admitted.values()]
    held = (eval_key(evaluation) for evaluation in waiting if eval_key(evaluation) not in admitted)
    events += [JobUnqueued(job_id, "its task's limit holds it back") for job_id in held]
    return events


def list_tasks(connection: sa.Connection, project: str) -> list[TaskView]:
    """The project's tasks by name."""
    found = connection.execute(sa.select(task).where(task.c.project == project).order_by(task.c.name))
    return [
        TaskView(row.name, TaskLimits(row.max_concurrent_evaluations, row.evaluation_timeout_secs))
        for row in found
    ]
