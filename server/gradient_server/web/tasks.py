"""Tasks of a project and their limits."""

from http import HTTPStatus

import sqlalchemy as sa
from fastapi import APIRouter
from pydantic import BaseModel, Field

from gradient_server.db.queries.registry import RegistryError
from gradient_server.domain.events import Event
from gradient_server.graph.tasks import TaskLimits, TaskView, list_tasks, set_task_limits
from gradient_server.web.auth import Reader, Writer
from gradient_server.web.bodies import RequestBody
from gradient_server.web.errors import ApiError
from gradient_server.web.projects import Name, project_named
from gradient_server.web.state import WebDep

__all__ = ["router"]

router = APIRouter(tags=["tasks"])


class TaskBody(RequestBody):
    """A task's limits; one that is left out or null is lifted."""

    max_concurrent_evaluations: int | None = Field(default=None, ge=1, le=1_000_000)
    evaluation_timeout_secs: float | None = Field(default=None, gt=0, le=315_360_000)


class TaskAnswer(TaskBody):
    """A task, by its name in the project."""

    name: str


class Tasks(BaseModel):
    """The tasks of a project by name."""

    tasks: list[TaskAnswer]


@router.get("/projects/{project}/tasks")
async def get_tasks(project: str, web: WebDep, access: Reader) -> Tasks:
    """Every task of the project."""

    def read(connection: sa.Connection) -> list[TaskView]:
        return list_tasks(connection, project_named(connection, project, access).id)

    found = await web.services.database.read(read)
    return Tasks(tasks=[_answer(one.name, one.limits) for one in found])


@router.put("/projects/{project}/tasks/{name}")
async def put_task(project: str, name: Name, body: TaskBody, web: WebDep, access: Writer) -> TaskAnswer:
    """Sets the limits of a task, which is made if it is not there."""
    services = web.services
    limits = TaskLimits(body.max_concurrent_evaluations, body.evaluation_timeout_secs)

    def write(connection: sa.Connection) -> tuple[None, list[Event]]:
        project_id = project_named(connection, project, access).id
        try:
            events = set_task_limits(
                connection, project_id, name, limits, now=services.clock.now(), ids=services.ids
            )
        except RegistryError as error:
            raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None
        return None, events

    await services.transact(write)
    return _answer(name, limits)


def _answer(name: str, limits: TaskLimits) -> TaskAnswer:
    return TaskAnswer(
        name=name,
        max_concurrent_evaluations=limits.max_concurrent_evaluations,
        evaluation_timeout_secs=limits.evaluation_timeout_secs,
    )
