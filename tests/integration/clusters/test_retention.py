"""The loop that deletes: objects that verdicts dropped, and clusters that are old."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from gradient_protocol.kinds import Compression
from gradient_server.db.queries.cached_paths import CachedPath, put_path
from gradient_server.db.runner import Database
from gradient_server.domain.events import Bus, ObjectUnused
from gradient_server.net.services import Services
from gradient_server.storage.nar_store import LocalNarStore
from gradient_server.storage.retention import Retention

from tests.fakes.worker import nar_hash, nar_of
from tests.fixtures.times import FakeClock
from tests.integration.graph.pool import hash_of

CONTENTS = b"a NAR as it travelled"


def stored_object(store: LocalNarStore, name: str) -> str:
    """The name of an object with contents of its own."""
    nar = nar_of(CONTENTS + name.encode())
    writer = store.open_writer(name)
    writer.append(0, nar)
    stored = writer.finish(nar_hash(nar), len(nar), len(nar), Compression.NONE)
    store.settle(stored.object)
    return stored.object


@pytest.mark.parametrize("used", [False, True])
async def test_an_unused_object_is_deleted_and_a_used_one_kept(
    sqlite_database: Database, tmp_path: Path, clock: FakeClock, used: bool
) -> None:
    store, bus = LocalNarStore(tmp_path), Bus()
    name = stored_object(store, "one")
    if used:
        entry = CachedPath(
            path="p",
            nar_hash=hash_of("p"),
            nar_size=1,
            file_size=1,
            compression=Compression.NONE,
            object=name,
            references=(),
        )
        await sqlite_database.run(lambda c: put_path(c, entry, now=clock.now()))

    async def transact(fn: object) -> None:
        await sqlite_database.run(fn)  # type: ignore[arg-type]  # a function of a connection

    services = SimpleNamespace(
        bus=bus,
        clock=clock,
        database=sqlite_database,
        nar_store=store,
        settings=SimpleNamespace(retention_days=90.0),
        transact=transact,
    )
    retention = Retention(cast("Services", services))
    async with trio.open_nursery() as nursery:
        await nursery.start(retention.run)
        bus.publish([ObjectUnused(name), ObjectUnused(name)])
        with trio.move_on_after(0.5 if used else 10):
            while store.has(name):
                await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    assert store.has(name) is used
