"""Projects and API keys."""

import re
from http import HTTPStatus
from typing import Annotated, Final

import sqlalchemy as sa
from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, Field

from gradient_server.db.queries.registry import (
    Project,
    RegistryError,
    create_api_key,
    create_project,
    find_api_key,
    find_project,
    list_projects,
)
from gradient_server.web.auth import Access, Admin, Reader
from gradient_server.web.bodies import RequestBody
from gradient_server.web.errors import ApiError
from gradient_server.web.state import WebDep

__all__ = ["Name", "project_named", "router"]

router = APIRouter(tags=["projects"])

NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


def _check_name(name: str) -> str:
    if not re.fullmatch(NAME, name):
        raise ValueError("use at most 63 letters, digits, '.', '_', '-', no sign first")
    return name


Name = Annotated[str, AfterValidator(_check_name), Field(json_schema_extra={"pattern": NAME})]


class ProjectAnswer(BaseModel):
    """A project."""

    id: str
    name: str


class NewProject(RequestBody):
    """A project to make."""

    name: Name


class CreatedProject(BaseModel):
    """The project that was made."""

    project: ProjectAnswer


class Projects(BaseModel):
    """Projects by name."""

    projects: list[ProjectAnswer]


class NewKey(RequestBody):
    """A key to make; `project` None: good for the whole server."""

    name: Name
    project: str | None = None


class CreatedKey(BaseModel):
    """The key's text, which is not shown again, and its id."""

    key: str
    id: str


def project_named(connection: sa.Connection, name: str, access: Access) -> Project:
    """The project of that name or id, if `access` may act on it. ApiError 404 or 403."""
    found = find_project(connection, name)
    if found is None:
        if access.project is not None:
            access.require("", name)
        raise ApiError(
            HTTPStatus.NOT_FOUND, f"there is no project {name!r}: gradient project list names those there are"
        )
    access.require(found.id, found.name)
    return found


@router.post("/projects", status_code=HTTPStatus.CREATED)
async def post_project(body: NewProject, web: WebDep, _access: Admin) -> CreatedProject:
    """Makes a project."""
    services = web.services

    def create(connection: sa.Connection) -> str:
        if find_project(connection, body.name) is not None:
            raise ApiError(HTTPStatus.CONFLICT, f"there is a project {body.name!r} already")
        try:
            return create_project(connection, body.name, now=services.clock.now(), ids=services.ids)
        except RegistryError as error:
            raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None

    project_id = await services.database.run(create)
    return CreatedProject(project=ProjectAnswer(id=project_id, name=body.name))


@router.get("/projects")
async def get_projects(web: WebDep, access: Reader) -> Projects:
    """Every project that the key may see."""
    found = await web.services.database.read(list_projects)
    return Projects(
        projects=[ProjectAnswer(id=one.id, name=one.name) for one in found if access.sees([one.id])]
    )


@router.post("/keys", status_code=HTTPStatus.CREATED)
async def post_key(body: NewKey, web: WebDep, access: Admin) -> CreatedKey:
    """Makes an API key."""
    services = web.services

    def create(connection: sa.Connection) -> CreatedKey:
        project = None if body.project is None else project_named(connection, body.project, access).id
        text = create_api_key(connection, body.name, project, now=services.clock.now(), ids=services.ids)
        made = find_api_key(connection, text)
        assert made is not None
        return CreatedKey(key=text, id=made.id)

    return await services.database.run(create)
