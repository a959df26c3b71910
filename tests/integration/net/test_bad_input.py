"""What a broken or hostile peer sends, before and after the handshake, and what it gets for it."""

from pathlib import Path

import msgpack
import pytest
import trio
from gradient_protocol.framing import frame
from gradient_protocol.kinds import JobKind
from gradient_protocol.limits import MAX_CHUNK_DATA, MAX_MESSAGE, MAX_MESSAGE_BEFORE_INIT
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import Error
from gradient_server.db.runner import Database

from tests.fakes.pool import Pool, running_pool
from tests.fakes.worker import FakeWorker, connected_worker


async def answer_to(pool: Pool, data: bytes) -> dict[str, object]:
    """The one message that the server answers raw bytes with before it closes."""
    stream = await pool.stream()
    await stream.send_all(data)
    received = b""
    with trio.fail_after(5):
        while chunk := await stream.receive_some(65536):
            received += chunk
    await stream.aclose()
    length = int.from_bytes(received[:4], "big")
    assert len(received) == 4 + length, "one message, and the end"
    answer: dict[str, object] = msgpack.unpackb(received[4:])
    return answer


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(msgpack.packb([1, 2])), 400),
        (frame(msgpack.packb({"type": "Nonsense"})), 400),
        (frame(msgpack.packb({"type": "InitConnection", "version": "1"})), 400),
        (frame(msgpack.packb({"type": "RequestJobList"})), 400),
        (frame(msgpack.packb({"type": "AuthResponse", "tokens": {}})), 400),
        (frame(b"\xdd\xff\xff\xff\xff" * 100), 413),
        (frame(b"\x91" * 5000), 413),
        ((MAX_MESSAGE_BEFORE_INIT + 1).to_bytes(4, "big"), 413),
        (b"GET / HTTP/1.1\r\n\r\n", 413),
    ],
)
async def test_before_the_handshake(
    sqlite_database: Database, tmp_path: Path, data: bytes, code: int
) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        answer = await answer_to(pool, data)
        assert answer["type"] in {"Error", "Reject"}
        assert answer["code"] == code
        assert len(pool.services.sessions) == 0


async def test_a_frame_that_never_ends_is_given_up(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradient_protocol.handshake.drive.HANDSHAKE_SECS", 0.2)
    async with running_pool(sqlite_database, tmp_path) as pool:
        answer = await answer_to(pool, (100).to_bytes(4, "big") + b"\x81")
        assert answer["code"] == 408


CHUNK = {"type": "UploadChunk", "request_id": "r", "offset": 0}


async def connected(pool: Pool) -> dict[str, object]:
    known = await pool.register("host-a")
    return {"worker_id": known.worker_id, "tokens": {known.peer: known.token}}


async def send_raw(worker: FakeWorker, data: bytes) -> None:
    """Past the worker's own codec."""
    await worker.connection._stream.send_all(data)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(msgpack.packb({"type": "RequestJob", "kind": "Tea"})), 400),
        (frame(msgpack.packb({"type": "RequestJob", "kind": "Build"}) + b"\x00"), 400),
        (frame(msgpack.packb({"type": "InitAck"})), 400),
        ((MAX_MESSAGE + 1).to_bytes(4, "big"), 413),
        (frame(msgpack.packb({"type": "Zstd", "data": b"not a frame"})), 400),
        (frame(msgpack.packb(CHUNK | {"data": bytes(MAX_CHUNK_DATA + 1)})), 413),
        (frame(msgpack.packb({"type": "ResumeJobs", "running": []})), 400),
        (frame(msgpack.packb({"type": "AuthResponse", "tokens": {}})), 400),
    ],
)
async def test_after_the_handshake(sqlite_database: Database, tmp_path: Path, data: bytes, code: int) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        known = await connected(pool)
        async with connected_worker(await pool.stream(), **known) as worker:
            await send_raw(worker, data)
            error = await worker.expect(Error)
            assert error.code == code, error
            assert error.assignment_id is None
            with trio.fail_after(5):
                while len(pool.services.sessions):
                    await trio.sleep(0.01)


async def test_nothing_about_assignments_before_the_resume(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        session = connected_worker(await pool.stream(), resume=False, **await connected(pool))
        async with session as worker:
            worker.send(w.RequestJob(kind=JobKind.BUILD))
            error = await worker.expect(Error)
            assert error.code == 400
            assert "ResumeJobs is due" in error.reason


async def test_a_report_that_cannot_be_read_costs_its_job_alone(database: Database, tmp_path: Path) -> None:
    async with running_pool(database, tmp_path) as pool:
        evaluation = await pool.submit()
        async with connected_worker(await pool.stream(), **await connected(pool)) as worker:
            job = await worker.accept(JobKind.EVAL)
            bad = {"type": "EvalResult", "derivations": 7, "clusters": [], "warnings": [], "errors": []}
            report = {"type": "JobUpdate", "assignment_id": job.assignment_id, "seq": 1, "update": bad}
            await send_raw(worker, frame(msgpack.packb(report)))
            error = await worker.expect(Error)
            assert (error.assignment_id, error.seq) == (job.assignment_id, 1)
            # What was under way behind it is dropped without being called a gap.
            worker.complete(job.assignment_id, 3)
            await worker.expect(server.ReportAck)
            worker.send(w.JobFailed(
                assignment_id=job.assignment_id, seq=1, kind="Permanent", error="refused", missing_paths=[],
                spans=[], spans_dropped=0,
            ))  # fmt: skip
            assert (await worker.expect_where(server.ReportAck, lambda a: a.seq == 1)).refused is None
        assert await pool.scalar("SELECT status FROM evaluation WHERE id = :id", id=evaluation) == "Failed"


async def test_a_gap_in_the_reports_ends_the_session(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        await pool.submit()
        async with connected_worker(await pool.stream(), **await connected(pool)) as worker:
            job = await worker.accept(JobKind.EVAL)
            worker.complete(job.assignment_id, 2)
            error = await worker.expect(Error)
            assert error.code == 400
            assert "report 2" in error.reason
            assert error.assignment_id is None


async def test_a_job_that_the_worker_cannot_read_fails(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        evaluation = await pool.submit()
        async with connected_worker(await pool.stream(), **await connected(pool)) as worker:
            worker.send(w.RequestJob(kind=JobKind.EVAL))
            job = await worker.expect(server.AssignJob)
            worker.send(Error(code=400, reason="no such field", assignment_id=job.assignment_id))
            await pool.until("SELECT status FROM evaluation WHERE id = :id", "Failed", id=evaluation)
            worker.send(w.WorkerMetrics(n=1, lateness_secs=0.0))
            await worker.expect(server.HeartbeatAck)


async def test_too_many_reports_at_once(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        await pool.submit()
        async with connected_worker(await pool.stream(), **await connected(pool)) as worker:
            job = await worker.accept(JobKind.EVAL)
            stats = shapes.EvalStats(derivations=0, known=0, wall_ms=1, cpu_ms=1)
            reports = [
                w.JobUpdate(assignment_id=job.assignment_id, seq=seq, update=stats) for seq in range(1, 12)
            ]
            for report in reports:
                worker.send(report)
            error = await worker.expect(Error)
            assert error.code == 413
