"""A job's log as a stream of its bytes."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Final

import sqlalchemy as sa
import trio

from gradient_server.db.tables import dispatched_job
from gradient_server.domain.job import split_job_key
from gradient_server.domain.status import BuildStatus, EvaluationStatus
from gradient_server.graph.job_views import job_view
from gradient_server.net.services import Services

__all__ = ["log_stream"]

PIECE_BYTES: Final = 256 * 1024
LOOK_EVERY_SECS: Final = 0.25
# How often the database is asked whether an attempt, or the job that waits for one, has ended.
ASK_EVERY_SECS: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The attempt to show; None while there is none. `ended`: it writes nothing more."""

    assignment: str | None
    ended: bool


async def log_stream(
    services: Services, job_key: str, attempt: str | None, *, follow: bool
) -> AsyncGenerator[bytes, None]:
    """The log of `attempt` (None: the newest), with `follow` until it has ended or the server stops.

    A job that waits is waited for, unless it ends without an attempt.
    """
    shown = await _look(services, job_key, attempt)
    while follow and shown.assignment is None and not shown.ended:
        if services.draining.is_set():
            return
        await trio.sleep(ASK_EVERY_SECS)
        shown = await _look(services, job_key, None)
    if shown.assignment is None:
        return
    offset, ended = 0, shown.ended
    asked_at = services.clock.monotonic()
    while True:
        # What the attempt wrote was stored before its end was: after its end, one look is the last.
        piece = await _read(services, shown.assignment, offset)
        offset += len(piece)
        if piece:
            yield piece
            continue
        if ended or not follow or services.draining.is_set():
            return
        await trio.sleep(LOOK_EVERY_SECS)
        if services.clock.monotonic() - asked_at >= ASK_EVERY_SECS:
            ended = (await _look(services, job_key, shown.assignment)).ended
            asked_at = services.clock.monotonic()


async def _read(services: Services, assignment: str, offset: int) -> bytes:
    read = partial(services.logs.read, assignment, offset, PIECE_BYTES)
    return await trio.to_thread.run_sync(read, limiter=services.log_threads)


async def _look(services: Services, job_key: str, attempt: str | None) -> _Attempt:
    return await services.database.read(partial(_find, job_key, attempt))


def _find(job_key: str, attempt: str | None, connection: sa.Connection) -> _Attempt:
    row = dispatched_job.c
    query = sa.select(row.id, row.finished_at).where(row.job_key == job_key)
    if attempt is not None:
        query = query.where(row.id == attempt)
    found = connection.execute(query.order_by(row.assigned_at.desc(), row.id.desc()).limit(1)).first()
    if found is not None:
        return _Attempt(found.id, found.finished_at is not None)
    view = job_view(connection, job_key)
    if view is None:
        return _Attempt(None, ended=True)
    kind = split_job_key(job_key)[0]
    status = BuildStatus(view.status) if kind == "Build" else EvaluationStatus(view.status)
    return _Attempt(None, status.is_final)
