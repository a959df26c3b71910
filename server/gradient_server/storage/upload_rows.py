"""What the database knows of uploads: who may upload what, what is held, what was committed."""

import enum
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.worker import UploadRequest

from gradient_server.db.queries import uploads
from gradient_server.db.queries.cached_paths import (
    CachedPath,
    held_paths,
    object_in_use,
    put_path,
    touch_paths,
)
from gradient_server.db.tables import derivation_build, derivation_output
from gradient_server.domain.events import Event, PathStored
from gradient_server.domain.job import split_job_key
from gradient_server.graph.content import STORE_PATH
from gradient_server.storage.nar_store import StoredObject

if TYPE_CHECKING:
    from gradient_server.net.services import Services
    from gradient_server.net.session import HeldAssignment

__all__ = ["Answer", "UploadRows", "unfit_references"]

MAX_REFERENCES: Final = 20_000
"""Of one path: more inputs than the message of a job can name."""


class Answer(enum.Enum):
    """What the database says to an upload request."""

    NEW = "the bytes are wanted, all of them"
    WANTED = "the bytes are wanted, but for those that came earlier"
    HELD = "the path is held: Skip"
    COMMITTED = "this very upload was committed before"
    NOT_ITS_OUTPUT = "the job has no such output"
    REUSED = "the request id belongs to another upload"


class UploadRows:
    """The rows of `upload`, and the row of a path that an upload ends in."""

    def __init__(self, services: "Services") -> None:
        self._services = services

    async def start(
        self,
        worker_id: str,
        requests: Sequence[tuple["HeldAssignment", UploadRequest]],
        lease_until: float,
    ) -> list[Answer]:
        """Enters the requests, or finds them again. A member's upload is never answered Skip."""

        def work(connection: sa.Connection) -> list[Answer]:
            return [
                self._start(connection, worker_id, held, message, lease_until) for held, message in requests
            ]

        return await self._services.database.run(work)

    def _start(
        self,
        connection: sa.Connection,
        worker_id: str,
        held: "HeldAssignment",
        message: UploadRequest,
        lease_until: float,
    ) -> Answer:
        if held.outputs is None and held.kind is JobKind.BUILD:
            held.outputs = _outputs_of(connection, split_job_key(held.job_id)[1])
        if not _may_upload(held, message.path):
            return Answer.NOT_ITS_OUTPUT
        found = uploads.start_upload(
            connection,
            request=message.request_id,
            worker=worker_id,
            assignment=message.assignment_id,
            path=message.path,
            lease_until=lease_until,
            now=self._services.clock.now(),
        )
        if found is None:
            return Answer.REUSED
        if found.committed or (held.is_member and found.object is not None):
            return Answer.COMMITTED
        if not held.is_member and held_paths(connection, [message.path]):
            uploads.delete_upload(connection, message.request_id)
            touch_paths(connection, [message.path], now=self._services.clock.now())
            return Answer.HELD
        return Answer.NEW if found.is_new else Answer.WANTED

    async def commit(
        self, request: UploadRequest, stored: StoredObject, references: Sequence[str], *, is_member: bool
    ) -> str | None:
        """The object is durable: so is the path from now on, or, of a member, with its verdict.

        Returns the name of an object that nothing uses any more.
        """

        def work(connection: sa.Connection) -> tuple[str | None, list[Event]]:
            if is_member:
                return self._keep_for_verdict(connection, request, stored, references), []
            uploads.finish_and_commit_upload(
                connection,
                request.request_id,
                nar_hash=stored.nar_hash,
                nar_size=stored.nar_size,
                object_name=stored.object,
            )
            entry = CachedPath(
                path=request.path,
                nar_hash=stored.nar_hash,
                nar_size=stored.nar_size,
                file_size=stored.file_size,
                compression=stored.compression,
                object=stored.object,
                references=tuple(references),
            )
            replaced = put_path(connection, entry, now=self._services.clock.now())
            return replaced, [PathStored(request.path, stored.nar_size)]

        return await self._services.transact(work)

    @staticmethod
    def _keep_for_verdict(
        connection: sa.Connection, request: UploadRequest, stored: StoredObject, references: Sequence[str]
    ) -> str | None:
        """Returns the object, to be deleted, where no verdict will come and nothing else uses it."""
        waits = uploads.waits_for_verdict(connection, request.assignment_id)
        uploads.finish_upload(
            connection,
            request.request_id,
            nar_hash=stored.nar_hash,
            nar_size=stored.nar_size,
            object_name=stored.object,
            file_size=stored.file_size,
            compression=stored.compression,
            references=references,
        )
        if waits:
            return None
        # Its attempt ended while the last bytes came.
        uploads.delete_upload(connection, request.request_id)
        return None if object_in_use(connection, stored.object) else stored.object

    async def extend(self, request_ids: Sequence[str], lease_until: float) -> None:
        """Their session ended: what arrived is kept so long."""

        def work(connection: sa.Connection) -> None:
            for request_id in request_ids:
                uploads.extend_lease(connection, request_id, lease_until=lease_until)

        await self._services.database.run(work)

    async def forget(self, request_id: str) -> None:
        """There is nothing left of it."""
        await self._services.database.run(lambda connection: uploads.delete_upload(connection, request_id))

    async def known(self) -> list[str]:
        """Every request with a row: what a server finds when it starts."""
        found = await self._services.database.read(uploads.list_uploads)
        return [upload.request for upload in found]

    async def expired(self) -> list[str]:
        """Those whose lease has run out."""
        now = self._services.clock.now()
        found = await self._services.database.read(partial(uploads.expired_uploads, now=now))
        return [upload.request for upload in found]


def _may_upload(held: "HeldAssignment", path: str) -> bool:
    """A build its outputs, an evaluation its source: nobody replaces what others made."""
    if held.kind is JobKind.EVAL:
        return path.endswith("-source") and STORE_PATH.fullmatch(path) is not None
    return held.outputs is not None and path in held.outputs


def _outputs_of(connection: sa.Connection, build: str) -> frozenset[str]:
    output = derivation_output.c
    query = sa.select(output.path).join(derivation_build, derivation_build.c.derivation == output.derivation)
    return frozenset(connection.scalars(query.where(derivation_build.c.id == build)))


def unfit_references(references: Sequence[str]) -> str | None:
    """Why these cannot be the references of a path, in one line; None where they can."""
    if len(references) > MAX_REFERENCES:
        return f"{len(references)} references, at most {MAX_REFERENCES} are taken"
    for reference in references:
        if STORE_PATH.fullmatch(reference) is None:
            return f"the reference {reference[:80]!r} is not a store path"
    return None
