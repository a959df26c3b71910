"""Transactions a second through `database.run`, with 200 callers at once and with one.

`python -m bench.db [--postgres]`. Cases: `insert` (one row through SQLAlchemy), `hot` (one row through
a hot statement), `life` (claim, accept, close of a job: three transactions). Durable: every answer
comes after its commit was synced. The database lies in the current directory, for /tmp may be memory.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import sqlalchemy as sa
import trio
from gradient_server.db import tables
from gradient_server.db.engine import make_write_engine, parse_url
from gradient_server.db.hot import HotStatement, execute_text
from gradient_server.db.queries.claims import (
    Claim,
    accept_assignment,
    claim_assignment,
    close_abandoned,
)
from gradient_server.db.runner import Database

CALLERS = 200
SECONDS = 4.0
JOBS = 30_000

_INSERT = HotStatement("INSERT INTO project (id, name, created_at) VALUES (:id, :name, :now)")

Work = Callable[[Database, str], Awaitable[None]]


async def insert(database: Database, key: str) -> None:
    """One row, by SQLAlchemy."""
    values = {"id": key, "name": key, "created_at": 1.0}
    await database.run(lambda c: c.execute(tables.project.insert(), values) and None)


async def hot(database: Database, key: str) -> None:
    """The same row, by a hot statement."""
    await database.run(lambda c: execute_text(c, _INSERT, {"id": key, "name": key, "now": 1.0}))


async def life(database: Database, key: str) -> None:
    """What the claims module does in the life of one job."""
    made = Claim(assignment_id=f"a-{key}", job_key=f"build:{key}", worker_id="w", instance_id="i")
    if not await database.run(lambda c: claim_assignment(c, made, now=1.0)):
        raise RuntimeError(f"{key} was not there to be claimed")
    await database.run(lambda c: accept_assignment(c, made.assignment_id, "w", now=2.0))
    await database.run(lambda c: close_abandoned(c, made.assignment_id, now=3.0))


CASES: dict[str, tuple[Work, int]] = {"insert": (insert, 1), "hot": (hot, 1), "life": (life, 3)}


def fill(connection: sa.Connection, prefix: str) -> None:
    """Builds that wait, one for each turn of `life`."""
    numbers = range(JOBS)
    connection.execute(
        tables.derivation.insert(),
        [
            {
                "id": number + 1,
                "drv_path": f"{number}.drv",
                "name": "n",
                "history_name": "n",
                "system": "any",
                "features": [],
                "command": [],
                "env": {},
                "prefer_local": False,
                "created_at": 1.0,
            }
            for number in numbers
        ],
    )
    rows = [
        {
            "id": f"{prefix}{number}",
            "derivation": number + 1,
            "status": "Queued",
            "created_at": 1.0,
            "queued_at": 1.0,
            "ready_at": 1.0,
        }
        for number in numbers
    ]
    connection.execute(tables.derivation_build.insert(), rows)


async def measure(database: Database, case: str, callers: int) -> dict[str, object]:
    """Runs one case for SECONDS and says what came of it."""
    work, transactions = CASES[case]
    prefix = f"{case}-{callers}-" if case != "life" else "build-"
    counter = iter(range(JOBS))
    latencies: list[float] = []
    commits = database.statistics.commits
    deadline = time.perf_counter() + SECONDS

    async def caller() -> None:
        while (started := time.perf_counter()) < deadline:
            number = next(counter, None)
            if number is None:
                return
            await work(database, f"{prefix}{number}")
            latencies.append(time.perf_counter() - started)

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(callers):
            nursery.start_soon(caller)
    took = time.perf_counter() - started
    latencies.sort()
    return {
        "bench": "db",
        "database": database.dialect,
        "case": case,
        "callers": callers,
        "transactions_per_sec": round(len(latencies) * transactions / took),
        "transactions_per_commit": round(
            len(latencies) * transactions / max(1, database.statistics.commits - commits), 1
        ),
        "p50_ms": round(statistics.median(latencies) * 1000, 2),
        "p99_ms": round(latencies[int(len(latencies) * 0.99)] * 1000, 2),
    }


async def run(url: str) -> None:
    """Every case, on one database."""
    for callers in (CALLERS, 1):
        engine = make_write_engine(parse_url(url))
        with engine.begin() as connection:
            tables.metadata.drop_all(connection)
            tables.metadata.create_all(connection)
            fill(connection, "build-")
        engine.dispose()
        database = await Database.open(url)
        try:
            for case in CASES:
                print(json.dumps(await measure(database, case, callers)), flush=True)
        finally:
            await database.aclose()


@contextlib.contextmanager
def some_database(*, postgres: bool) -> Iterator[str]:
    """The URL of a scratch database."""
    if postgres:
        from tests.fixtures.postgres import PostgresServer  # noqa: PLC0415 - needs the development tools

        server = PostgresServer(durable=True)
        try:
            yield server.url(server.create())
        finally:
            server.stop()
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        yield f"sqlite:///{directory}/bench.db"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgres", action="store_true", help="measure PostgreSQL instead of SQLite")
    parser.add_argument(
        "--switch-interval", type=float, help="seconds after which Python lets another thread run (0.005)"
    )
    arguments = parser.parse_args()
    if arguments.switch_interval is not None:
        sys.setswitchinterval(arguments.switch_interval)
    with some_database(postgres=arguments.postgres) as url:
        trio.run(partial(run, url))
    return 0


if __name__ == "__main__":
    sys.exit(main())
