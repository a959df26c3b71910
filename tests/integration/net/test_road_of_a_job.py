"""The whole road of a job over TCP, against the real database, scheduler and stores."""

from pathlib import Path

from gradient_protocol.kinds import JobKind
from gradient_protocol.messages import server, shapes
from gradient_server.db.runner import Database

from tests.fakes.pool import running_pool
from tests.fakes.worker import build_nothing, connected_worker
from tests.fixtures.derivations import derivation
from tests.fixtures.graph import store_path


async def test_an_evaluation_becomes_builds_and_completes(database: Database, tmp_path: Path) -> None:
    low = derivation("low-1.0")
    high = derivation("high-1.0", low, attr="high")
    async with running_pool(database, tmp_path) as pool:
        registered = await pool.register("host-a")
        evaluation = await pool.submit()
        async with connected_worker(
            await pool.stream(),
            worker_id=registered.worker_id,
            tokens={registered.peer: registered.token},
        ) as worker:
            job = await worker.accept(JobKind.EVAL)
            assert isinstance(job.job, shapes.EvalJob)
            assert job.job.evaluation == evaluation
            worker.report(
                job.assignment_id,
                1,
                shapes.EvalResult(derivations=[low, high], clusters=[], warnings=[], errors=[]),
            )
            worker.complete(job.assignment_id, 2)
            await worker.expect_where(server.ReportAck, lambda ack: ack.seq == 2)

            first = await worker.accept(JobKind.BUILD)
            assert isinstance(first.job, shapes.BuildJob)
            assert first.job.name == "low-1.0"
            await build_nothing(worker, first)
            second = await worker.accept(JobKind.BUILD)
            assert isinstance(second.job, shapes.BuildJob)
            assert [i.path for i in second.job.inputs] == [store_path("low-1.0")]
            await build_nothing(worker, second)
            await pool.until("SELECT status FROM evaluation WHERE id = :id", "Completed", id=evaluation)
        assert await pool.scalar("SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL") == 0
        assert await pool.scalar("SELECT count(*) FROM cached_path") == 2
