"""Cluster jobs: submitted, listed, shown, explained, watched and aborted."""

import re
from http import HTTPStatus
from typing import Annotated, Final

import sqlalchemy as sa
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from gradient_server.domain.events import Event
from gradient_server.graph.cluster_submit import ClusterSpec, MemberSpec, submit_cluster
from gradient_server.graph.cluster_views import (
    ClusterSummary,
    ClusterView,
    MemberView,
    cluster_members,
    cluster_view,
    clusters_of_evaluation,
    find_clusters,
    list_clusters,
)
from gradient_server.graph.settle import abort_cluster
from gradient_server.web.auth import Access, Reader, Writer
from gradient_server.web.bodies import RequestBody
from gradient_server.web.cluster_answers import ClusterAnswer, ClusterEntry, cluster_answer, cluster_entry
from gradient_server.web.cluster_stream import ClusterStream, Select, clusters_named, wanted_by_evaluation
from gradient_server.web.cluster_why import ClusterWhyAnswer, cluster_why, with_expected_start
from gradient_server.web.errors import ApiError, ErrorAnswer
from gradient_server.web.evaluations import find_evaluation
from gradient_server.web.hub import TooManyWatchersError
from gradient_server.web.jobs import find_job
from gradient_server.web.projects import project_named
from gradient_server.web.state import Web, WebDep
from gradient_server.web.stream import StreamedResponse

__all__ = ["router"]

router = APIRouter(tags=["clusters"])

MAX_LISTED: Final = 500
MAX_MEMBERS: Final = 1_000
MAX_NAMED: Final = 5

_JOB_KEY: Final = re.compile(r"(build|eval):[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]
Text = Annotated[str, Field(min_length=1, max_length=255)]


class NewMember(RequestBody):
    """`job` is build:ID, eval:ID, the beginning of an id, or a build's name; `pin` a worker's id or name."""

    job: Text
    role: Text
    primary: bool = False
    pin: Text | None = None


class NewCluster(RequestBody):
    """A cluster of jobs that have not started."""

    project: str = "default"
    name: Text
    same_zone: bool = False
    retry_budget: Annotated[int, Field(ge=0)] = 1
    members: Annotated[list[NewMember], Field(min_length=1, max_length=MAX_MEMBERS)]


class SubmittedCluster(BaseModel):
    """Its id."""

    cluster: str


class Clusters(BaseModel):
    """The newest first."""

    clusters: list[ClusterEntry]


class AbortedCluster(BaseModel):
    """`aborted` False: it had ended already."""

    cluster: str
    aborted: bool


_EVENTS: Final[dict[int | str, dict[str, object]]] = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "server-sent events: cluster (as `why` answers), evaluation",
    },
    503: {"model": ErrorAnswer},
}


@router.post("/clusters", status_code=HTTPStatus.CREATED)
async def post_cluster(body: NewCluster, web: WebDep, access: Writer) -> SubmittedCluster:
    """Makes a cluster of builds and evaluations that have not started."""
    services = web.services

    def submit(connection: sa.Connection) -> tuple[str, list[Event]]:
        project = project_named(connection, body.project, access)
        members = [
            MemberSpec(
                job_key=_job_key(connection, one.job, access),
                role=one.role,
                primary=one.primary,
                pin=one.pin,
            )
            for one in body.members
        ]
        spec = ClusterSpec(
            name=body.name, members=members, same_zone=body.same_zone, retry_budget=body.retry_budget
        )
        now, ids = services.clock.now(), services.ids
        submission = submit_cluster(connection, project=project.id, spec=spec, now=now, ids=ids)
        if submission.cluster_id is None:
            raise ApiError(HTTPStatus.CONFLICT, submission.refused or "the cluster was refused")
        return submission.cluster_id, submission.events

    return SubmittedCluster(cluster=await services.transact(submit))


@router.get("/clusters")
async def get_clusters(
    web: WebDep,
    access: Reader,
    project: str | None = None,
    evaluation: Annotated[str | None, Query(description="of which it wants a member")] = None,
    limit: Limit = 50,
) -> Clusters:
    """The newest clusters: of a project, of an evaluation, or of all."""

    def find(connection: sa.Connection) -> list[ClusterSummary]:
        wanted = access.project
        if project is not None:
            wanted = project_named(connection, project, access).id
        if evaluation is None:
            return list_clusters(connection, wanted, limit)
        found = clusters_of_evaluation(connection, find_evaluation(connection, evaluation, access))
        return [one for one in reversed(found) if wanted in (None, one.project_id)][:limit]

    found = await web.services.database.read(find)
    return Clusters(clusters=[cluster_entry(one) for one in found])


@router.get("/clusters/{cluster}")
async def get_cluster(cluster: str, web: WebDep, access: Reader) -> ClusterAnswer:
    """A cluster by its id, the beginning of it, or its name, of which the newest counts."""

    def find(connection: sa.Connection) -> ClusterView:
        view = cluster_view(connection, _find(connection, cluster, access).id)
        assert view is not None
        return view

    return cluster_answer(await web.services.database.read(find))


@router.get("/clusters/{cluster}/why")
async def get_why(cluster: str, web: WebDep, access: Reader) -> ClusterWhyAnswer:
    """What it waits for, or where it stands."""
    services = web.services

    def find(connection: sa.Connection) -> tuple[ClusterSummary, list[MemberView]]:
        found = _find(connection, cluster, access)
        return found, cluster_members(connection, found.id)

    summary, members = await services.database.read(find)
    return await with_expected_start(services, cluster_why(services, summary, members, access))


@router.post("/clusters/{cluster}/abort")
async def post_abort(cluster: str, web: WebDep, access: Writer) -> AbortedCluster:
    """Ends it: no member of it runs or holds a worker any more."""
    services = web.services

    def abort(connection: sa.Connection) -> tuple[AbortedCluster, list[Event]]:
        found = _find(connection, cluster, access).id
        events = abort_cluster(connection, found, now=services.clock.now(), ids=services.ids)
        return AbortedCluster(cluster=found, aborted=events is not None), events or []

    return await services.transact(abort)


@router.get("/clusters/{cluster}/events", response_class=StreamedResponse, responses=_EVENTS)
async def get_events(cluster: str, web: WebDep, access: Reader) -> StreamedResponse:
    """Where it stands, as often as that changes, until it has ended."""
    found = await web.services.database.read(lambda connection: _find(connection, cluster, access).id)
    return _stream(web, clusters_named(found), access)


@router.get("/evaluations/{evaluation}/clusters/events", response_class=StreamedResponse, responses=_EVENTS)
async def get_evaluation_events(evaluation: str, web: WebDep, access: Reader) -> StreamedResponse:
    """The same of every cluster of which the evaluation wants a member, until it and they have ended."""
    found = await web.services.database.read(
        lambda connection: find_evaluation(connection, evaluation, access)
    )
    return _stream(web, wanted_by_evaluation(found), access)


def _stream(web: Web, select: Select, access: Access) -> StreamedResponse:
    try:
        web.hub.require_room()
    except TooManyWatchersError:
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "too many watch already: ask for the cluster itself, now and then",
        ) from None
    stream = ClusterStream(web.services, web.hub, select, access)
    return StreamedResponse(stream.run(), "text/event-stream")


def _job_key(connection: sa.Connection, text: str, access: Access) -> str:
    """The job that `text` means; of a whole key, `submit_cluster` itself says what is wrong with it."""
    return text if _JOB_KEY.fullmatch(text) else find_job(connection, text, access).job


def _find(connection: sa.Connection, text: str, access: Access) -> ClusterSummary:
    """The cluster that `text` means, of those that may be seen. ApiError 404 for none, 409 for several."""
    found = find_clusters(connection, text, access.project)
    if not found:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"there is no cluster {text!r}: gradient cluster list shows those there are",
        )
    exact = [one for one in found if one.id == text]
    if len(found) > 1 and not exact:
        named = ", ".join(f"{one.id} ({one.name})" for one in found[:MAX_NAMED])
        raise ApiError(HTTPStatus.CONFLICT, f"{text!r} may mean {named}: write more of it")
    return (exact or found)[0]
