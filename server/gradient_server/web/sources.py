"""Source trees: uploaded once as a zstd-compressed NAR, verified, and stored like any path."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Annotated, Final

import sqlalchemy as sa
import trio
from fastapi import APIRouter, Query, Request
from gradient_protocol.kinds import Compression
from gradient_protocol.nar import NarError
from gradient_protocol.store_paths import source_path
from pydantic import BaseModel

from gradient_server.db.queries.cached_paths import CachedPath, get_paths, put_path, touch_paths
from gradient_server.domain.events import Event, PathStored
from gradient_server.net.services import Services
from gradient_server.storage.nar_store import NarWriter, StoredObject
from gradient_server.storage.orphans import delete_unused
from gradient_server.web.auth import Reader, Writer
from gradient_server.web.errors import ApiError
from gradient_server.web.projects import project_named
from gradient_server.web.state import WebDep

__all__ = ["MAX_SOURCE_BYTES", "router"]

router = APIRouter(tags=["sources"])

MAX_SOURCE_BYTES: Final = 8 * 1024**3
# What zstd may add to data that does not compress, and more.
_SLACK_BYTES: Final = 1024 * 1024
SILENCE_SECS: Final = 60.0
_WRITE_BYTES: Final = 1024 * 1024

NarHash = Annotated[str, Query(pattern="^sha256:[0-9a-f]{64}$", description="SHA-256 of the plain NAR")]
NarSize = Annotated[int, Query(ge=0, le=MAX_SOURCE_BYTES, description="bytes of the plain NAR")]


class SourceAnswer(BaseModel):
    """Where the source tree is."""

    path: str


@router.get("/sources")
async def get_source(nar_hash: NarHash, web: WebDep, _access: Reader) -> SourceAnswer:
    """Whether the server holds the tree already."""
    path = source_path(nar_hash)
    if not await _is_held(web.services, path):
        raise ApiError(
            HTTPStatus.NOT_FOUND, f"{path} is not held: upload it with PUT /api/v1/sources?nar_hash=..."
        )
    return SourceAnswer(path=path)


@router.put("/sources", openapi_extra={"requestBody": {"content": {"application/zstd": {}}}})
async def put_source(
    *, project: str, nar_hash: NarHash, nar_size: NarSize, request: Request, web: WebDep, access: Writer
) -> SourceAnswer:
    """Takes the NAR as the body, compressed with zstd, and keeps it if it is the one that was named."""
    services = web.services
    await services.database.read(lambda connection: project_named(connection, project, access))
    path = source_path(nar_hash)
    if await _is_held(services, path):
        await _discard(request, nar_size)
        return SourceAnswer(path=path)
    async with web.uploads:
        await _store(services, request, path, nar_hash, nar_size)
    return SourceAnswer(path=path)


async def _is_held(services: Services, path: str) -> bool:
    now = services.clock.now()
    found = await services.database.read(lambda connection: get_paths(connection, [path]))
    if path not in found:
        return False

    def note(connection: sa.Connection) -> bool:
        touch_paths(connection, [path], now=now)
        return path in get_paths(connection, [path])

    # It is not to be collected before the evaluation is there that names it.
    if not await services.database.run(note):
        return False
    return await trio.to_thread.run_sync(services.nar_store.has, found[path].object)


async def _store(services: Services, request: Request, path: str, nar_hash: str, nar_size: int) -> None:
    name = f"source:{services.ids.new()}"
    # Verified at the end: an answer in the middle of the body would reach few clients.
    open_writer = partial(services.nar_store.open_writer, name, max_bytes=nar_size + _SLACK_BYTES)
    writer = await trio.to_thread.run_sync(open_writer)
    try:
        await _receive(request, writer)
        finish = partial(writer.finish, nar_hash, nar_size, writer.offset, Compression.ZSTD)
        stored = await trio.to_thread.run_sync(finish)
    except NarError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"this is not the NAR that was named: {error}") from None
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(services.nar_store.discard_partial, name)
    await _record(services, path, stored)


async def _receive(request: Request, writer: NarWriter) -> None:
    buffer = bytearray()
    async with aclosing(request.stream()) as chunks:
        while True:
            chunk = await _next(chunks)
            if chunk is not None:
                buffer += chunk
            if len(buffer) >= _WRITE_BYTES or chunk is None:
                await trio.to_thread.run_sync(writer.append, writer.offset, bytes(buffer))
                buffer.clear()
            if chunk is None:
                return


async def _next(chunks: AsyncGenerator[bytes, None]) -> bytes | None:
    """The next bytes, None at the end. ApiError 408 if nothing comes."""
    with trio.move_on_after(SILENCE_SECS):
        return await anext(chunks, None)
    raise ApiError(HTTPStatus.REQUEST_TIMEOUT, f"nothing came for {SILENCE_SECS:.0f} s: upload it again")


async def _record(services: Services, path: str, stored: StoredObject) -> None:
    entry = CachedPath(
        path=path,
        nar_hash=stored.nar_hash,
        nar_size=stored.nar_size,
        file_size=stored.file_size,
        compression=stored.compression,
        object=stored.object,
        references=(),
    )

    def put(connection: sa.Connection) -> tuple[str | None, list[Event]]:
        replaced = put_path(connection, entry, now=services.clock.now())
        return replaced, [PathStored(path, stored.nar_size)]

    try:
        replaced = await services.transact(put)
    finally:
        services.nar_store.settle(stored.object)
    if replaced is not None:
        await delete_unused(services, replaced)


async def _discard(request: Request, nar_size: int) -> None:
    """Reads a body that is not needed: a client that is cut off while it sends sees no answer."""
    left = nar_size + _SLACK_BYTES
    async with aclosing(request.stream()) as chunks:
        while left >= 0 and (chunk := await _next(chunks)) is not None:
            left -= len(chunk)
