"""Workers that move one path at once."""

from collections.abc import Callable

import pytest
import trio
from gradient_worker.stores.base import PathInfo
from gradient_worker.transfer import Downloaded, Uploaded

from tests.fakes.transfers import Mover
from tests.integration.transfer.conftest import Scene

SIZE = 8 * 1024 * 1024


async def test_two_workers_upload_one_path_at_once(scene: Scene, noise: Callable[[int], bytes]) -> None:
    outcomes: list[object] = []
    first, second = await scene.mover("a"), await scene.mover("b")
    infos = {name: scene.movers[name].make_file(scene.base_dir, 1, noise(SIZE)) for name in ("a", "b")}

    async def upload(mover: Mover, assignment_id: str, info: PathInfo) -> None:
        outcomes.append(await mover.transfers.upload(assignment_id, info, mover.spans))

    async with (
        scene.session("a") as (_, of_first),
        scene.session("b") as (_, of_second),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(upload, first, of_first, infos["a"])
        nursery.start_soon(upload, second, of_second, infos["b"])
    assert sorted(outcome.pushed for outcome in outcomes if isinstance(outcome, Uploaded)) == [False, True]
    assert scene.pool.services.uploads.bytes_received < SIZE * 1.1
    (_stored,) = scene.stored_files()


async def test_the_second_worker_sends_the_path_when_the_first_is_lost(
    scene: Scene, noise: Callable[[int], bytes]
) -> None:
    first, second = await scene.mover("a"), await scene.mover("b")
    infos = {name: scene.movers[name].make_file(scene.base_dir, 1, noise(SIZE)) for name in ("a", "b")}
    async with scene.session("a"):
        pass
    async with scene.session("b") as (_, assignment_id), trio.open_nursery() as nursery:
        async with scene.session("a", sent_bytes=SIZE // 2) as (worker, its_assignment):
            nursery.start_soon(first.transfers.upload, its_assignment, infos["a"], first.spans)
            while not first.offsets:
                await trio.sleep(0.001)
            outcome: list[object] = []

            async def upload() -> None:
                outcome.append(await second.transfers.upload(assignment_id, infos["b"], second.spans))

            nursery.start_soon(upload)
            while worker.ended is None:
                await trio.sleep(0.005)
        with trio.fail_after(20):
            while not outcome:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert isinstance(outcome[0], Uploaded)
    assert outcome[0].pushed


@pytest.mark.parametrize("count", [16])
async def test_many_at_once_in_both_directions(
    scene: Scene, noise: Callable[[int], bytes], count: int
) -> None:
    maker, taker = await scene.mover("a"), await scene.mover("b")
    infos = [maker.make_file(scene.base_dir, n, noise(400_000 + n)) for n in range(count)]
    async with scene.session("a") as (_, up), scene.session("b") as (_, down):
        async with trio.open_nursery() as nursery:
            for info in infos:
                nursery.start_soon(maker.transfers.upload, up, info, maker.spans)
        fetched: list[object] = []

        async def fetch(path: str, nar_hash: str) -> None:
            fetched.append(await taker.transfers.download(down, path, nar_hash, taker.spans))

        async with trio.open_nursery() as nursery:
            for info in infos:
                nursery.start_soon(fetch, info.path, info.nar_hash)
    assert all(isinstance(outcome, Downloaded) for outcome in fetched)
    assert [taker.store.info(info.path) for info in infos] == infos
    await scene.nothing_runs()
