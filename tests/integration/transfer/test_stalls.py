"""Transfers that stand still: the session goes on beside them, and each is given up in its time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gradient_protocol.connection
import gradient_server.storage.downloads
import gradient_server.storage.uploads
import gradient_worker.transfer.download
import pytest
import trio
from gradient_protocol.limits import BULK_WINDOW
from gradient_protocol.messages import server
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import NarAbort
from gradient_server.graph.aborts import abort_job
from gradient_worker.stores.directory import DirectoryNarReceiver
from gradient_worker.transfer import Downloaded, Stalled, Uploaded

from tests.fakes.worker import FakeWorker
from tests.integration.transfer.conftest import Scene

SIZE = 24 * 1024 * 1024
SOON_SECS = 0.5


async def stored(scene: Scene, contents: bytes) -> tuple[str, str]:
    """The path and hash of what the server holds from here on."""
    maker = await scene.mover("maker")
    info = maker.make_file(scene.base_dir, 1, contents)
    async with scene.session("maker") as (_, assignment_id):
        assert isinstance(await maker.transfers.upload(assignment_id, info, maker.spans), Uploaded)
    return info.path, info.nar_hash


async def heartbeat_passes(worker: FakeWorker, n: int) -> None:
    worker.send(w.WorkerMetrics(n=n, lateness_secs=0.0))
    await worker.expect_where(server.HeartbeatAck, lambda ack: ack.n == n, within_secs=2)


@contextmanager
def blocked_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """From the second MiB on, a worker's store takes nothing until the block ends; set once it does so."""
    stuck, free = threading.Event(), threading.Event()
    fed, feed = [0], DirectoryNarReceiver.feed

    def block(receiver: DirectoryNarReceiver, travelled: bytes) -> None:
        fed[0] += len(travelled)
        if fed[0] > 1024 * 1024:
            stuck.set()
            free.wait(30)
        feed(receiver, travelled)

    monkeypatch.setattr(DirectoryNarReceiver, "feed", block)
    try:
        yield stuck
    finally:
        free.set()


async def test_heartbeats_and_aborts_pass_a_receiver_that_is_stuck(
    scene: Scene, noise: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, declared = await stored(scene, noise(SIZE))
    taker = await scene.mover("taker")
    async with scene.session("taker") as (worker, assignment_id), trio.open_nursery() as nursery:
        with blocked_disk(monkeypatch) as stuck:
            nursery.start_soon(taker.transfers.download, assignment_id, path, declared, taker.spans)
            while not stuck.is_set():
                await trio.sleep(0.005)
            await trio.sleep(0.2)  # the window fills
            for n in range(1, 4):
                await heartbeat_passes(worker, n)
            assert scene.pool.services.downloads.bytes_sent <= 1024 * 1024 + 2 * BULK_WINDOW
            job_id = scene.jobs["taker"].job_id

            services = scene.pool.services
            await services.transact(
                lambda connection: (
                    None,
                    abort_job(connection, job_id, now=services.clock.now(), ids=services.ids) or [],
                )
            )
            abort = await worker.expect(server.AbortJob, within_secs=2)
            assert abort.assignment_id == assignment_id
            nursery.cancel_scope.cancel()
    await scene.nothing_runs()


async def test_a_connection_that_stops_reading_ends_alone(
    scene: Scene, noise: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_protocol.connection, "WRITE_STALL_SECS", SOON_SECS)
    path, declared = await stored(scene, noise(SIZE))
    taker, other = await scene.mover("taker"), await scene.mover("other")
    async with scene.session("other") as (neighbour, its_assignment):  # noqa: SIM117 - it outlives the other
        async with scene.session("taker") as (worker, assignment_id):
            blocked = trio.Event()
            receive = worker.connection.receive

            async def receive_nothing() -> object:
                if scene.pool.services.downloads.bytes_sent > 1024 * 1024:
                    blocked.set()
                    await trio.sleep_forever()
                return await receive()

            monkeypatch.setattr(worker.connection, "receive", receive_nothing)
            # More streams than the sockets' buffers hold, so that a write does stand still.
            for n in range(8):
                worker.send(
                    w.NarRequest(transfer_id=f"t{n}", assignment_id=assignment_id, path=path, offset=0)
                )
            with trio.fail_after(10):
                await blocked.wait()
            await heartbeat_passes(neighbour, 1)
            outcome = await other.transfers.download(its_assignment, path, declared, other.spans)
            assert isinstance(outcome, Downloaded)
            with trio.fail_after(10):
                while len(scene.pool.services.sessions) > 1:
                    await trio.sleep(0.02)
            await heartbeat_passes(neighbour, 2)
            assert scene.pool.services.downloads.running == 0
    assert taker.registration.worker_id not in [s.worker_id for s in scene.pool.services.sessions]


async def test_a_download_of_which_nothing_is_acknowledged_is_given_up(
    scene: Scene, noise: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_server.storage.downloads, "TRANSFER_STALL_SECS", SOON_SECS)
    path, _ = await stored(scene, noise(SIZE))
    await scene.mover("taker")
    async with scene.session("taker") as (worker, assignment_id):
        worker.divert = lambda _: False
        worker.send(w.NarRequest(transfer_id="t", assignment_id=assignment_id, path=path, offset=0))
        aborted = await worker.expect(NarAbort, within_secs=5)
        assert aborted.transfer_id == "t"
        assert "acknowledged" in aborted.reason
        await scene.nothing_runs()
        await heartbeat_passes(worker, 1)


async def test_an_upload_that_stands_still_is_given_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_server.storage.uploads, "TRANSFER_STALL_SECS", SOON_SECS)
    monkeypatch.setattr(gradient_server.storage.uploads, "_LOOK_EVERY_SECS", 0.1)
    await scene.mover("maker")
    async with scene.session("maker") as (worker, assignment_id):
        await trio.sleep(0)
        worker.divert = lambda _: False
        worker.send(
            w.UploadRequest(
                request_id="r", assignment_id=assignment_id, path=f"{'1' * 32}-source", size_estimate=1
            )
        )
        await worker.expect(server.UploadGrant)
        # The look that began before this test shortened the interval takes its five seconds.
        answer = await worker.expect(server.UploadCommitted, within_secs=8)
        assert answer.outcome == "Retry"
        await scene.nothing_runs()
        assert not scene.stored_files()


async def test_a_worker_asks_again_where_nothing_comes_and_goes_on_from_there(
    scene: Scene, noise: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, declared = await stored(scene, noise(SIZE))
    monkeypatch.setattr(gradient_worker.transfer.download, "TRANSFER_STALL_SECS", SOON_SECS)
    taker = await scene.mover("taker")
    downloads = scene.pool.services.downloads
    async with scene.session("taker") as (_, assignment_id):
        deliver = taker.link.current.deliver  # type: ignore[union-attr]  # a session is there
        lost = [0]

        def lose_some(key: str, message: object, data_bytes: int = 0) -> None:
            if isinstance(message, server.NarPush) and message.offset > SIZE // 2 and lost[0] < 1000:
                lost[0] += 1
                if downloads.running and len(taker.offsets) < 2:
                    return
            deliver(key, message, data_bytes)  # type: ignore[arg-type]  # as it came

        monkeypatch.setattr(taker.link.current, "deliver", lose_some)
        with trio.fail_after(20):
            outcome = await taker.transfers.download(assignment_id, path, declared, taker.spans)
        assert isinstance(outcome, Downloaded)
        assert lost[0]
        assert len(taker.offsets) == 2
        assert taker.offsets[1] > SIZE // 2 - BULK_WINDOW
        await scene.nothing_runs()


async def test_a_server_that_never_sends_costs_three_tries(
    scene: Scene, noise: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, declared = await stored(scene, noise(1000))
    monkeypatch.setattr(gradient_worker.transfer.download, "TRANSFER_STALL_SECS", 0.1)

    async def send_nothing(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(scene.pool.services.downloads, "_push", send_nothing)
    taker = await scene.mover("taker")
    async with scene.session("taker") as (_, assignment_id):
        outcome = await taker.transfers.download(assignment_id, path, declared, taker.spans)
        assert isinstance(outcome, Stalled)
        assert taker.offsets == [0, 0, 0]
        await scene.nothing_runs()
