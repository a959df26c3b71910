"""Evaluations: asked for, listed, shown, watched and aborted."""

import re
from http import HTTPStatus
from typing import Annotated, Final, Literal

import sqlalchemy as sa
from fastapi import APIRouter, Query, Response
from gradient_protocol.messages.shapes import GitSource, PathSource, Source
from pydantic import BaseModel, Field, field_validator

from gradient_server.db.queries.cached_paths import held_paths
from gradient_server.db.queries.registry import ensure_task
from gradient_server.db.tables import evaluation as evaluation_table
from gradient_server.domain.events import Event
from gradient_server.graph.aborts import abort_evaluation
from gradient_server.graph.submit import submit_evaluation
from gradient_server.graph.views import (
    EvaluationView,
    evaluation_view,
    list_evaluations,
)
from gradient_server.web.auth import Access, Reader, Writer
from gradient_server.web.bodies import RequestBody
from gradient_server.web.errors import ApiError, ErrorAnswer
from gradient_server.web.evaluation_views import (
    EvaluationAnswer,
    EvaluationEntry,
    evaluation_json,
    list_entry,
)
from gradient_server.web.events import event_stream
from gradient_server.web.hub import TooManyWatchersError
from gradient_server.web.projects import Name, project_named
from gradient_server.web.state import WebDep
from gradient_server.web.stream import StreamedResponse

__all__ = ["find_evaluation", "router", "visible_view"]

router = APIRouter(tags=["evaluations"])

MAX_LISTED: Final = 500
MAX_ATTRS: Final = 1_000
MIN_PREFIX: Final = 6
MAX_MATCHES: Final = 20
# What git would fetch from; a remote helper (`ext::`) would run a command on the worker.
_GIT_URL: Final = re.compile(r"(https?|ssh|git|file)://[^\s]+|[A-Za-z0-9._-]+@[A-Za-z0-9._-]+:[^\s]+")

Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]


class PathSourceRequest(RequestBody):
    """A source tree that was uploaded."""

    type: Literal["Path"]
    path: Annotated[str, Field(pattern=r"^[0-9a-z]{32}-source$")]


class GitSourceRequest(RequestBody):
    """A source tree that a worker is to clone; without `rev`, the remote's default branch."""

    type: Literal["Git"]
    url: Annotated[str, Field(max_length=2_000)]
    rev: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,254}$")] | None = None

    @field_validator("url")
    @classmethod
    def _fetchable(cls, url: str) -> str:
        if not _GIT_URL.fullmatch(url):
            raise ValueError("write https://..., ssh://..., git://..., file://... or user@host:path")
        return url


class NewEvaluation(RequestBody):
    """What to evaluate and build. No `attrs` means every build."""

    project: str = "default"
    task: Name = "main"
    source: Annotated[PathSourceRequest | GitSourceRequest, Field(discriminator="type")]
    attrs: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=255)]],
        Field(max_length=MAX_ATTRS, default_factory=list),
    ]
    prioritized: bool = False


class SubmittedEvaluation(BaseModel):
    """Its id."""

    evaluation: str


class Evaluations(BaseModel):
    """The newest first."""

    evaluations: list[EvaluationEntry]


class AbortedEvaluation(BaseModel):
    """`aborted` False: it had ended already."""

    evaluation: str
    aborted: bool


@router.post("/evaluations", status_code=HTTPStatus.CREATED)
async def post_evaluation(body: NewEvaluation, web: WebDep, access: Writer) -> SubmittedEvaluation:
    """Queues an evaluation and what it will want to have built."""
    services = web.services
    source = _source(body)

    def submit(connection: sa.Connection) -> tuple[str, list[Event]]:
        now, ids = services.clock.now(), services.ids
        project = project_named(connection, body.project, access)
        if isinstance(source, PathSource) and not held_paths(connection, [source.path]):
            raise ApiError(
                HTTPStatus.CONFLICT, f"{source.path} is not held here: upload it with PUT /api/v1/sources"
            )
        return submit_evaluation(
            connection,
            project=project.id,
            task=ensure_task(connection, project.id, body.task, now=now, ids=ids),
            source=source,
            source_path=None,
            attrs=body.attrs,
            prioritized=body.prioritized,
            build_request=True,
            now=now,
            ids=ids,
        )

    return SubmittedEvaluation(evaluation=await services.transact(submit))


def _source(body: NewEvaluation) -> Source:
    if isinstance(body.source, PathSourceRequest):
        return PathSource(path=body.source.path)
    return GitSource(url=body.source.url, rev=body.source.rev)


@router.get("/evaluations")
async def get_evaluations(
    web: WebDep, access: Reader, project: str | None = None, limit: Limit = 50
) -> Evaluations:
    """The newest evaluations, of a project or of all, without their builds."""

    def find(connection: sa.Connection) -> list[EvaluationEntry]:
        wanted = access.project
        if project is not None:
            wanted = project_named(connection, project, access).id
        return [list_entry(one) for one in list_evaluations(connection, wanted, limit)]

    return Evaluations(evaluations=await web.services.database.read(find))


@router.get("/evaluations/{evaluation}", response_model=EvaluationAnswer)
async def get_evaluation(evaluation: str, web: WebDep, access: Reader) -> Response:
    """One evaluation by its id, or by the beginning of it."""
    view = await web.services.database.read(lambda connection: visible_view(connection, evaluation, access))
    content = await evaluation_json(view, web.services, outputs=True)
    return Response(content, media_type="application/json")


@router.post("/evaluations/{evaluation}/abort")
async def post_abort(evaluation: str, web: WebDep, access: Writer) -> AbortedEvaluation:
    """Ends it, with what nobody else wants of it."""
    services = web.services

    def abort(connection: sa.Connection) -> tuple[AbortedEvaluation, list[Event]]:
        found = find_evaluation(connection, evaluation, access)
        events = abort_evaluation(connection, found, now=services.clock.now(), ids=services.ids)
        return AbortedEvaluation(evaluation=found, aborted=events is not None), events or []

    return await services.transact(abort)


@router.get(
    "/evaluations/{evaluation}/events",
    response_class=StreamedResponse,
    responses={
        200: {
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "server-sent events: snapshot, build, stage, evaluating, note, log, evaluation",
        },
        503: {"model": ErrorAnswer},
    },
)
async def get_events(evaluation: str, web: WebDep, access: Reader) -> StreamedResponse:
    """What happens to it, from a snapshot to its end."""
    found = await web.services.database.read(
        lambda connection: find_evaluation(connection, evaluation, access)
    )
    try:
        web.hub.require_room()
    except TooManyWatchersError:
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "too many watch already: ask for the evaluation itself, now and then",
        ) from None
    return StreamedResponse(event_stream(web.services, web.hub, found), "text/event-stream")


def find_evaluation(connection: sa.Connection, text: str, access: Access) -> str:
    """The id that `text`, an id or the beginning of one, means. ApiError 404 for none, 409 for several."""
    row = evaluation_table.c
    prefix = text.removeprefix("eval:")
    found: list[str] = []
    if len(prefix) >= MIN_PREFIX:
        matches = sa.func.substr(row.id, 1, len(prefix)) == prefix
        query = sa.select(row.id, row.project).where(matches).order_by(row.id).limit(MAX_MATCHES)
        found = [one.id for one in connection.execute(query) if access.sees([one.project])]
    if not found:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"there is no evaluation {text!r}: GET /api/v1/evaluations lists those there are",
        )
    if len(found) > 1 and prefix not in found:
        raise ApiError(HTTPStatus.CONFLICT, f"{text!r} may mean {', '.join(found)}: write more of it")
    return prefix if prefix in found else found[0]


def visible_view(connection: sa.Connection, text: str, access: Access) -> EvaluationView:
    """The evaluation that `text` means, as `find_evaluation` finds it."""
    view = evaluation_view(connection, find_evaluation(connection, text, access))
    assert view is not None
    return view
