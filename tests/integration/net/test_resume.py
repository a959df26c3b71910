"""Lost connections: what comes back is adopted, what does not is lost after the grace."""

import os
from pathlib import Path

import pytest
import trio
import zstandard
from gradient_protocol.kinds import JobKind, ResumeState
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import Error
from gradient_server.db.errors import DatabaseError
from gradient_server.db.runner import Database
from gradient_server.graph.aborts import abort_evaluation

from tests.fakes.pool import Pool, running_pool
from tests.fakes.worker import FakeWorker, connected_worker, resumed

OPEN = "SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL"


async def accepted(pool: Pool, worker: FakeWorker) -> server.AssignJob:
    job = await worker.accept(JobKind.EVAL)
    await pool.until("SELECT count(*) FROM dispatched_job WHERE status = 'Accepted'", 1)
    return job


async def log(worker: FakeWorker, assignment_id: str, offset: int, text: bytes) -> None:
    stream = worker.connection.open_bulk(assignment_id, offset)
    chunk = w.LogChunk(assignment_id=assignment_id, offset=offset, data=zstandard.compress(text))
    await stream.send(chunk, end_offset=offset + len(text))
    await stream.wait_acknowledged(offset + len(text))
    stream.close()


async def test_a_job_goes_on_after_a_broken_connection(database: Database, tmp_path: Path) -> None:
    async with running_pool(database, tmp_path) as pool:
        known = await pool.register("host-a")
        evaluation = await pool.submit()
        common = {
            "worker_id": known.worker_id,
            "tokens": {known.peer: known.token},
            "incarnation": "one",
        }
        async with connected_worker(await pool.stream(), **common) as worker:
            job = await accepted(pool, worker)
            await log(worker, job.assignment_id, 0, b"first line\n")
            empty = shapes.EvalResult(derivations=[], clusters=[], warnings=[], errors=[])
            worker.report(job.assignment_id, 1, empty)
            await worker.expect(server.ReportAck)
        assert await pool.scalar(OPEN) == 1
        running = [resumed(job, 1), w.ResumedJob(
            assignment_id="gone", job_id="eval:x", state=ResumeState.RUNNING, seq=3
        )]  # fmt: skip
        async with connected_worker(
            await pool.stream(), running=running, expect_resume=False, **common
        ) as worker:
            ack = await worker.expect(server.ResumeAck)
            assert [(a.assignment_id, a.seq, a.log_offset) for a in ack.adopted] == [
                (job.assignment_id, 1, len(b"first line\n"))
            ]
            assert ack.dropped == ["gone"]
            await log(worker, job.assignment_id, 11, b"second line\n")
            # Said before, and said again: acknowledged, and of no effect.
            worker.report(job.assignment_id, 1, shapes.EvalResult(
                derivations=[], clusters=[], warnings=[], errors=[shapes.Note(message="never")]
            ))  # fmt: skip
            worker.complete(job.assignment_id, 2)
            await worker.expect_where(server.ReportAck, lambda a: a.seq == 2)
        assert pool.services.logs.read(job.assignment_id, 0, 100) == b"first line\nsecond line\n"
        assert await pool.scalar("SELECT log_bytes FROM dispatched_job") == 23
        status = await pool.scalar("SELECT status FROM evaluation WHERE id = :id", id=evaluation)
        assert status == "Completed"


async def test_a_log_goes_on_from_what_its_file_has(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        known = await pool.register("host-a")
        await pool.submit()
        common = {
            "worker_id": known.worker_id,
            "tokens": {known.peer: known.token},
            "incarnation": "one",
        }
        async with connected_worker(await pool.stream(), **common) as worker:
            job = await accepted(pool, worker)
            await log(worker, job.assignment_id, 0, b"first line\n")
        again = {"running": [resumed(job, 0)], "expect_resume": False, **common}
        async with connected_worker(await pool.stream(), **again) as worker:
            assert (await worker.expect(server.ResumeAck)).adopted[0].log_offset == 11
        # What a crash of the server's host leaves of a file that was not synced.
        (file,) = tmp_path.rglob(f"{job.assignment_id}.log")
        os.truncate(file, 0)
        pool.services.logs.close()
        async with connected_worker(await pool.stream(), **again) as worker:
            assert (await worker.expect(server.ResumeAck)).adopted[0].log_offset == 0
            await log(worker, job.assignment_id, 0, b"first line\n")
        assert pool.services.logs.read(job.assignment_id, 0, 100) == b"first line\n"


async def test_what_a_worker_does_not_list_is_given_to_another(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        first, second = await pool.register("host-a"), await pool.register("host-b")
        await pool.submit()
        mine = {
            "worker_id": first.worker_id,
            "tokens": {first.peer: first.token},
            "incarnation": "one",
        }
        async with connected_worker(await pool.stream(), **mine) as worker:
            lost = await accepted(pool, worker)
        async with connected_worker(await pool.stream(), **mine):
            await pool.until(OPEN, 0)
            status = await pool.scalar("SELECT status FROM dispatched_job")
            assert status == "Abandoned"
        async with connected_worker(
            await pool.stream(), worker_id=second.worker_id, tokens={second.peer: second.token}
        ) as other:
            # A stale id never changes a job, and its report is acknowledged all the same.
            other.complete(lost.assignment_id, 1)
            await other.expect_where(server.ReportAck, lambda a: a.assignment_id == lost.assignment_id)


async def test_the_grace_ends_what_nobody_came_back_for(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path, proto_reconnect_grace_secs="0.3") as pool:
        known = await pool.register("host-a")
        await pool.submit()
        async with connected_worker(
            await pool.stream(), worker_id=known.worker_id, tokens={known.peer: known.token}
        ) as worker:
            await accepted(pool, worker)
        await trio.sleep(0.1)
        assert await pool.scalar(OPEN) == 1
        await pool.until(OPEN, 0)
        assert await pool.scalar("SELECT status FROM evaluation") == "Queued"
        assert pool.services.scheduler.snapshot().workers == ()


async def test_an_abort_is_sent_again_after_the_resume(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        services = pool.services
        known = await pool.register("host-a")
        evaluation = await pool.submit()
        common = {
            "worker_id": known.worker_id,
            "tokens": {known.peer: known.token},
            "incarnation": "one",
        }
        async with connected_worker(await pool.stream(), **common) as worker:
            job = await accepted(pool, worker)
            await services.transact(
                lambda c: (None, abort_evaluation(c, evaluation, now=1.0, ids=services.ids) or [])
            )
            assert (await worker.expect(server.AbortJob)).assignment_id == job.assignment_id
        async with connected_worker(await pool.stream(), running=[resumed(job, 0)], **common) as worker:
            assert (await worker.expect(server.AbortJob)).assignment_id == job.assignment_id
            worker.send(w.JobFailed(
                assignment_id=job.assignment_id, seq=1, kind="Aborted", error="aborted", missing_paths=[],
                spans=[], spans_dropped=0,
            ))  # fmt: skip
            await worker.expect(server.ReportAck)
        assert await pool.scalar(OPEN) == 0
        assert await pool.scalar("SELECT status FROM evaluation") == "Aborted"


async def test_a_worker_comes_back_although_its_last_session_could_not_be_cleared_up(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(sqlite_database, tmp_path) as pool:
        known = await pool.register("host-a")
        await pool.submit()
        common = {
            "worker_id": known.worker_id,
            "tokens": {known.peer: known.token},
            "incarnation": "one",
        }

        async def fail(_session: object) -> None:
            raise DatabaseError("the disk is full")

        async with connected_worker(await pool.stream(), **common) as worker:
            job = await accepted(pool, worker)
            monkeypatch.setattr(pool.services.uploads, "session_ended", fail)
        with trio.fail_after(5):
            while len(pool.services.sessions):
                await trio.sleep(0.01)
            monkeypatch.undo()
            async with connected_worker(
                await pool.stream(), running=[resumed(job, 0)], expect_resume=False, **common
            ) as worker:
                ack = await worker.expect(server.ResumeAck)
                assert [one.assignment_id for one in ack.adopted] == [job.assignment_id]


async def test_a_silent_worker_is_cut_off(sqlite_database: Database, tmp_path: Path) -> None:
    async with running_pool(sqlite_database, tmp_path, proto_worker_heartbeat_timeout_secs="0.3") as pool:
        known = await pool.register("host-a")
        async with connected_worker(
            await pool.stream(), worker_id=known.worker_id, tokens={known.peer: known.token}
        ) as worker:
            assert (await worker.expect(Error)).code == 408
