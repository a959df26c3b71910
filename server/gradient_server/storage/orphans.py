"""Objects of the NAR store that no row names: deleted when that is known, looked for once an hour. And
logs whose assignment is gone.

A server that dies between the object and its row, or between the row's end and the deletion, leaves
one. What was written in the last hour is passed over; an upload that stores the same contents while
one is looked at keeps it (`LocalNarStore.doom`). Each shard is one step, so that a pass may end
anywhere and the next one begins anew.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
import structlog
import trio

from gradient_server.db.queries.cached_paths import object_in_use
from gradient_server.db.tables import build_attempt, dispatched_job
from gradient_server.graph.sql import chunks
from gradient_server.storage.durable import StorageError

if TYPE_CHECKING:
    from gradient_server.net.services import Services
    from gradient_server.storage.nar_store import Doom, LocalNarStore

__all__ = ["collect_logs", "collect_orphans", "delete_unused"]

log = structlog.get_logger(__name__)

_LOGS_AT_ONCE: Final = 500
YOUNG_SECS: Final = 3600.0
"""An upload's transaction is long over by then, whatever the disk did."""


async def delete_unused(services: "Services", name: str) -> bool:
    """Deletes an object unless something uses it, or is just storing it. Whether it is gone.

    StorageError if the disk refuses.
    """
    return await _delete_those_unused(services, [name]) == 1


async def collect_orphans(services: "Services") -> int:
    """One pass over the whole store; how many objects were deleted."""
    store = services.nar_store
    older_than = _young_since(services)
    deleted = 0
    for shard in await trio.to_thread.run_sync(store.shards):
        list_objects = partial(store.objects_in, shard, older_than=older_than)
        try:
            deleted += await _delete_those_unused(services, await trio.to_thread.run_sync(list_objects))
        except StorageError as error:
            log.error("orphans cannot be collected", shard=shard, reason=str(error))
    if deleted:
        log.info("objects without a row were deleted", count=deleted)
    return deleted


async def collect_logs(services: "Services") -> int:
    """One pass over the logs; how many were deleted. A log that was written within the hour stays."""
    logs = services.logs
    older_than = _young_since(services)
    deleted = 0
    for shard in await trio.to_thread.run_sync(logs.shards, limiter=services.log_threads):
        names = await trio.to_thread.run_sync(
            partial(logs.logs_in, shard, older_than=older_than), limiter=services.log_threads
        )
        for some in chunks(names, _LOGS_AT_ONCE):
            gone = await services.database.read(partial(_without_rows, names=some))
            for name in gone:
                deleted += await trio.to_thread.run_sync(logs.delete, name, limiter=services.log_threads)
    return deleted


def _young_since(services: "Services") -> float:
    """What was written since is young. Files bear the host's wall time, whichever way it was set."""
    return min(services.clock.now(), time.time()) - YOUNG_SECS


def _without_rows(connection: sa.Connection, names: Sequence[str]) -> list[str]:
    """Those of the assignments that nothing tells of any more. Their ids are never used again."""
    job, attempt = dispatched_job.c, build_attempt.c
    known = set(connection.scalars(sa.select(job.id).where(job.id.in_(names))))
    known.update(connection.scalars(sa.select(attempt.assignment).where(attempt.assignment.in_(names))))
    return [name for name in names if name not in known]


async def _delete_those_unused(services: "Services", names: list[str]) -> int:
    """The doom comes first and the look into the database second: see `LocalNarStore.doom`."""
    store = services.nar_store
    dooms = {name: doom for name in names if (doom := store.doom(name)) is not None}
    try:
        unused = await services.database.read(partial(_unused, names=list(dooms)))
        delete = partial(_delete_all, store, [dooms[name] for name in unused])
        return await trio.to_thread.run_sync(delete)
    finally:
        for doom in dooms.values():
            store.spare(doom)


def _delete_all(store: "LocalNarStore", dooms: Sequence["Doom"]) -> int:
    return sum(store.delete_doomed(doom) for doom in dooms)


def _unused(connection: sa.Connection, names: list[str]) -> list[str]:
    return [name for name in names if not object_in_use(connection, name)]
