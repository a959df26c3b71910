"""Questions of a running job: what is held, what is known, and outputs an evaluation needs now.

A question about an assignment that the worker does not have is ignored (protocol.md, "Jobs and
holds at the worker"). Questions end with the session; the worker asks again.
"""

from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa
from gradient_protocol.kinds import CacheQueryMode
from gradient_protocol.messages.server import CacheError, CacheStatus, KnownDerivations, PathStatus
from gradient_protocol.messages.worker import CacheQuery, ImportRequest, QueryKnownDerivations

from gradient_server.db.queries.cached_paths import CachedPath, get_paths, stale_paths, touch_paths
from gradient_server.domain.events import Event
from gradient_server.graph.imports import request_import
from gradient_server.graph.known import known_derivations as find_known
from gradient_server.graph.known import stale_derivations, touch_derivations
from gradient_server.net.services import Services
from gradient_server.net.session import Session

__all__ = ["cache_query", "import_request", "known_derivations"]

# Their answers must fit into one message.
MAX_PATHS: Final = 10_000
TOO_MANY: Final = 413


async def cache_query(services: Services, session: Session, message: CacheQuery) -> None:
    """Held or not; for Pull with the size. Everything held comes by `NarRequest`, so there is no URL."""
    if session.held(message.assignment_id) is None or _is_too_long(session, message.query_id, message.paths):
        return
    found = await _held(services, message.paths)
    sizes = message.mode is CacheQueryMode.PULL
    session.send(
        CacheStatus(
            query_id=message.query_id,
            paths={path: _status(found.get(path), with_size=sizes) for path in message.paths},
        )
    )


async def _held(services: Services, paths: Sequence[str]) -> dict[str, CachedPath]:
    """What is held, and from now on kept: whoever asks builds upon the answer."""
    now = services.clock.now()

    def look(connection: sa.Connection) -> tuple[dict[str, CachedPath], list[str]]:
        found = get_paths(connection, paths)
        return found, stale_paths(connection, found, now=now)

    def note(connection: sa.Connection) -> dict[str, CachedPath]:
        touch_paths(connection, stale, now=now)
        return get_paths(connection, paths)

    found, stale = await services.database.read(look)
    return await services.database.run(note) if stale else found


def _status(entry: CachedPath | None, *, with_size: bool) -> PathStatus:
    if entry is None:
        return PathStatus(held=False)
    return PathStatus(held=True, nar_size=entry.nar_size if with_size else None)


async def known_derivations(services: Services, session: Session, message: QueryKnownDerivations) -> None:
    """Which derivations the walk need not enter."""
    if session.held(message.assignment_id) is None or _is_too_long(session, message.query_id, message.paths):
        return
    known = await _known(services, message.paths)
    session.send(KnownDerivations(query_id=message.query_id, known=known))


async def _known(services: Services, paths: Sequence[str]) -> list[str]:
    """What is known, and from now on kept."""
    now = services.clock.now()

    def look(connection: sa.Connection) -> tuple[list[str], list[str]]:
        known = find_known(connection, paths)
        return known, stale_derivations(connection, known, now=now)

    known, stale = await services.database.read(look)
    if not stale:
        return known
    left = await services.database.run(lambda connection: touch_derivations(connection, stale, now=now))
    gone = set(stale).difference(left)
    return [path for path in known if path not in gone]


async def import_request(services: Services, session: Session, message: ImportRequest) -> None:
    """Stored; its answer is an event, at once or when the builds have ended."""
    if session.held(message.assignment_id) is None or _is_too_long(session, message.query_id, message.paths):
        return

    def ask(connection: sa.Connection) -> tuple[None, list[Event]]:
        return None, request_import(
            connection,
            message,
            worker_id=session.worker_id,
            now=services.clock.now(),
            ids=services.ids,
        )

    await services.transact(ask)


def _is_too_long(session: Session, query_id: str, paths: Sequence[str]) -> bool:
    if len(paths) <= MAX_PATHS:
        return False
    reason = f"at most {MAX_PATHS} paths a query; ask in parts"
    session.send(CacheError(query_id=query_id, code=TOO_MANY, reason=reason))
    return True
