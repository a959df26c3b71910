"""Projects and their tasks, workers and their tokens, drains, API keys (operations.md; protocol.md).

A token or key exists as text once, in what its maker returns; stored is its SHA-256. Whatever a user
can get wrong raises RegistryError, whose text is one line for that user.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import sqlalchemy as sa
from gradient_protocol.ids import IdSource

from gradient_server.db.queries.upsert import insert_or_ignore, insert_or_update
from gradient_server.db.tables import api_key, project, task, worker, worker_registration

__all__ = [
    "SERVER_PEER",
    "ApiKey",
    "Drain",
    "Project",
    "Registration",
    "RegistryError",
    "Revocation",
    "WorkerRow",
    "clear_drain",
    "create_api_key",
    "create_project",
    "ensure_task",
    "find_api_key",
    "find_project",
    "find_worker",
    "hash_secret",
    "list_api_keys",
    "list_projects",
    "list_workers",
    "note_worker_seen",
    "register_worker",
    "registrations",
    "revoke_api_key",
    "revoke_worker",
    "set_drain",
]

# The peer that base workers are registered with: they serve every project (protocol.md, Handshake).
SERVER_PEER = "server"
TOKEN_BYTES = 32
_ID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

RandomBytes = Callable[[int], bytes]


class RegistryError(Exception):
    """What was asked for cannot be done; one line says why."""


@dataclass(frozen=True, slots=True)
class Project:
    """A project, by its id and its name."""

    id: str
    name: str
    created_at: float


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker's registration. The token is not kept anywhere: show it now.

    `renewed`: there was one with this peer, whose token is good no more.
    """

    worker_id: str
    peer: str
    token: str = field(repr=False)
    renewed: bool

    @property
    def peers_line(self) -> str:
        """The line for the worker's peers file."""
        return f"{self.peer}:{self.token}"


@dataclass(frozen=True, slots=True)
class Revocation:
    """The peers that no longer answer for a worker."""

    worker_id: str
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Since when, why, and until when (wall seconds; None: no deadline) a worker is drained."""

    since: float
    reason: str
    deadline: float | None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A registered worker; `peers` are those whose tokens are good today."""

    id: str
    name: str
    created_at: float
    last_seen_at: float | None
    peers: tuple[str, ...]
    drain: Drain | None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key of the HTTP API, without its text. `project` None: good for every project."""

    id: str
    name: str
    project: str | None
    created_at: float
    revoked_at: float | None


def hash_secret(text: str) -> bytes:
    """What is stored of a token or key."""
    return hashlib.sha256(text.encode()).digest()


def _new_secret(random_bytes: RandomBytes) -> str:
    return base64.urlsafe_b64encode(random_bytes(TOKEN_BYTES)).decode().rstrip("=")


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RegistryError(
            f"{name!r} cannot name a {what}: use at most 63 letters, digits, '.', '_', '-', no sign first"
        )


def _check_project(connection: sa.Connection, project_id: str) -> None:
    if connection.scalar(sa.select(project.c.id).where(project.c.id == project_id)) is None:
        raise RegistryError(f"there is no project with the id {project_id!r}")


def create_project(connection: sa.Connection, name: str, *, now: float, ids: IdSource) -> str:
    """Makes a project and returns its id. RegistryError if the name is taken or unusable."""
    _check_name("project", name)
    if name == SERVER_PEER:
        raise RegistryError(f"no project can be called {SERVER_PEER!r}: it names the server itself as a peer")
    if find_project(connection, name) is not None:
        raise RegistryError(f"there is a project {name!r} already")
    new = ids.new()
    connection.execute(project.insert().values(id=new, name=name, created_at=now))
    return new


def find_project(connection: sa.Connection, name: str) -> Project | None:
    """The project of that name, or of that id."""
    query = sa.select(project).where((project.c.name == name) | (project.c.id == name))
    found = connection.execute(query.order_by(project.c.name != name)).first()
    return None if found is None else Project(found.id, found.name, found.created_at)


def list_projects(connection: sa.Connection) -> list[Project]:
    """Every project, by name."""
    query = sa.select(project).order_by(project.c.name)
    return [Project(row.id, row.name, row.created_at) for row in connection.execute(query)]


def ensure_task(connection: sa.Connection, project_id: str, name: str, *, now: float, ids: IdSource) -> str:
    """The id of the project's task of that name, made if it is not there."""
    _check_name("task", name)
    query = sa.select(task.c.id).where(task.c.project == project_id, task.c.name == name)
    found = connection.scalar(query)
    if found is not None:
        return str(found)
    values = {"id": ids.new(), "project": project_id, "name": name, "created_at": now}
    connection.execute(insert_or_ignore(connection, task).values(values))
    return str(connection.execute(query).scalar_one())


def register_worker(
    connection: sa.Connection,
    name: str,
    worker_id: str | None,
    peer: str,
    *,
    now: float,
    ids: IdSource,
    random_bytes: RandomBytes = secrets.token_bytes,
) -> Registration:
    """Registers a worker with a peer, a project's id or SERVER_PEER, and makes its token.

    Without `worker_id` an id is taken from the worker of that name, or made. Registering again makes
    a new token; the old one is good no more.
    """
    _check_name("worker", name)
    if _ID.fullmatch(name):
        raise RegistryError(f"{name} is an id: write gradient worker register NAME --worker-id {name}")
    if peer != SERVER_PEER:
        _check_project(connection, peer)
    worker_id = _ensure_worker(connection, name, worker_id, now=now, ids=ids)
    registered = worker_registration.c
    renewed = connection.scalar(
        sa.select(registered.peer).where(
            registered.worker == worker_id, registered.peer == peer, registered.revoked_at.is_(None)
        )
    )
    token = _new_secret(random_bytes)
    connection.execute(
        insert_or_update(connection, worker_registration, key=["worker", "peer"]).values(
            worker=worker_id, peer=peer, token_sha256=hash_secret(token), created_at=now, revoked_at=None
        )
    )
    return Registration(worker_id, peer, token, renewed=renewed is not None)


def _ensure_worker(
    connection: sa.Connection, name: str, worker_id: str | None, *, now: float, ids: IdSource
) -> str:
    by_name = connection.scalar(sa.select(worker.c.id).where(worker.c.name == name))
    if by_name is not None and worker_id in (None, by_name):
        return str(by_name)
    if by_name is not None:
        raise RegistryError(f"the name {name!r} belongs to the worker {by_name}: choose another")
    if worker_id is None:
        worker_id = ids.new()
    by_id = connection.scalar(sa.select(worker.c.name).where(worker.c.id == worker_id))
    if by_id is not None:
        raise RegistryError(f"the worker {worker_id} is registered as {by_id!r}: use that name")
    connection.execute(worker.insert().values(id=worker_id, name=name, created_at=now))
    return worker_id


def registrations(connection: sa.Connection, worker_id: str) -> dict[str, bytes]:
    """The peers that a worker may answer for, each with the SHA-256 of its token; {} if none is left."""
    row = worker_registration.c
    query = sa.select(row.peer, row.token_sha256).where(row.worker == worker_id, row.revoked_at.is_(None))
    return {peer: bytes(digest) for peer, digest in connection.execute(query.order_by(row.peer))}


def revoke_worker(connection: sa.Connection, name: str, peer: str | None, *, now: float) -> Revocation:
    """Ends a worker's registration with a peer, or with all (`peer` None)."""
    found = find_worker(connection, name)
    if found is None:
        raise RegistryError(f"there is no worker {name!r}")
    row = worker_registration.c
    wanted = (row.worker == found.id) & row.revoked_at.is_(None)
    if peer is not None:
        wanted &= row.peer == peer
    revoked = connection.scalars(
        worker_registration.update().where(wanted).values(revoked_at=now).returning(row.peer)
    ).all()
    if not revoked:
        raise RegistryError(f"the worker {name!r} has no registration that could be revoked")
    return Revocation(found.id, tuple(sorted(revoked)))


def find_worker(connection: sa.Connection, name: str) -> WorkerRow | None:
    """The worker of that name, or of that id."""
    found = _workers(connection, (worker.c.name == name) | (worker.c.id == name))
    return next((row for row in found if row.name == name), found[0] if found else None)


def list_workers(connection: sa.Connection) -> list[WorkerRow]:
    """Every worker that was ever registered, by name."""
    return _workers(connection, sa.true())


def _workers(connection: sa.Connection, wanted: sa.ColumnElement[bool]) -> list[WorkerRow]:
    good = worker_registration.c.revoked_at.is_(None)
    peers: dict[str, list[str]] = {}
    joined = sa.join(worker, worker_registration)
    query = sa.select(worker.c.id, worker_registration.c.peer).select_from(joined).where(wanted, good)
    for worker_id, peer in connection.execute(query.order_by(worker_registration.c.peer)):
        peers.setdefault(worker_id, []).append(peer)
    return [
        WorkerRow(
            id=row.id,
            name=row.name,
            created_at=row.created_at,
            last_seen_at=row.last_seen_at,
            peers=tuple(peers.get(row.id, ())),
            drain=None
            if row.draining_since is None
            else Drain(row.draining_since, row.draining_reason or "", row.draining_deadline),
        )
        for row in connection.execute(sa.select(worker).where(wanted).order_by(worker.c.name))
    ]


def note_worker_seen(connection: sa.Connection, worker_id: str, *, now: float) -> None:
    """The worker is connected, or was until now."""
    connection.execute(worker.update().where(worker.c.id == worker_id).values(last_seen_at=now))


def set_drain(
    connection: sa.Connection, name: str, reason: str, *, now: float, deadline: float | None = None
) -> WorkerRow:
    """Gives the worker no new jobs; what runs at `deadline` (wall seconds) is to be aborted then.

    Draining it again replaces reason and deadline and keeps since when.
    """
    return _drain(
        connection,
        name,
        draining_since=sa.func.coalesce(worker.c.draining_since, now),
        draining_reason=reason,
        draining_deadline=deadline,
    )


def clear_drain(connection: sa.Connection, name: str) -> WorkerRow:
    """Lets the worker work again."""
    return _drain(connection, name, draining_since=None, draining_reason=None, draining_deadline=None)


def _drain(connection: sa.Connection, name: str, **values: object) -> WorkerRow:
    found = find_worker(connection, name)
    if found is None:
        raise RegistryError(f"there is no worker {name!r}")
    connection.execute(worker.update().where(worker.c.id == found.id).values(**values))
    return _workers(connection, worker.c.id == found.id)[0]


def create_api_key(
    connection: sa.Connection,
    name: str,
    project_id: str | None,
    *,
    now: float,
    ids: IdSource,
    random_bytes: RandomBytes = secrets.token_bytes,
) -> str:
    """Makes a key, bound to a project or good for all (None), and returns its text."""
    _check_name("key", name)
    if project_id is not None:
        _check_project(connection, project_id)
    text = _new_secret(random_bytes)
    connection.execute(
        api_key.insert().values(
            id=ids.new(), name=name, project=project_id, key_sha256=hash_secret(text), created_at=now
        )
    )
    return text


def find_api_key(connection: sa.Connection, text: str) -> ApiKey | None:
    """The key with this text, unless it is revoked. Looked up by its hash, compared in constant time."""
    digest = hash_secret(text)
    row = connection.execute(
        sa.select(api_key).where(api_key.c.key_sha256 == digest, api_key.c.revoked_at.is_(None))
    ).first()
    if row is None or not hmac.compare_digest(bytes(row.key_sha256), digest):
        return None
    return ApiKey(row.id, row.name, row.project, row.created_at, row.revoked_at)


def list_api_keys(connection: sa.Connection) -> list[ApiKey]:
    """Every key, the oldest first."""
    query = sa.select(api_key).order_by(api_key.c.created_at, api_key.c.id)
    return [
        ApiKey(row.id, row.name, row.project, row.created_at, row.revoked_at)
        for row in connection.execute(query)
    ]


def revoke_api_key(connection: sa.Connection, key_id: str, *, now: float) -> bool:
    """Ends a key by its id. False if there is none that is good."""
    wanted = (api_key.c.id == key_id) & api_key.c.revoked_at.is_(None)
    ended = connection.execute(api_key.update().where(wanted).values(revoked_at=now).returning(api_key.c.id))
    return ended.first() is not None
