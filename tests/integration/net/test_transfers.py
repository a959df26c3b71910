"""NARs in both directions: offsets, refusals, what is kept and what is not."""

import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import zstandard
from gradient_protocol.kinds import Compression, JobKind, UploadOutcome
from gradient_protocol.limits import BULK_WINDOW, MAX_CHUNK_DATA
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import BulkAck, Error
from gradient_server.db.runner import Database
from gradient_server.net.session import HeldAssignment
from gradient_server.storage.upload_rows import Answer, UploadRows

from tests.fakes.pool import Pool, running_pool
from tests.fakes.worker import (
    BUILDS_AND_EVALUATES,
    FakeWorker,
    connected_worker,
    nar_hash,
    nar_of,
    resumed,
)

SOURCE = f"{'1' * 32}-source"
OTHER = f"{'2' * 32}-source"
PLAIN = shapes.Capabilities(fetch=True, eval=True, build=True, zstd=False)


def large_nar() -> bytes:
    return nar_of(random.Random(7).randbytes(6 * 1024 * 1024))


@asynccontextmanager
async def evaluating(
    pool: Pool, capabilities: shapes.Capabilities = BUILDS_AND_EVALUATES
) -> AsyncIterator[tuple[FakeWorker, str]]:
    """A worker that has an evaluation, whose source it may upload, and the assignment's id."""
    known = await pool.register("host-a")
    await pool.submit()
    async with connected_worker(
        await pool.stream(),
        worker_id=known.worker_id,
        tokens={known.peer: known.token},
        capabilities=capabilities,
    ) as worker:
        job = await worker.accept(JobKind.EVAL)
        await pool.until("SELECT count(*) FROM dispatched_job WHERE status = 'Accepted'", 1)
        yield worker, job.assignment_id


async def download(worker: FakeWorker, assignment_id: str, path: str, offset: int = 0) -> tuple[str, bytes]:
    """The transfer's compression and the bytes from `offset` on, acknowledged as they come."""
    transfer_id = worker.ids.new()
    worker.send(w.NarRequest(transfer_id=transfer_id, assignment_id=assignment_id, path=path, offset=offset))
    header = await worker.expect(server.NarStreamHeader)
    assert header.transfer_id == transfer_id
    assert header.offset == offset
    received = b""
    while True:
        push = await worker.expect(server.NarPush)
        assert push.offset == offset + len(received)
        received += push.data
        worker.send(BulkAck(id=transfer_id, offset=offset + len(received)))
        if push.last:
            assert offset + len(received) == header.file_size
            return header.compression, received


async def test_a_large_nar_goes_up_and_comes_down(database: Database, tmp_path: Path) -> None:
    nar = large_nar()
    async with running_pool(database, tmp_path) as pool, evaluating(pool) as (worker, assignment_id):
        committed = await worker.upload(assignment_id, SOURCE, nar, [SOURCE])
        assert committed is not None
        assert committed.outcome is UploadOutcome.OK
        assert await worker.upload(assignment_id, SOURCE, nar) is None, "held by now: Skip"
        compression, data = await download(worker, assignment_id, SOURCE)
        assert compression is Compression.ZSTD
        assert zstandard.ZstdDecompressor().decompressobj().decompress(data) == nar
        _, rest = await download(worker, assignment_id, SOURCE, offset=len(data) - 1000)
        assert rest == data[-1000:]
        _, nothing = await download(worker, assignment_id, SOURCE, offset=len(data))
        assert nothing == b""
        worker.send(w.CacheQuery(
            query_id="q", assignment_id=assignment_id, mode="Pull", paths=[SOURCE, OTHER]
        ))  # fmt: skip
        status = await worker.expect(server.CacheStatus)
        assert status.paths == {
            SOURCE: server.PathStatus(held=True, nar_size=len(nar)),
            OTHER: server.PathStatus(held=False),
        }


async def test_without_zstd_nars_travel_plain(sqlite_database: Database, tmp_path: Path) -> None:
    nar = nar_of(b"plain" * 100_000)
    async with running_pool(sqlite_database, tmp_path) as pool, evaluating(pool, PLAIN) as session:
        worker, assignment_id = session
        committed = await worker.upload(assignment_id, SOURCE, nar)
        assert committed is not None
        assert committed.outcome is UploadOutcome.OK
        assert await download(worker, assignment_id, SOURCE, 1000) == (Compression.NONE, nar[1000:])


async def test_what_one_worker_compressed_another_gets_plain(
    sqlite_database: Database, tmp_path: Path
) -> None:
    nar = nar_of(b"compressed" * 100_000)
    async with running_pool(sqlite_database, tmp_path) as pool:
        async with evaluating(pool) as (worker, assignment_id):
            await worker.upload(assignment_id, SOURCE, nar)
            worker.complete(assignment_id, 1)
            await worker.expect(server.ReportAck)
        async with evaluating(pool, PLAIN) as (worker, assignment_id):
            assert await download(worker, assignment_id, SOURCE, 777) == (Compression.NONE, nar[777:])


async def test_the_window_holds_a_worker_that_acknowledges_nothing(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool, evaluating(pool) as (worker, assignment_id):
        await worker.upload(assignment_id, SOURCE, large_nar())
        worker.send(w.NarRequest(transfer_id="t", assignment_id=assignment_id, path=SOURCE, offset=0))
        await worker.expect(server.NarStreamHeader)
        await trio.sleep(0.3)
        pushes = [message for message in worker.unread if isinstance(message, server.NarPush)]
        assert BULK_WINDOW - MAX_CHUNK_DATA < sum(len(p.data) for p in pushes) <= BULK_WINDOW
        worker.send(w.WorkerMetrics(n=1, lateness_secs=0.0))
        await worker.expect(server.HeartbeatAck)
        assert pool.services.downloads.running == 1
    assert pool.services.downloads.running == 0


async def test_unavailable_and_impossible_downloads(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool, evaluating(pool) as (worker, assignment_id):
        await worker.upload(assignment_id, SOURCE, nar_of(b"x"))
        for path, offset in ((OTHER, 0), (SOURCE, 10**9)):
            worker.send(w.NarRequest(transfer_id="t", assignment_id=assignment_id, path=path, offset=offset))
            assert (await worker.expect(server.NarUnavailable)).transfer_id == "t"
        # Somebody removed the object behind the server's back.
        for file in (tmp_path / "nar" / "objects").rglob("*.nar*"):
            file.unlink()
        worker.send(w.NarRequest(transfer_id="t", assignment_id=assignment_id, path=SOURCE, offset=0))
        assert "cannot read" in (await worker.expect(server.NarUnavailable)).reason
        assert pool.services.downloads.running == 0


async def test_an_upload_goes_on_in_the_next_session(sqlite_database: Database, tmp_path: Path) -> None:
    nar = large_nar()
    data = zstandard.compress(nar)
    half = len(data) // 2
    async with running_pool(sqlite_database, tmp_path) as pool:
        known = await pool.register("host-a")
        await pool.submit()
        common = {
            "worker_id": known.worker_id,
            "tokens": {known.peer: known.token},
            "incarnation": "one",
        }
        async with connected_worker(await pool.stream(), **common) as worker:
            job = await worker.accept(JobKind.EVAL)
            request = w.UploadRequest(
                request_id="r", assignment_id=job.assignment_id, path=SOURCE, size_estimate=len(nar)
            )
            worker.send(request)
            await worker.expect(server.UploadGrant)
            stream = worker.connection.open_bulk("r")
            for begin in range(0, half, MAX_CHUNK_DATA):
                chunk = data[begin : min(half, begin + MAX_CHUNK_DATA)]
                await stream.send(
                    w.UploadChunk(request_id="r", offset=begin, data=chunk), end_offset=begin + len(chunk)
                )
            await stream.wait_acknowledged(half)
        with trio.fail_after(5):
            while pool.services.uploads.running:
                await trio.sleep(0.01)
        async with connected_worker(await pool.stream(), running=[resumed(job, 0)], **common) as worker:
            worker.send(request)
            grant = await worker.expect(server.UploadGrant)
            assert grant.target == server.Relay(offset=half)
            await worker.push("r", data, half, nar)
            assert (await worker.expect(server.UploadCommitted)).outcome is UploadOutcome.OK
            worker.send(request)
            assert (await worker.expect(server.UploadCommitted)).outcome is UploadOutcome.OK
    assert await_object(tmp_path) == data


def await_object(base_dir: Path) -> bytes:
    (stored,) = (base_dir / "nar" / "objects").rglob("*.nar.zst")
    return stored.read_bytes()


async def test_bad_uploads_are_rejected_and_leave_nothing(sqlite_database: Database, tmp_path: Path) -> None:
    nar = nar_of(b"contents")
    async with running_pool(sqlite_database, tmp_path) as pool, evaluating(pool) as (worker, assignment_id):
        cases = {
            "hash": (zstandard.compress(nar), nar_hash(b"other"), len(nar)),
            "size": (zstandard.compress(nar), nar_hash(nar), len(nar) + 1),
            "cut": (zstandard.compress(nar)[:-5], nar_hash(nar), len(nar)),
            "not zstd": (nar, nar_hash(nar), len(nar)),
            "not a nar": (zstandard.compress(b"x" * 64), nar_hash(b"x" * 64), 64),
            "form of the hash": (zstandard.compress(nar), hashlib.sha256(nar).hexdigest(), len(nar)),
        }
        for request_id, (data, declared, size) in cases.items():
            worker.send(w.UploadRequest(
                request_id=request_id, assignment_id=assignment_id, path=SOURCE, size_estimate=1
            ))  # fmt: skip
            await worker.expect(server.UploadGrant)
            worker.connection.send(w.UploadChunk(request_id=request_id, offset=0, data=data))
            worker.connection.send(w.UploadFinished(
                request_id=request_id, nar_hash=declared, nar_size=size, file_size=len(data), references=[],
                etags=[],
            ))  # fmt: skip
            answer = await worker.expect(server.UploadCommitted)
            assert answer.outcome is UploadOutcome.REJECTED, request_id
            assert answer.reason
        worker.send(w.UploadRequest(
            request_id="theirs", assignment_id=assignment_id, path=f"{'3' * 32}-tool", size_estimate=1
        ))  # fmt: skip
        assert "no output of this job" in ((await worker.expect(server.UploadCommitted)).reason or "")
        assert pool.services.uploads.running == 0
        assert await pool.scalar("SELECT count(*) FROM cached_path") == 0
        assert await pool.scalar("SELECT count(*) FROM upload") == 0
    assert not [file for file in (tmp_path / "nar").rglob("*") if file.is_file()]


async def test_a_gap_in_an_upload_or_a_log_ends_the_session(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        for bulk in ("upload", "log"):
            async with evaluating(pool) as (worker, assignment_id):
                if bulk == "log":
                    data = zstandard.compress(b"late")
                    worker.send(w.LogChunk(assignment_id=assignment_id, offset=5, data=data))
                else:
                    worker.send(w.UploadRequest(
                        request_id="r", assignment_id=assignment_id, path=SOURCE, size_estimate=1
                    ))  # fmt: skip
                    await worker.expect(server.UploadGrant)
                    worker.send(w.UploadChunk(request_id="r", offset=5, data=b"late"))
                error = await worker.expect(Error)
                assert error.code == 400
                assert "5" in error.reason
            with trio.fail_after(5):
                while len(pool.services.sessions):
                    await trio.sleep(0.01)


async def test_a_canceled_upload_frees_its_slot_for_the_next(
    sqlite_database: Database, tmp_path: Path
) -> None:
    one_slot = running_pool(sqlite_database, tmp_path, upload_concurrency="1")
    async with one_slot as pool, evaluating(pool) as (worker, assignment_id):
        for request_id, path in (("a", SOURCE), ("b", OTHER)):
            worker.send(w.UploadRequest(
                request_id=request_id, assignment_id=assignment_id, path=path, size_estimate=1
            ))  # fmt: skip
        assert (await worker.expect(server.UploadGrant)).request_id == "a"
        worker.send(w.UploadCancel(request_id="a"))
        assert (await worker.expect(server.UploadGrant)).request_id == "b"


async def test_two_uploads_of_one_path_send_its_bytes_once(sqlite_database: Database, tmp_path: Path) -> None:
    nar = nar_of(b"same")
    async with running_pool(sqlite_database, tmp_path) as pool, evaluating(pool) as (worker, assignment_id):
        for request_id in ("a", "b"):
            worker.send(w.UploadRequest(
                request_id=request_id, assignment_id=assignment_id, path=SOURCE, size_estimate=1
            ))  # fmt: skip
        assert (await worker.expect(server.UploadGrant)).request_id == "a"
        await worker.push("a", zstandard.compress(nar), 0, nar)
        assert (await worker.expect(server.UploadCommitted)).request_id == "a"
        second = await worker.expect(server.UploadGrant)
        assert second.request_id == "b"
        assert isinstance(second.target, server.Skip)


async def test_requests_that_come_together_share_a_transaction(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    start = UploadRows.start

    async def counted(
        self: UploadRows,
        worker_id: str,
        requests: Sequence[tuple[HeldAssignment, w.UploadRequest]],
        lease: float,
    ) -> list[Answer]:
        sizes.append(len(requests))
        return await start(self, worker_id, requests, lease)

    monkeypatch.setattr(UploadRows, "start", counted)
    async with running_pool(sqlite_database, tmp_path) as pool, evaluating(pool) as (worker, assignment_id):
        for request_id, path in (("a", SOURCE), ("b", "not a path"), ("c", OTHER)):
            worker.send(w.UploadRequest(
                request_id=request_id, assignment_id=assignment_id, path=path, size_estimate=1
            ))  # fmt: skip
        assert [(await worker.expect(server.UploadGrant)).request_id for _ in "ac"] == ["a", "c"]
        refused = await worker.expect(server.UploadCommitted)
        assert (refused.request_id, refused.outcome) == ("b", UploadOutcome.REJECTED)
        assert sizes == [3]


async def test_a_small_upload_that_comes_in_one_piece_is_acknowledged_and_committed(
    sqlite_database: Database, tmp_path: Path
) -> None:
    nar = nar_of(b"small")
    travelled = zstandard.compress(nar)
    async with running_pool(sqlite_database, tmp_path) as pool, evaluating(pool) as (worker, assignment_id):
        worker.send(w.UploadRequest(
            request_id="a", assignment_id=assignment_id, path=SOURCE, size_estimate=len(nar)
        ))  # fmt: skip
        await worker.expect(server.UploadGrant)
        assert list((tmp_path / "nar/partial").iterdir()) == []
        await worker.push("a", travelled, 0, nar)
        assert (await worker.expect(server.UploadCommitted)).outcome is UploadOutcome.OK
        assert await download(worker, assignment_id, SOURCE) == (Compression.ZSTD, travelled)
        assert list((tmp_path / "nar/partial").iterdir()) == []
