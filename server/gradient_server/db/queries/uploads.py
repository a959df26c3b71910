"""Uploads under way: who sends what, until when its partial object is kept, and what a finished one
of a cluster's member waits with until the verdict (protocol.md, "Transfers", "Build steps")."""

from dataclasses import dataclass

import sqlalchemy as sa

from gradient_server.db.queries.upsert import insert_or_ignore
from gradient_server.db.tables import upload

__all__ = [
    "Upload",
    "commit_upload",
    "delete_upload",
    "delete_uploads_of",
    "expired_uploads",
    "extend_lease",
    "find_upload",
    "finish_upload",
    "list_uploads",
    "start_upload",
    "uploads_of",
]


@dataclass(frozen=True, slots=True)
class Upload:
    """A row of `upload`. `object` is set once all bytes were verified; `committed`: answered Ok."""

    request: str
    worker: str
    assignment: str
    path: str
    created_at: float
    lease_until: float
    nar_hash: str | None
    nar_size: int | None
    object: str | None
    committed: bool


def start_upload(
    connection: sa.Connection,
    *,
    request: str,
    worker: str,
    assignment: str,
    path: str,
    lease_until: float,
    now: float,
) -> Upload | None:
    """Enters an upload, or finds it again with its lease renewed (a request outlives its session).

    None if the request id belongs to another worker, assignment or path: it may not be reused.
    """
    connection.execute(
        insert_or_ignore(connection, upload).values(
            request=request,
            worker=worker,
            assignment=assignment,
            path=path,
            created_at=now,
            lease_until=lease_until,
        )
    )
    row = upload.c
    mine = (row.request == request) & (row.worker == worker)
    mine &= (row.assignment == assignment) & (row.path == path)
    return _one(connection, upload.update().where(mine).values(lease_until=lease_until).returning(*_COLUMNS))


def extend_lease(connection: sa.Connection, request: str, *, lease_until: float) -> bool:
    """Bytes arrived: keep the partial object longer. False if there is no such upload."""
    row = upload.c
    changed = upload.update().where(row.request == request).values(lease_until=lease_until)
    return connection.execute(changed.returning(row.request)).first() is not None


def finish_upload(
    connection: sa.Connection, request: str, *, nar_hash: str, nar_size: int, object_name: str
) -> bool:
    """All bytes were verified and are durable as `object_name`. False if there is no such upload."""
    row = upload.c
    changed = upload.update().where(row.request == request)
    changed = changed.values(nar_hash=nar_hash, nar_size=nar_size, object=object_name)
    return connection.execute(changed.returning(row.request)).first() is not None


def commit_upload(connection: sa.Connection, request: str) -> bool:
    """The upload is answered Ok; the row stays so that a repeated request is answered the same."""
    row = upload.c
    changed = upload.update().where(row.request == request, row.object.is_not(None)).values(committed=True)
    return connection.execute(changed.returning(row.request)).first() is not None


def find_upload(connection: sa.Connection, request: str) -> Upload | None:
    """The upload of that request id."""
    return _one(connection, sa.select(*_COLUMNS).where(upload.c.request == request))


def uploads_of(connection: sa.Connection, assignment: str) -> list[Upload]:
    """The uploads of an assignment, in the order of their start."""
    row = upload.c
    query = sa.select(*_COLUMNS).where(row.assignment == assignment).order_by(row.created_at, row.request)
    return _all(connection, query)


def list_uploads(connection: sa.Connection) -> list[Upload]:
    """Every upload, in the order of their start: what a server finds when it starts."""
    query = sa.select(*_COLUMNS).order_by(upload.c.created_at, upload.c.request)
    return _all(connection, query)


def expired_uploads(connection: sa.Connection, *, now: float) -> list[Upload]:
    """Those whose lease has run out, save what waits for a cluster's verdict."""
    row = upload.c
    waiting = row.object.is_not(None) & ~row.committed
    query = (
        sa.select(*_COLUMNS).where(row.lease_until <= now, ~waiting).order_by(row.lease_until, row.request)
    )
    return _all(connection, query)


def delete_upload(connection: sa.Connection, request: str) -> bool:
    """Forgets an upload. False if there is none."""
    row = upload.c
    gone = upload.delete().where(row.request == request).returning(row.request)
    return connection.execute(gone).first() is not None


def delete_uploads_of(connection: sa.Connection, assignment: str) -> list[Upload]:
    """Forgets the uploads of an assignment that ended; returns them, for their partial objects."""
    gone = upload.delete().where(upload.c.assignment == assignment).returning(*_COLUMNS)
    return _all(connection, gone)


_COLUMNS = (
    upload.c.request,
    upload.c.worker,
    upload.c.assignment,
    upload.c.path,
    upload.c.created_at,
    upload.c.lease_until,
    upload.c.nar_hash,
    upload.c.nar_size,
    upload.c.object,
    upload.c.committed,
)


def _all(connection: sa.Connection, statement: sa.Executable) -> list[Upload]:
    return [Upload(**found) for found in connection.execute(statement).mappings()]


def _one(connection: sa.Connection, statement: sa.Executable) -> Upload | None:
    found = connection.execute(statement).mappings().first()
    return None if found is None else Upload(**found)
