"""The real server against the suite, over memory streams and over TCP."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages import server, shapes
from gradient_server.db.runner import Database
from gradient_server.net.serve import serve_connection
from trio.testing import memory_stream_pair

from tests.conformance.server_side import CHECKS, MakeServer
from tests.fakes.pool import Pool, running_pool
from tests.fakes.worker import FakeWorker, connected_worker
from tests.fixtures.derivations import derivation

EVALUATES = shapes.Capabilities(fetch=True, eval=True, build=False, zstd=True)


class RealServer:
    """A pool with one registered worker, and another that evaluates what `submit_noop` submits."""

    def __init__(
        self,
        pool: Pool,
        worker_id: str,
        tokens: dict[str, str],
        evaluator: FakeWorker,
        nursery: trio.Nursery,
        *,
        tcp: bool,
    ) -> None:
        self.worker_id = worker_id
        self.tokens = tokens
        self._pool = pool
        self._evaluator = evaluator
        self._nursery = nursery
        self._tcp = tcp
        self._submitted = 0

    async def connect(self) -> trio.abc.Stream:
        if self._tcp:
            return await self._pool.stream()
        ours, theirs = memory_stream_pair()
        self._nursery.start_soon(serve_connection, self._pool.services, ours)
        return theirs

    async def submit_noop(self) -> None:
        self._submitted += 1
        name = f"noop-{self._submitted}.0"
        await self._pool.submit()
        job = await self._evaluator.accept(JobKind.EVAL)
        noop = derivation(name, attr=name)
        result = shapes.EvalResult(derivations=[noop], clusters=[], warnings=[], errors=[])
        self._evaluator.report(job.assignment_id, 1, result)
        self._evaluator.complete(job.assignment_id, 2)
        await self._evaluator.expect_where(
            server.ReportAck, lambda ack: ack.assignment_id == job.assignment_id and ack.seq == 2
        )


@pytest.fixture(params=["memory", "tcp"])
def make_server(request: pytest.FixtureRequest, sqlite_database: Database, tmp_path: Path) -> MakeServer:
    """A server on an empty database."""

    @asynccontextmanager
    async def make() -> AsyncIterator[RealServer]:
        async with running_pool(sqlite_database, tmp_path) as pool:
            one, other = await pool.register("conformance"), await pool.register("evaluator")
            async with (
                connected_worker(
                    await pool.stream(),
                    worker_id=other.worker_id,
                    tokens={other.peer: other.token},
                    capabilities=EVALUATES,
                    builds=0,
                ) as evaluator,
                trio.open_nursery() as nursery,
            ):
                tokens = {one.peer: one.token}
                yield RealServer(pool, one.worker_id, tokens, evaluator, nursery, tcp=request.param == "tcp")
                nursery.cancel_scope.cancel()

    return make


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_server(check: Callable[[MakeServer], Awaitable[None]], make_server: MakeServer) -> None:
    await check(make_server)
