"""A connection that breaks again and again: every transfer ends, whole, and no byte is sent for nothing."""

from collections.abc import Callable
from pathlib import Path

import trio
from gradient_protocol.limits import BULK_WINDOW
from gradient_server.db.runner import Database
from gradient_worker.stores.base import PathInfo
from gradient_worker.transfer import Downloaded, Uploaded

from tests.fakes.pool import running_pool
from tests.integration.transfer.conftest import Scene

SIZE = 12 * 1024 * 1024
TENTH = SIZE // 10
HANDSHAKE_ROOM = 8 * 1024


async def until_done(scene: Scene, name: str, *, done: trio.Event, way: str) -> int:
    """Sessions that break after a tenth of the bytes, until the transfer is through; how many."""
    sessions = 0
    while not done.is_set():
        sessions += 1
        assert sessions < 60
        async with scene.session(name, **{way: TENTH + HANDSHAKE_ROOM}) as (worker, _):
            while worker.ended is None and not done.is_set():
                await trio.sleep(0.005)
        # A session that a newer one replaces is discarded unread; one that is seen to end is not.
        with trio.fail_after(10):
            while len(scene.pool.services.sessions):
                await trio.sleep(0.005)
    return sessions


async def test_an_upload_cut_after_every_tenth_sends_each_byte_once(
    scene: Scene, noise: Callable[[int], bytes]
) -> None:
    mover = await scene.mover("a")
    info = mover.make_file(scene.base_dir, 1, noise(SIZE))
    async with scene.session("a") as (_, assignment_id):
        pass
    done = trio.Event()
    async with trio.open_nursery() as nursery:

        async def upload() -> None:
            outcome = await mover.transfers.upload(assignment_id, info, mover.spans)
            assert isinstance(outcome, Uploaded), outcome
            done.set()

        nursery.start_soon(upload)
        sessions = await until_done(scene, "a", done=done, way="sent_bytes")
    assert sessions >= 10
    assert mover.offsets == sorted(mover.offsets)
    # What was on its way when the connection broke is sent again, but what was stored is not.
    assert len(set(mover.offsets)) >= 5
    assert scene.pool.services.uploads.bytes_received < SIZE + SIZE // 20
    await held(scene, info)


async def test_a_download_cut_after_every_tenth_receives_each_byte_once(
    scene: Scene, noise: Callable[[int], bytes]
) -> None:
    maker, taker = await scene.mover("a"), await scene.mover("b")
    info = maker.make_file(scene.base_dir, 1, noise(SIZE))
    async with scene.session("a") as (_, assignment_id):
        assert isinstance(await maker.transfers.upload(assignment_id, info, maker.spans), Uploaded)
    async with scene.session("b") as (_, assignment_id):
        pass
    done = trio.Event()
    async with trio.open_nursery() as nursery:

        async def download() -> None:
            outcome = await taker.transfers.download(assignment_id, info.path, info.nar_hash, taker.spans)
            assert isinstance(outcome, Downloaded), outcome
            assert outcome.info == info
            done.set()

        nursery.start_soon(download)
        sessions = await until_done(scene, "b", done=done, way="received_bytes")
    assert sessions >= 10
    assert taker.offsets == sorted(set(taker.offsets)), "each session went on where the last one ended"
    assert taker.store.real_path(info.path).read_bytes() == noise(SIZE)
    await scene.nothing_runs()


async def test_an_upload_goes_on_at_a_server_that_was_restarted(
    sqlite_database: Database, tmp_path: Path, noise: Callable[[int], bytes]
) -> None:
    async with running_pool(sqlite_database, tmp_path / "server") as pool, trio.open_nursery() as nursery:
        scene = Scene(pool, tmp_path)
        mover = await scene.mover("a")
        info = mover.make_file(tmp_path, 1, noise(SIZE))
        outcomes: list[object] = []
        async with scene.session("a", sent_bytes=SIZE // 2) as (worker, assignment_id):

            async def upload() -> None:
                outcomes.append(await mover.transfers.upload(assignment_id, info, mover.spans))

            nursery.start_soon(upload)
            while worker.ended is None:
                await trio.sleep(0.005)
        await scene.nothing_runs()
        async with running_pool(sqlite_database, tmp_path / "server") as successor:
            scene.pool = successor
            async with scene.session("a"):
                with trio.fail_after(20):
                    while not outcomes:
                        await trio.sleep(0.01)
            (outcome,) = outcomes
            assert isinstance(outcome, Uploaded)
            assert mover.offsets[1] > SIZE // 2 - BULK_WINDOW
            await held(scene, info)
        mover.store.close()


async def held(scene: Scene, info: PathInfo) -> None:
    """The server has exactly this, and nothing half-done."""
    await scene.nothing_runs()
    assert (
        await scene.pool.scalar("SELECT nar_hash FROM cached_path WHERE path = :p", p=info.path)
        == info.nar_hash
    )
    (stored,) = scene.stored_files()
    assert stored.name == f"{info.nar_hash.removeprefix('sha256:')}.nar.zst"
