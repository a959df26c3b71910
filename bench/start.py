"""How soon a server works that is started on a large database: ready, a worker resumed, a job assigned.

    python -m bench.start [--builds 100000] [--postgres] [--runs 3] [--running 8]

The database is what a farm has after days (`tests/fixtures/farm.py`): finished evaluations with their
builds, attempts, spans and history, and ten open ones with thousands of builds that wait and hundreds at
workers. It is started as an operator starts it; from the start of the process on, a worker (protocol
level) tries to connect every 20 ms, says that it still runs what it ran (`--running` builds at most), and
asks for a build; a second one runs nothing and asks for an evaluation. One JSON line a run, seconds since
the start of the process; first on a database that is as good as empty. Memory is resident MiB; `settled`
is 5 s later.
"""

import argparse
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import sqlalchemy as sa
import trio
from gradient_protocol.address import connect, parse_address
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind, ResumeState
from gradient_protocol.messages import server as s
from gradient_protocol.messages import worker as w
from gradient_server.db.engine import make_write_engine
from gradient_server.db.engine import parse_url as parse_database_url
from gradient_server.db.migrate import migrate
from gradient_server.db.queries.registry import Registration
from gradient_server.first_start import prepare, replace_instance_id

from tests.acceptance.pool import Pool
from tests.fakes.worker import connected_worker
from tests.fixtures.farm import Farm, FarmSize, fill_farm
from tests.fixtures.postgres import PostgresServer

INSTANCE = "0192d5a8-0000-7000-8000-000000000001"
TRY_EVERY_SECS = 0.02
LIMIT_SECS = 300.0
SETTLE_SECS = 5.0


def fill(url: str, size: FarmSize) -> tuple[Farm, dict[str, int]]:
    """A farm's database, and how many rows its large tables have."""
    migrate(url)
    engine = make_write_engine(parse_database_url(url))
    with engine.begin() as connection:
        farm = fill_farm(connection, size, now=time.time(), instance=INSTANCE, ids=IdSource())
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text("ANALYZE"))  # as its autovacuum would have
        rows = {
            table: int(connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one())
            for table in ("derivation_build", "derivation_dependency", "dispatched_job", "span")
        }
    engine.dispose()
    return farm, rows


async def persistently(attempt: Callable[[], Awaitable[None]]) -> None:
    """Until it comes about."""
    with trio.fail_after(LIMIT_SECS):
        while True:
            try:
                return await attempt()
            except OSError:
                await trio.sleep(TRY_EVERY_SECS)


def ask_ready(url: str) -> None:
    """OSError where it is not ready."""
    with urllib.request.urlopen(f"{url}/readyz") as answer:
        answer.read()


async def run(pool: Pool, farm: Farm, flags: list[str], running: int) -> dict[str, Any]:
    """One start, in seconds since the process began."""
    began = time.perf_counter()
    found: dict[str, Any] = {}

    def note(what: str) -> None:
        found[f"{what}_secs"] = round(time.perf_counter() - began, 2)

    async def ready() -> None:
        await trio.to_thread.run_sync(lambda: pool.start_server(*flags))
        await persistently(lambda: trio.to_thread.run_sync(ask_ready, pool.url))
        note("ready")

    async def work(registration: Registration, kind: JobKind, listed: list[w.ResumedJob]) -> None:
        stream = await connect(parse_address(pool.listen))
        async with connected_worker(
            stream,
            worker_id=registration.worker_id,
            tokens={registration.peer: registration.token},
            running=listed,
            builds=len(listed) + 1,
            expect_resume=False,
        ) as worker:
            answer = await worker.expect(s.ResumeAck, within_secs=LIMIT_SECS)
            if listed:
                adopted = {one.assignment_id for one in answer.adopted}
                assert adopted == {one.assignment_id for one in listed}, answer
                note("resumed")
            await worker.accept(kind, within_secs=LIMIT_SECS)
            note(f"first_{kind.value.lower()}")
            await all_served()

    async def all_served() -> None:
        while not {"ready_secs", "first_eval_secs", "first_build_secs"} <= found.keys():
            await trio.sleep(TRY_EVERY_SECS)

    builder, evaluator = farm.workers[1], farm.workers[0]
    listed = [
        w.ResumedJob(
            assignment_id=assignment,
            job_id=assignment.replace("assignment-", "build:build-"),
            state=ResumeState.RUNNING,
            seq=0,
        )
        for assignment in farm.running.get(builder.worker_id, [])[:running]
    ]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ready)
        nursery.start_soon(persistently, lambda: work(builder, JobKind.BUILD, listed))
        nursery.start_soon(persistently, lambda: work(evaluator, JobKind.EVAL, []))
    found.update(memory_and_cpu(pool, "ready"))
    await trio.sleep(SETTLE_SECS)
    found.update(memory_and_cpu(pool, "settled"))
    return found


def memory_and_cpu(pool: Pool, when: str) -> dict[str, float]:
    """Resident memory and processor seconds of the server so far."""
    assert pool.server is not None
    process = psutil.Process(pool.server.pid)
    times = process.cpu_times()
    return {
        f"{when}_rss_mib": round(process.memory_info().rss / 2**20, 1),
        f"{when}_cpu_secs": round(times.user + times.system, 2),
    }


@contextmanager
def database(pool: Pool, *, postgres: bool) -> Iterator[str]:
    """The URL of an empty database."""
    if not postgres:
        yield f"sqlite:///{pool.server_dir}/gradient.db"
        return
    server = PostgresServer(durable=True)
    try:
        yield server.url(server.create())
    finally:
        server.stop()


def measure(size: FarmSize, *, postgres: bool, runs: int, running: int) -> None:
    """Fills, and starts again and again; a line each."""
    with Pool() as pool, database(pool, postgres=postgres) as url:
        prepare(pool.server_dir)
        replace_instance_id(pool.server_dir, INSTANCE)
        began = time.perf_counter()
        farm, rows = fill(url, size)
        filled = {"fill_secs": round(time.perf_counter() - began, 1), "queued": farm.queued, **rows}
        for _ in range(runs):
            figures = trio.run(run, pool, farm, ["--database-url", url], running)
            case = {"case": "start", "database": "postgresql" if postgres else "sqlite"}
            case |= {"builds": size.builds, **filled, **figures, "load": round(os.getloadavg()[0], 1)}
            sys.stdout.write(json.dumps(case) + "\n")
            sys.stdout.flush()
            assert pool.server is not None
            pool.server.end(signal.SIGTERM)


def main() -> None:
    """Parses and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--builds", type=int, default=100_000)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--running", type=int, default=8)
    options = parser.parse_args()
    few = FarmSize(10, per_evaluation=10, open_evaluations=1, queued_evaluations=options.runs, workers=2)
    for size in (few, FarmSize(options.builds)):
        measure(size, postgres=options.postgres, runs=options.runs, running=options.running)


if __name__ == "__main__":
    main()
