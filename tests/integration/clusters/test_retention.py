"""The loop that deletes: objects that verdicts dropped, and clusters that are old."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from gradient_protocol.kinds import Compression
from gradient_server.db.queries.cached_paths import CachedPath, put_path
from gradient_server.db.runner import Database
from gradient_server.domain.events import Bus, ObjectUnused
from gradient_server.graph.retention import delete_empty_clusters, delete_old_clusters, run_retention
from gradient_server.storage.nar_store import LocalNarStore
from gradient_server.storage.retention import Retention

from tests.fakes.collecting import collecting
from tests.fakes.worker import nar_hash, nar_of
from tests.fixtures.times import FakeClock
from tests.integration.clusters.group import ClusterPool, cluster, members
from tests.integration.graph.pool import hash_of

CONTENTS = b"a NAR as it travelled"
DAY = 86_400.0


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

    retention = Retention(collecting(sqlite_database, clock, tmp_path, bus=bus, nar_store=store))
    async with trio.open_nursery() as nursery:
        await nursery.start(retention.run)
        bus.publish([ObjectUnused(name), ObjectUnused(name)])
        with trio.move_on_after(0.5 if used else 10):
            while store.has(name):
                await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    assert store.has(name) is used


@dataclass
class Ahead:
    """The wall clock of a test, so many seconds on; the real monotonic one."""

    clock: FakeClock
    secs: float = 0.0

    def now(self) -> float:
        return self.clock.now() + self.secs

    def monotonic(self) -> float:
        return trio.current_time()


async def test_the_pass_comes_at_the_start_and_every_hour(
    pool: ClusterPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradient_server.storage.retention.PASS_SECS", 0.05)
    clock = Ahead(pool.clock)
    for name in ("first", "second"):
        await pool.with_cluster(*members(name), cluster=cluster(name, name=name))
        group = await pool.start_group()
        await pool.succeeds(group, name)
        await pool.settle(group)
        if name == "first":
            pool.clock.advance(50 * DAY)

    services = collecting(pool.database, clock, tmp_path)

    async def left(names: list[str]) -> None:
        query = "SELECT name FROM cluster_job ORDER BY name"
        with trio.fail_after(5):
            while await pool.run(lambda c: c.exec_driver_sql(query).scalars().all()) != names:
                await trio.sleep(0.01)

    clock.secs = 45 * DAY
    async with trio.open_nursery() as nursery:
        await nursery.start(Retention(services).run)
        await left(["second"])
        clock.secs = 100 * DAY
        await left([])
        nursery.cancel_scope.cancel()


async def test_old_clusters_go_and_active_ones_never_do(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", retry_budget=0))
    group = await pool.start_group()
    await pool.signal(group, "a")
    await pool.fails(group, "a")
    await pool.settle(group)
    ended = await pool.cluster_id()
    await pool.with_cluster(*members("c", "d"), cluster=cluster("c", "d"))
    running = await pool.start_group()

    async def sweep(days: float) -> list[str]:
        pool.clock.advance(days * DAY)
        return await pool.run(lambda c: delete_old_clusters(c, retention_days=90, now=pool.clock.now()))

    assert await sweep(89.9) == []
    await pool.run(lambda c: run_retention(c, retention_days=91, now=pool.clock.now()))
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_signal") == 0
    assert await sweep(0.2) == [ended]
    assert await sweep(10_000) == []
    # The attempt's rows stay, as plain telemetry.
    kept = await pool.run(
        lambda c: c.exec_driver_sql(
            "SELECT COUNT(*) FROM dispatched_job WHERE cluster_role IS NOT NULL AND cluster_attempt IS NULL"
        ).scalar()
    )
    assert kept == 2
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_attempt") == 1
    for name in "cd":
        await pool.succeeds(running, name)
    assert await pool.verdict(running) == "Complete"


@pytest.mark.parametrize("by", ["garbage collection", "the pass"])
async def test_a_cluster_without_members_goes_at_once(pool: ClusterPool, by: str) -> None:
    evaluation = await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    group = await pool.start_group()
    for name in "ab":
        await pool.succeeds(group, name)
    await pool.settle(group)
    assert await pool.run(lambda c: delete_old_clusters(c, retention_days=90, now=pool.clock.now())) == []

    def collect(connection: object) -> None:
        connection.exec_driver_sql(f"DELETE FROM evaluation WHERE id = '{evaluation}'")  # type: ignore[attr-defined]
        connection.exec_driver_sql("DELETE FROM derivation_build")  # type: ignore[attr-defined]  # a connection

    await pool.run(collect)
    if by == "garbage collection":
        assert len(await pool.run(delete_empty_clusters)) == 1
    else:
        found = await pool.run(lambda c: delete_old_clusters(c, retention_days=90, now=pool.clock.now()))
        assert len(found) == 1
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_attempt") == 0


async def test_garbage_collection_takes_no_cluster_that_has_members_or_has_not_ended(
    pool: ClusterPool,
) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    assert await pool.run(delete_empty_clusters) == []
    # Without members, and yet not ended: it is never deleted.
    await pool.run(lambda c: c.exec_driver_sql("DELETE FROM cluster_member"))
    assert await pool.run(delete_empty_clusters) == []
    assert await pool.run(lambda c: delete_old_clusters(c, retention_days=0, now=1e12)) == []
