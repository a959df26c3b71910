"""One job: what became of it, why it waits, its log, its end."""

from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Final

import sqlalchemy as sa
from fastapi import APIRouter, Query
from pydantic import BaseModel

from gradient_server.db.queries.registry import find_project
from gradient_server.db.tables import evaluation
from gradient_server.domain.events import Event
from gradient_server.graph.aborts import abort_job
from gradient_server.graph.job_views import JobView, find_jobs, job_view
from gradient_server.web.auth import Access, Reader, Writer
from gradient_server.web.cluster_status import why_of_cluster
from gradient_server.web.errors import ApiError
from gradient_server.web.job_log import log_stream
from gradient_server.web.live import live_of_job
from gradient_server.web.state import WebDep
from gradient_server.web.stream import StreamedResponse
from gradient_server.web.why import WhyAnswer, why_answer

__all__ = ["JobAnswer", "find_job", "router"]

router = APIRouter(tags=["jobs"])

MAX_NAMED: Final = 5


class AttemptAnswer(BaseModel):
    """One assignment of the job. `outcome` and `log_bytes` (uncompressed) are None while it runs."""

    assignment: str
    worker: str | None
    started_at: float
    accepted_at: float | None
    finished_at: float | None
    outcome: str | None
    error: str | None
    log_bytes: int | None
    log_truncated: bool


class JobOutputAnswer(BaseModel):
    """An output of a build; `nar_size` in bytes once it is held."""

    name: str
    path: str
    nar_size: int | None


class JobAnswer(BaseModel):
    """A job. `worker` has it, or had it last; attempts with the newest first; `evaluations` want it.

    `done` of `total` is what its present `stage` counts; null where it counts nothing.
    """

    job: str
    kind: str
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
    worker: str | None
    stage: str | None
    done: int | None
    total: int | None
    attempts: list[AttemptAnswer]
    outputs: list[JobOutputAnswer]


class AbortedJob(BaseModel):
    """`aborted` False: it had ended already."""

    job: str
    aborted: bool


@router.get("/jobs/{job}")
async def get_job(job: str, web: WebDep, access: Reader) -> JobAnswer:
    """A job by `build:ID`, `eval:ID`, an id, the beginning of one, or a build's name."""
    view = await web.services.database.read(
        lambda connection: _as_seen(connection, find_job(connection, job, access), access)
    )
    attempts = [
        AttemptAnswer(
            assignment=one.assignment,
            worker=one.worker,
            started_at=one.started_at,
            accepted_at=one.accepted_at,
            finished_at=one.finished_at,
            outcome=one.outcome,
            error=one.error,
            log_bytes=one.log_bytes,
            log_truncated=one.log_truncated,
        )
        for one in view.attempts
    ]
    shared = {name: getattr(view, name) for name in JobAnswer.model_fields if name in JobView.__slots__}
    live = live_of_job(web.services, view.job)
    shared |= {
        "kind": str(view.kind),
        "worker": attempts[0].worker if attempts else None,
        "stage": live.stage,
        "done": live.done,
        "total": live.total,
        "attempts": attempts,
        "outputs": [
            JobOutputAnswer(name=one.name, path=one.path, nar_size=one.nar_size) for one in view.outputs
        ],
    }
    return JobAnswer(**shared)


@router.get("/jobs/{job}/why")
async def get_why(job: str, web: WebDep, access: Reader) -> WhyAnswer:
    """Why it still waits, or why it went where it went."""
    view = await web.services.database.read(lambda connection: find_job(connection, job, access))
    cluster = None
    if view.cluster is not None:
        cluster = await why_of_cluster(web.services, view.cluster, access)
    return why_answer(web.services, view, cluster, access)


@router.get(
    "/jobs/{job}/log",
    response_class=StreamedResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "its bytes"}},
)
async def get_log(
    job: str,
    web: WebDep,
    access: Reader,
    follow: Annotated[bool, Query(description="go on as it grows, until the job ends")] = False,
    attempt: Annotated[str | None, Query(description="an assignment's id; the newest by default")] = None,
) -> StreamedResponse:
    """The log of the newest attempt, as the job wrote it."""
    view = await web.services.database.read(lambda connection: find_job(connection, job, access))
    if attempt is not None and attempt not in {one.assignment for one in view.attempts}:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"{view.job} has no attempt {attempt!r}: gradient show names those there are",
        )
    if not view.attempts and not follow:
        raise ApiError(
            HTTPStatus.NOT_FOUND, f"{view.name} has no log, for no worker has had it: gradient why {view.job}"
        )
    content = log_stream(web.services, view.job, attempt, follow=follow)
    return StreamedResponse(content, "text/plain; charset=utf-8")


@router.post("/jobs/{job}/abort")
async def post_abort(job: str, web: WebDep, access: Writer) -> AbortedJob:
    """Ends a job for everyone who wants it; an evaluation with what nobody else wants of it."""
    services = web.services

    def abort(connection: sa.Connection) -> tuple[AbortedJob, list[Event]]:
        view = find_job(connection, job, access)
        others = [project for project in view.projects if not _may_act(connection, project, access)]
        if others:
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                "other projects want this build too: abort your evaluation, or use a server key",
            )
        events = abort_job(connection, view.job, now=services.clock.now(), ids=services.ids)
        return AbortedJob(job=view.job, aborted=events is not None), events or []

    return await services.transact(abort)


def _as_seen(connection: sa.Connection, view: JobView, access: Access) -> JobView:
    """Without the names of other projects, and their evaluations, that want the job too."""
    if access.project is None:
        return view
    row = evaluation.c
    query = sa.select(row.id).where(row.id.in_(view.evaluations), row.project == access.project)
    mine = set(connection.scalars(query))
    return replace(
        view,
        projects=[project for project in view.projects if _may_act(connection, project, access)],
        evaluations=[one for one in view.evaluations if one in mine],
    )


def _may_act(connection: sa.Connection, project: str, access: Access) -> bool:
    if access.project is None:
        return True
    found = find_project(connection, project)
    return found is not None and found.id == access.project


def find_job(connection: sa.Connection, text: str, access: Access) -> JobView:
    """The job that `text` means, of those that may be seen. ApiError 404 for none, 409 for several.

    To a key that is bound to a project, a build is wanted by that project alone.
    """
    found = []
    for job_key in find_jobs(connection, text):
        view = job_view(connection, job_key)
        if view is not None and any(_may_act(connection, project, access) for project in view.projects):
            found.append(view)
    if not found:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"there is no job {text!r}: write build:ID, eval:ID, 6 characters or more of an id, or a build's"
            " name; gradient status shows what runs",
        )
    exact = [view for view in found if text in (view.job, view.job.partition(":")[2])]
    if len(found) > 1 and not exact:
        named = ", ".join(f"{view.job} ({view.name})" for view in found[:MAX_NAMED])
        raise ApiError(HTTPStatus.CONFLICT, f"{text!r} may mean {named}: write more of it")
    return (exact or found)[0]
