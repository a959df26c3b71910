"""Workers: registered, drained, revoked; and how they stand now."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter
from pydantic import BaseModel, Field

from gradient_server.db.queries.registry import (
    SERVER_PEER,
    Registration,
    RegistryError,
    Revocation,
    WorkerRow,
    clear_drain,
    find_worker,
    register_worker,
    revoke_worker,
    set_drain,
)
from gradient_server.net.authority import worker_registered, worker_revoked
from gradient_server.net.services import Services
from gradient_server.web.auth import Access, Admin, Reader, Writer
from gradient_server.web.bodies import RequestBody
from gradient_server.web.errors import ApiError
from gradient_server.web.pool import WorkerAnswer, list_pool
from gradient_server.web.projects import Name, project_named
from gradient_server.web.state import WebDep

__all__ = ["router"]

router = APIRouter(tags=["workers"])

UUID = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
MAX_DEADLINE_SECS = 366 * 24 * 3600


class NewWorker(RequestBody):
    """A worker to register. Without `worker_id` one is made; without `project` it serves every project."""

    name: Name
    worker_id: Annotated[str, Field(pattern=UUID)] | None = None
    project: str | None = None


class RegisteredWorker(BaseModel):
    """`peers_line` goes into the worker's peers file; it is not shown again.

    `renewed`: it takes the place of one whose token is good no more.
    """

    worker_id: str
    peer_id: str
    peers_line: str
    renewed: bool


class Workers(BaseModel):
    """Registered workers by name."""

    workers: list[WorkerAnswer]


class NewDrain(RequestBody):
    """No new jobs from now on; what still runs after `deadline_secs` is requeued. `undo` ends it."""

    reason: Annotated[str, Field(max_length=500)] = ""
    deadline_secs: Annotated[float, Field(ge=0, le=MAX_DEADLINE_SECS)] | None = None
    undo: bool = False


class DrainAnswer(BaseModel):
    """The worker's drain now: the reason, and the wall time when what runs is aborted."""

    name: str
    draining_reason: str | None
    deadline: float | None


class NewRevocation(RequestBody):
    """The project whose registration ends; None: every one."""

    project: str | None = None


class RevocationAnswer(BaseModel):
    """Peers that no longer answer for the worker."""

    worker_id: str
    peers: list[str]


@router.get("/workers")
async def get_workers(web: WebDep, access: Reader) -> Workers:
    """Every worker, connected or not."""
    return Workers(workers=await list_pool(web.services, access))


@router.post("/workers", status_code=HTTPStatus.CREATED)
async def post_worker(body: NewWorker, web: WebDep, access: Writer) -> RegisteredWorker:
    """Registers a worker; a token that it had for this peer is good no more."""
    services = web.services
    if body.project is None and access.project is not None:
        raise ApiError(
            HTTPStatus.FORBIDDEN, "this key is bound to a project: name it (--project), or use a server key"
        )

    def register(connection: sa.Connection) -> Registration:
        peer = SERVER_PEER
        if body.project is not None:
            peer = project_named(connection, body.project, access).id
        now, ids = services.clock.now(), services.ids
        try:
            return register_worker(connection, body.name, body.worker_id, peer, now=now, ids=ids)
        except RegistryError as error:
            raise ApiError(HTTPStatus.CONFLICT, str(error)) from None

    made = await services.database.run(register)
    await worker_registered(services, made.worker_id)
    return RegisteredWorker(
        worker_id=made.worker_id, peer_id=made.peer, peers_line=made.peers_line, renewed=made.renewed
    )


@router.post("/workers/{name}/drain")
async def post_drain(name: str, body: NewDrain, web: WebDep, _access: Admin) -> DrainAnswer:
    """Gives the worker no new jobs, or lets it work again."""
    services = web.services
    now = services.clock.now()
    deadline = None if body.deadline_secs is None else now + body.deadline_secs
    reason = body.reason or "drained on request"

    def change(connection: sa.Connection) -> WorkerRow:
        _known(find_worker(connection, name), name)
        if body.undo:
            return clear_drain(connection, name)
        return set_drain(connection, name, reason, now=now, deadline=deadline)

    worker = await services.database.run(change)
    _tell_scheduler(services, worker)
    drain = worker.drain
    return DrainAnswer(
        name=worker.name,
        draining_reason=None if drain is None else drain.reason,
        deadline=None if drain is None else drain.deadline,
    )


def _tell_scheduler(services: Services, worker: WorkerRow) -> None:
    """A worker that is away learns of it when it comes back: the session looks at the row."""
    if worker.drain is not None:
        services.scheduler.draining(worker.id, worker.drain.reason)
        return
    session = services.sessions.get(worker.id)
    if session is None or not session.worker_draining:
        services.scheduler.undrain(worker.id)


@router.post("/workers/{name}/revoke")
async def post_revoke(
    name: str, web: WebDep, access: Writer, body: NewRevocation | None = None
) -> RevocationAnswer:
    """Ends registrations; what ran by their leave alone is aborted and requeued."""
    services = web.services
    project = None if body is None else body.project

    def revoke(connection: sa.Connection) -> Revocation:
        peer = _peer_to_revoke(connection, project, access)
        _known(find_worker(connection, name), name)
        try:
            return revoke_worker(connection, name, peer, now=services.clock.now())
        except RegistryError as error:
            raise ApiError(HTTPStatus.CONFLICT, str(error)) from None

    revoked = await services.database.run(revoke)
    await worker_revoked(services, revoked.worker_id)
    return RevocationAnswer(worker_id=revoked.worker_id, peers=_sorted(revoked.peers))


def _peer_to_revoke(connection: sa.Connection, project: str | None, access: Access) -> str | None:
    if project is not None:
        return project_named(connection, project, access).id
    # A key of a project takes back what that project gave.
    return access.project


def _sorted(peers: Sequence[str]) -> list[str]:
    return sorted(peers)


def _known(worker: WorkerRow | None, name: str) -> WorkerRow:
    if worker is None:
        raise ApiError(
            HTTPStatus.NOT_FOUND, f"there is no worker {name!r}: gradient worker list names those there are"
        )
    return worker
