"""Objects that no row names: one that is left is found and deleted, one that is wanted never is."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import trio
from gradient_protocol.kinds import Compression
from gradient_protocol.nar import NarHasher
from gradient_server.storage.orphans import YOUNG_SECS, collect_orphans, delete_unused
from gradient_worker.transfer import Uploaded

from tests.fakes.worker import nar_of
from tests.integration.transfer.conftest import Scene


def store_without_row(scene: Scene, contents: bytes, *, age_secs: float) -> Path:
    """An object as a server leaves it that dies before the row."""
    nar = nar_of(contents)
    hasher = NarHasher()
    hasher.feed(nar)
    store = scene.pool.services.nar_store
    writer = store.open_writer(f"lost-{len(contents)}")
    writer.append(0, nar)
    stored = writer.finish(hasher.hash, len(nar), len(nar), Compression.NONE)
    store.settle(stored.object)
    (file,) = [file for file in scene.stored_files() if file.name == stored.object]
    then = time.time() - age_secs
    os.utime(file, (then, then))
    return file


async def test_only_old_objects_without_a_row_are_collected(
    scene: Scene, noise: Callable[[int], bytes]
) -> None:
    mover = await scene.mover("a")
    info = mover.make_file(scene.base_dir, 1, noise(1000))
    async with scene.session("a") as (_, assignment_id):
        assert isinstance(await mover.transfers.upload(assignment_id, info, mover.spans), Uploaded)
    (held,) = scene.stored_files()
    os.utime(held, (1, 1))
    old = store_without_row(scene, b"old", age_secs=YOUNG_SECS + 60)
    young = store_without_row(scene, b"young", age_secs=YOUNG_SECS - 600)
    assert await collect_orphans(scene.pool.services) == 1
    assert not old.exists()
    assert held.exists()
    assert young.exists()
    assert await collect_orphans(scene.pool.services) == 0


async def test_an_object_that_is_stored_again_while_it_is_looked_up_stays(scene: Scene) -> None:
    services = scene.pool.services
    file = store_without_row(scene, b"twice", age_secs=YOUNG_SECS + 60)
    read = services.database.read
    looking = trio.lowlevel.current_task()

    async def store_meanwhile(query: Callable[..., object]) -> object:
        found = await read(query)
        if trio.lowlevel.current_task() is not looking:
            return found  # a sweep of the server's own
        await trio.to_thread.run_sync(lambda: store_without_row(scene, b"twice", age_secs=0))
        return found

    services.database.read = store_meanwhile  # type: ignore[method-assign, assignment]  # of this test alone
    try:
        assert not await delete_unused(services, file.name)
    finally:
        services.database.read = read  # type: ignore[method-assign]  # as it was
    assert file.exists()
    assert await delete_unused(services, file.name)
    assert not file.exists()
