"""Uploads under way: who sends what, until when its partial object is kept, and what a finished one
of a cluster's member waits with until the verdict (protocol.md, "Transfers", "Build steps").

What every upload passes is kept as text, for one comes with almost every build.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from gradient_protocol.kinds import Compression

from gradient_server.db.hot import HotStatement, array_of, execute_text, texts_in
from gradient_server.db.queries.cached_paths import CachedPath, object_in_use
from gradient_server.db.tables import dispatched_job, upload

__all__ = [
    "Upload",
    "commit_upload",
    "delete_stranded_uploads",
    "delete_upload",
    "delete_uploads_of",
    "drop_waiting_uploads",
    "expired_uploads",
    "extend_lease",
    "find_upload",
    "finish_and_commit_upload",
    "finish_upload",
    "list_uploads",
    "start_upload",
    "uploads_of",
    "waits_for_verdict",
]

_IN = texts_in("assignment", "assignments")


@dataclass(frozen=True, slots=True)
class Upload:
    """A row of `upload`. `object` is set once all bytes were verified; `committed`: answered Ok.

    `is_new`: `start_upload` has just entered it, so nothing of it can be anywhere.
    """

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
    file_size: int | None = None
    compression: str | None = None
    references: Sequence[str] | None = None
    is_new: bool = False

    def held(self) -> CachedPath:
        """The path that its object becomes. ValueError for one that is not finished."""
        if (
            self.object is None
            or self.nar_hash is None
            or self.nar_size is None
            or self.file_size is None
            or self.compression is None
        ):
            raise ValueError(f"the upload {self.request} is not finished")
        return CachedPath(
            path=self.path,
            nar_hash=self.nar_hash,
            nar_size=self.nar_size,
            file_size=self.file_size,
            compression=Compression(self.compression),
            object=self.object,
            references=tuple(self.references or ()),
        )


_ENTER = HotStatement(
    """
INSERT INTO upload (request, worker, assignment, path, created_at, lease_until, committed)
VALUES (:request, :worker, :assignment, :path, :now, :lease_until, false)
ON CONFLICT (request) DO NOTHING RETURNING request
"""
)


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
    fields = {"request": request, "worker": worker, "assignment": assignment, "path": path}
    if execute_text(connection, _ENTER, {**fields, "now": now, "lease_until": lease_until}):
        return Upload(
            request=request,
            worker=worker,
            assignment=assignment,
            path=path,
            created_at=now,
            lease_until=lease_until,
            nar_hash=None,
            nar_size=None,
            object=None,
            committed=False,
            is_new=True,
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
    connection: sa.Connection,
    request: str,
    *,
    nar_hash: str,
    nar_size: int,
    object_name: str,
    file_size: int | None = None,
    compression: str | None = None,
    references: Sequence[str] = (),
) -> bool:
    """All bytes were verified and are durable as `object_name`. False if there is no such upload.

    The last three wait with a cluster member's upload for the verdict that makes it the path's object.
    """
    row = upload.c
    changed = upload.update().where(row.request == request)
    changed = changed.values(
        nar_hash=nar_hash,
        nar_size=nar_size,
        object=object_name,
        file_size=file_size,
        compression=compression,
        references=list(references),
    )
    return connection.execute(changed.returning(row.request)).first() is not None


_FINISH_AND_COMMIT = HotStatement(
    """
UPDATE upload SET nar_hash = :nar_hash, nar_size = :nar_size, object = :object, committed = true
WHERE request = :request RETURNING request
"""
)


def finish_and_commit_upload(
    connection: sa.Connection, request: str, *, nar_hash: str, nar_size: int, object_name: str
) -> bool:
    """`finish_upload` and `commit_upload` of one that waits for no verdict. False if there is none."""
    fields = {"request": request, "nar_hash": nar_hash, "nar_size": nar_size, "object": object_name}
    return bool(execute_text(connection, _FINISH_AND_COMMIT, fields))


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


def waits_for_verdict(connection: sa.Connection, assignment: str) -> bool:
    """Whether a member's assignment is open. Its row is locked, so that the verdict sees the upload."""
    row = dispatched_job.c
    query = sa.select(row.id).where(row.id == assignment, row.finished_at.is_(None))
    return connection.execute(query.with_for_update(read=True)).first() is not None


_DROP = HotStatement(
    f"DELETE FROM upload WHERE {_IN[0]} AND NOT committed RETURNING object",  # noqa: S608 - our own words
    f"DELETE FROM upload WHERE {_IN[1]} AND NOT committed RETURNING object",  # noqa: S608 - our own words
)


def drop_waiting_uploads(connection: sa.Connection, assignments: Iterable[str]) -> list[str]:
    """Forgets what these members uploaded and no verdict has committed.

    Returns the objects that nothing names any more, to be deleted after the commit.
    """
    rows = execute_text(connection, _DROP, {"assignments": array_of(connection, assignments)})
    objects = sorted({row[0] for row in rows if row[0] is not None})
    return [name for name in objects if not object_in_use(connection, name)]


def delete_stranded_uploads(connection: sa.Connection) -> list[str]:
    """Forgets finished uploads that no verdict will commit; the objects that nothing names any more."""
    row = upload.c
    opened = sa.select(dispatched_job.c.id).where(
        dispatched_job.c.id == row.assignment, dispatched_job.c.finished_at.is_(None)
    )
    stranded = upload.delete().where(row.object.is_not(None), ~row.committed, ~opened.exists())
    objects = connection.scalars(stranded.returning(row.object)).all()
    return [name for name in sorted(set(objects)) if not object_in_use(connection, name)]


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
    upload.c.file_size,
    upload.c.compression,
    upload.c.references,
)


def _all(connection: sa.Connection, statement: sa.Executable) -> list[Upload]:
    return [Upload(**found) for found in connection.execute(statement).mappings()]


def _one(connection: sa.Connection, statement: sa.Executable) -> Upload | None:
    found = connection.execute(statement).mappings().first()
    return None if found is None else Upload(**found)
