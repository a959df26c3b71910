"""How many no-op jobs a second the server carries through their whole life, durably.

    python -m bench.dispatch [--postgres] [--workers 200] [--pending 1000] [--secs 15] [--profile FILE]

The server (real sessions, scheduler, graph and database, no HTTP) runs in this process, the workers
(protocol level, one process, `dispatch_workers.py`) in another. A job's life is RequestJob,
AssignJob, AssignJobResponse, BuildOutput, JobCompleted and the ReportAck; offers and scores run
beside it and are counted in. Every job's output is one that the server holds already, so nothing is
uploaded. `server_cpu_pct` is of one core; `server_cpu_ms_per_job` counts connecting, and every job,
measured or not.
"""

import argparse
import cProfile
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import trio
from gradient_protocol.address import TcpAddress, listener_address, open_listeners
from gradient_protocol.kinds import Compression
from gradient_protocol.messages.shapes import GitSource
from gradient_server import logging
from gradient_server.config import load
from gradient_server.db.migrate import migrate
from gradient_server.db.queries.cached_paths import CachedPath, put_path
from gradient_server.db.queries.registry import SERVER_PEER, ensure_task, find_project, register_worker
from gradient_server.db.runner import Database
from gradient_server.first_start import DEFAULT_PROJECT, ensure_registry
from gradient_server.graph.submit import submit_evaluation
from gradient_server.net.listener import Door
from gradient_server.net.services import Services
from gradient_server.wiring import build_services, make_ids, tune_interpreter

WARM_UP_SECS = 3.0
NAR_HASH = f"sha256:{'0' * 64}"
NAR_SIZE = 112
PATH = f"{'0' * 32}-noop"


def prepare(connection: sa.Connection, services: Services, workers: int) -> list[dict[str, str]]:
    """Workers with tokens, and the output that every job makes."""
    now, ids = services.clock.now(), services.ids
    ensure_registry(connection, now=now, ids=ids)
    entry = CachedPath(
        path=PATH,
        nar_hash=NAR_HASH,
        nar_size=NAR_SIZE,
        file_size=NAR_SIZE,
        compression=Compression.NONE,
        object=f"{'0' * 64}.nar",
        references=(),
    )
    put_path(connection, entry, now=now)
    registered = [
        (f"host-{number}", register_worker(connection, f"host-{number}", None, SERVER_PEER, now=now, ids=ids))
        for number in range(workers + 1)
    ]
    return [{"name": name, "worker_id": one.worker_id, "token": one.token} for name, one in registered]


def submit(connection: sa.Connection, services: Services) -> tuple[str, list[Any]]:
    """The evaluation that all jobs belong to."""
    now, ids = services.clock.now(), services.ids
    project = find_project(connection, DEFAULT_PROJECT)
    assert project is not None
    return submit_evaluation(
        connection,
        project=project.id,
        task=ensure_task(connection, project.id, "bench", now=now, ids=ids),
        source=GitSource(url="https://example.invalid/bench"),
        source_path=None,
        attrs=[],
        prioritized=False,
        build_request=True,
        now=now,
        ids=ids,
    )


@asynccontextmanager
async def server(url: str, base_dir: Path) -> AsyncIterator[tuple[Services, str]]:
    """The server without HTTP; its address."""
    config = load(file=None, environment={}, flags={"base_dir": str(base_dir)}).config
    database = await Database.open(url)
    try:
        services = build_services(config, database, make_ids(), "bench")
        listeners = await open_listeners(TcpAddress("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            await nursery.start(services.scheduler.run)
            await nursery.start(services.history.run)
            await nursery.start(services.graces.run)
            await nursery.start(services.uploads.run)
            nursery.start_soon(Door(services).run, listeners, nursery)
            yield services, str(listener_address(listeners[0]))
            nursery.cancel_scope.cancel()
    finally:
        await database.aclose()


async def measure(url: str, base_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One case."""
    await trio.to_thread.run_sync(migrate, url)
    async with server(url, base_dir) as (services, address):
        workers = await services.database.run(partial(prepare, services=services, workers=options.workers))
        await services.transact(partial(submit, services=services))
        plan = {
            "address": address,
            "workers": workers,
            "pending": options.pending,
            "warm_up_secs": WARM_UP_SECS,
            "measure_secs": options.secs,
            "path": PATH,
            "nar_hash": NAR_HASH,
            "nar_size": NAR_SIZE,
        }
        profiler = cProfile.Profile() if options.profile else None
        if profiler is not None:
            profiler.enable()
        began, cpu_began = time.perf_counter(), time.process_time()
        done = await trio.run_process(
            [sys.executable, "-m", "bench.dispatch_workers"],
            stdin=(json.dumps(plan) + "\n").encode(),
            capture_stdout=True,
        )
        cpu_secs = time.process_time() - cpu_began
        elapsed_secs = time.perf_counter() - began
        if profiler is not None:
            profiler.disable()
            profiler.dump_stats(options.profile)
        result: dict[str, Any] = json.loads(done.stdout)
        return {
            "workers": options.workers,
            **result,
            "server_cpu_pct": round(cpu_secs / elapsed_secs * 100),
            "server_cpu_ms_per_job": round(cpu_secs * 1000 / max(1, result["jobs_in_all"]), 3),
        }


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--postgres", action="store_true", help="PostgreSQL instead of SQLite")
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--pending", type=int, default=1000)
    parser.add_argument("--secs", type=float, default=15.0)
    parser.add_argument("--profile", help="write the server's profile to this file")
    options = parser.parse_args()
    logging.configure(level="warning")
    tune_interpreter()
    with tempfile.TemporaryDirectory(prefix="gradient-bench-", dir=".") as base:
        if options.postgres:
            from tests.fixtures.postgres import PostgresServer  # noqa: PLC0415 - only where it is asked for

            postgres = PostgresServer()
            try:
                url = postgres.url(postgres.create())
                result = trio.run(measure, url, Path(base), options)
            finally:
                postgres.stop()
        else:
            result = trio.run(measure, f"sqlite:///{Path(base).absolute()}/bench.db", Path(base), options)
    database = "postgresql" if options.postgres else "sqlite"
    print(json.dumps({"case": f"dispatch-{database}", **result}))


if __name__ == "__main__":
    main()
