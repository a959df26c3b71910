"""A disk that is full in the middle of a NAR, at either side: one clear outcome, and nothing left of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from gradient_server.db.runner import Database
from gradient_worker.stores.base import StoreError
from gradient_worker.transfer import Downloaded, Refused, Uploaded

from tests.fakes.pool import running_pool
from tests.fakes.transfers import Mover
from tests.integration.transfer.conftest import Scene

TOO_LARGE = 6 * 1024 * 1024
FITS = 1024 * 1024


async def test_the_servers_disk_is_full(
    sqlite_database: Database, tmp_path: Path, small_disk: Path, noise: Callable[[int], bytes]
) -> None:
    base = tmp_path / "server"
    base.mkdir()
    (base / "nar").symlink_to(small_disk)
    async with running_pool(sqlite_database, base) as pool:
        scene = Scene(pool, tmp_path)
        mover = await scene.mover("a")
        large = mover.make_file(tmp_path, 1, noise(TOO_LARGE))
        small = mover.make_file(tmp_path, 2, noise(FITS))
        async with scene.session("a") as (worker, assignment_id):
            refused = await mover.transfers.upload(assignment_id, large, mover.spans)
            assert isinstance(refused, Refused)
            assert "no room left" in refused.reason
            await scene.nothing_runs()
            assert not [file for file in small_disk.rglob("*") if file.is_file()]
            assert await pool.scalar("SELECT count(*) FROM upload") == 0
            assert isinstance(await mover.transfers.upload(assignment_id, small, mover.spans), Uploaded)
            assert worker.ended is None
        mover.store.close()


async def test_the_workers_disk_is_full(
    scene: Scene, small_disk: Path, noise: Callable[[int], bytes]
) -> None:
    maker = await scene.mover("a")
    large = maker.make_file(scene.base_dir, 1, noise(TOO_LARGE))
    small = maker.make_file(scene.base_dir, 2, noise(FITS))
    taker = scene.movers["b"] = Mover.open(small_disk / "b", await scene.pool.register("b"))
    async with scene.session("a") as (_, assignment_id):
        for info in (large, small):
            await maker.transfers.upload(assignment_id, info, maker.spans)
    async with scene.session("b") as (worker, assignment_id):
        with pytest.raises(StoreError, match="No space left"):
            await taker.transfers.download(assignment_id, large.path, large.nar_hash, taker.spans)
        await scene.nothing_runs()
        assert not list(taker.store.directory.iterdir())
        assert taker.store.info(large.path) is None
        outcome = await taker.transfers.download(assignment_id, small.path, small.nar_hash, taker.spans)
        assert isinstance(outcome, Downloaded)
        assert worker.ended is None
