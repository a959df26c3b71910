"""NARs that are not what they should be, in both directions: refused, and nothing of them kept."""

from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from gradient_protocol.kinds import UploadOutcome
from gradient_protocol.messages import server
from gradient_protocol.messages import worker as w
from gradient_worker.transfer import Downloaded, Lost, Stalled, Uploaded

from tests.fakes.transfers import Mover, source_path
from tests.fakes.worker import FakeWorker, nar_hash, nar_of
from tests.integration.transfer.conftest import Scene

SIZE = 3 * 1024 * 1024
REFERENCES = [f"{number:032d}-reference" for number in range(20_001)]


async def uploaded(scene: Scene, contents: bytes) -> tuple[Mover, str, str, Path]:
    """A second worker, a path and hash that the server holds, and the file that holds it."""
    maker = await scene.mover("a")
    info = maker.make_file(scene.base_dir, 1, contents)
    async with scene.session("a") as (_, assignment_id):
        assert isinstance(await maker.transfers.upload(assignment_id, info, maker.spans), Uploaded)
    (stored,) = scene.stored_files()
    return await scene.mover("b"), info.path, info.nar_hash, stored


@pytest.mark.parametrize("fault", ["flipped", "truncated", "longer"])
async def test_what_the_servers_disk_damaged_never_becomes_valid(
    scene: Scene, noise: Callable[[int], bytes], fault: str
) -> None:
    taker, path, declared, stored = await uploaded(scene, noise(SIZE))
    whole = stored.read_bytes()
    broken = bytearray(whole)
    if fault == "flipped":
        broken[SIZE // 2] ^= 1
    elif fault == "truncated":
        del broken[SIZE // 2 :]
    else:
        broken += b"more"
    stored.write_bytes(broken)
    async with scene.session("b") as (worker, assignment_id):
        outcome = await taker.transfers.download(assignment_id, path, declared, taker.spans)
        assert isinstance(outcome, Lost if fault == "flipped" else Stalled), outcome
        assert taker.store.info(path) is None
        assert not list(taker.store.directory.iterdir())
        await scene.nothing_runs()
        stored.write_bytes(whole)
        outcome = await taker.transfers.download(assignment_id, path, declared, taker.spans)
        assert isinstance(outcome, Downloaded)
        assert worker.ended is None


async def test_other_contents_than_the_job_names_are_not_taken(
    scene: Scene, noise: Callable[[int], bytes]
) -> None:
    taker, path, _, _ = await uploaded(scene, noise(1000))
    async with scene.session("b") as (_, assignment_id):
        outcome = await taker.transfers.download(assignment_id, path, nar_hash(b"other"), taker.spans)
        assert isinstance(outcome, Lost)
        assert outcome.damaged


async def begin(worker: FakeWorker, assignment_id: str, announced: int, path: str = source_path(9)) -> None:
    worker.divert = lambda _: False
    worker.send(
        w.UploadRequest(request_id="r", assignment_id=assignment_id, path=path, size_estimate=announced)
    )


async def test_bytes_that_are_no_archive_are_refused_at_once(
    scene: Scene, noise: Callable[[int], bytes]
) -> None:
    await scene.mover("a")
    async with scene.session("a") as (worker, assignment_id):
        await begin(worker, assignment_id, SIZE)
        await worker.expect(server.UploadGrant)
        data = zstandard.compress(noise(100_000))
        worker.connection.send(w.UploadChunk(request_id="r", offset=0, data=data))
        answer = await worker.expect(server.UploadCommitted)
        assert answer.outcome is UploadOutcome.REJECTED
        await scene.nothing_runs()
        assert not scene.stored_files()


@pytest.mark.parametrize("contents", ["zeros", "noise"])
async def test_an_upload_is_bounded_by_what_it_announced(
    scene: Scene, noise: Callable[[int], bytes], contents: str
) -> None:
    """Neither the bytes that travel nor what they stand for: 64 MiB of zeros are a few KiB."""
    nar = nar_of(bytes(64 * 1024 * 1024) if contents == "zeros" else noise(2 * 1024 * 1024))
    await scene.mover("a")
    async with scene.session("a") as (worker, assignment_id):
        await begin(worker, assignment_id, 1000)
        await worker.expect(server.UploadGrant)
        await worker.push("r", zstandard.compress(nar), 0, nar)
        answer = await worker.expect(server.UploadCommitted)
        assert answer.outcome is UploadOutcome.REJECTED
        assert "longer than the declared" in (answer.reason or "") or "were sent" in (answer.reason or "")
        assert not scene.stored_files()
        assert worker.ended is None


@pytest.mark.parametrize(
    ("references", "reason"),
    [(REFERENCES, "at most 20000"), (["../../etc/passwd"], "not a store path"), (["x" * 32], "not a store")],
)
async def test_references_are_bounded_and_store_paths(
    scene: Scene, references: list[str], reason: str
) -> None:
    nar = nar_of(b"small")
    await scene.mover("a")
    async with scene.session("a") as (worker, assignment_id):
        await begin(worker, assignment_id, len(nar))
        await worker.expect(server.UploadGrant)
        await worker.push("r", zstandard.compress(nar), 0, nar, references)
        answer = await worker.expect(server.UploadCommitted)
        assert answer.outcome is UploadOutcome.REJECTED
        assert reason in (answer.reason or "")
        await scene.nothing_runs()
        assert not scene.stored_files()
        # The most that is taken goes through.
        await begin(worker, assignment_id, len(nar))
        await worker.expect(server.UploadGrant)
        await worker.push("r", zstandard.compress(nar), 0, nar, REFERENCES[:20_000])
        assert (await worker.expect(server.UploadCommitted, within_secs=20)).outcome is UploadOutcome.OK


async def test_a_source_must_be_a_store_path(scene: Scene) -> None:
    await scene.mover("a")
    async with scene.session("a") as (worker, assignment_id):
        await begin(worker, assignment_id, 1000, path="../../../tmp/x-source")
        answer = await worker.expect(server.UploadCommitted)
        assert answer.outcome is UploadOutcome.REJECTED
