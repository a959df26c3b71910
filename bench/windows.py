"""How long one pass over the instance windows takes, and what the event loop notices of it.

    python -m bench.windows [--sqlite] [--metrics 1000000] [--spans 10000000] [--days 90]

Fills a fresh database with that many metric rows and spans, and as many assignments as metric rows,
spread evenly over the days (90 is `retentionDays`), then takes passes. `--days 1` puts everything into
the longest windows. `loop_stall_ms` is the longest time that another task of the event loop was late.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa
import trio
from gradient_server.clock import SystemClock
from gradient_server.db.engine import make_write_engine, parse_url
from gradient_server.db.runner import Database
from gradient_server.db.tables import metadata
from gradient_server.history.refresh import WindowsPass

PASSES = 4
LOOK_SECS = 0.005

# Ten spans a job, as a build of a few inputs leaves them; five of them are what windows read.
KINDS = ("Prefetch", "NarFetch", "NarFetch", "CacheQueryWait", "Build",
         "Compress", "UploadWait", "NarPush", "Download", "NarFetch")  # fmt: skip


def series(dialect: str, count: int) -> str:
    """A table `series(n)` of 0 to count - 1."""
    if dialect == "postgresql":
        return f"series AS (SELECT n FROM generate_series(0, {count} - 1) AS n)"
    return f"RECURSIVE series(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM series WHERE n < {count} - 1)"


def fill(connection: sa.Connection, metrics: int, spans: int, days: float, now: float) -> None:
    """Rows that look like those of real builds, made within the database."""
    dialect = connection.dialect.name
    secs = days * 86_400.0
    at = f"{now} - {secs} * (n + 1.0) / {{count}}"
    text = "CAST(n AS TEXT)"

    def run(statement: str) -> None:
        connection.execute(sa.text(statement))

    run(
        "INSERT INTO derivation (id, drv_path, name, history_name, system, features, command, env,"
        " prefer_local, clustered, created_at) VALUES (1, 'd.drv', 'd', 'd', 'any', '[]', '[]', '{}',"
        " FALSE, FALSE, 1)"
    )
    run(
        "INSERT INTO derivation_build (id, derivation, status, prioritized, build_request, ifd, created_at,"
        " attempts, inputs_unavailable_loops, substitute_misses, oom_retries, substituted)"
        " VALUES ('b', 1, 'Completed', FALSE, FALSE, FALSE, 1, 0, 0, 0, 0, FALSE)"
    )
    run(
        f"WITH {series(dialect, metrics)} INSERT INTO derivation_metric (derivation, assignment,"
        " history_name, architecture, created_at, peak_ram_mb, cpu_time_ms, avg_cpu_pct, disk_read_bytes,"
        " disk_write_bytes, build_time_ms, closure_size, oom_killed, concurrent_builds, cpu_core_score)"
        f" SELECT 1, {text}, 'name-' || CAST(n % 5000 AS TEXT), 'any', {at.format(count=metrics)},"
        " 100 + n % 4000, n % 900000, 90.5, n % 1000000, n % 3000000, ((n % 100000) * 7919) % 600000,"
        " n % 1000000000, n % 97 = 0, n % 8, 1000.0 FROM series"
    )
    breakdown = json.dumps({"rules": {f"RuleNumber{n}": 123.4 for n in range(8)}, "total": 1.0, "vetoes": []})
    run(
        f"WITH {series(dialect, metrics)} INSERT INTO dispatched_job (id, job_key, derivation_build, worker,"
        " instance, status, assigned_at, finished_at, last_seq, fetch_only, log_bytes, log_truncated,"
        " spans_dropped, ready_at, missing_count, missing_nar_size, dependency_count, score_breakdown)"
        f" SELECT {text}, 'build:' || {text}, 'b', 'w', 'i', 'Completed', {at.format(count=metrics)},"
        f" {at.format(count=metrics)} + 9, 2, FALSE, 0, FALSE, 0, {at.format(count=metrics)} - n % 60,"
        f" n % 30, n % 100000000, n % 20, '{breakdown.replace(':', chr(92) + ':')}' FROM series"
    )
    per_job = max(spans // metrics, 1)
    cases = " ".join(f"WHEN {place} THEN '{kind}'" for place, kind in enumerate(KINDS))
    run(
        f'WITH {series(dialect, spans)} INSERT INTO span (assignment, position, parent, kind, start, "end",'
        f" nar_bytes, stored_bytes, paths) SELECT CAST(n / {per_job} AS TEXT), n % {per_job},"
        f" CASE WHEN n % 10 = 7 THEN 5 END, CASE n % 10 {cases} END, {at.format(count=spans)} - n % 13,"
        f" {at.format(count=spans)}, n % 90000000, n % 30000000, n % 40 FROM series"
    )


@contextlib.contextmanager
def fresh_url(sqlite: bool) -> Iterator[str]:
    """An empty database with the schema."""
    if sqlite:
        with tempfile.TemporaryDirectory(dir=".", prefix="gradient-bench-") as directory:
            yield f"sqlite:///{Path(directory).resolve() / 'gradient.db'}"
        return
    from tests.fixtures.postgres import PostgresServer  # noqa: PLC0415 - only where it is wanted

    server = PostgresServer()
    try:
        yield server.url(server.create())
    finally:
        server.stop()


def prepare(url: str, metrics: int, spans: int, days: float, now: float) -> None:
    """The schema, the rows, and what autovacuum would have done by then."""
    engine = make_write_engine(parse_url(url))
    with engine.begin() as connection:
        metadata.create_all(connection)
        fill(connection, metrics, spans, days, now)
    with engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(sa.text("VACUUM ANALYZE"))
    engine.dispose()


async def measure(url: str) -> dict[str, object]:
    """Passes, and how late a task beside them was."""
    late = 0.0

    async def look() -> None:
        nonlocal late
        while True:
            due = trio.current_time() + LOOK_SECS
            await trio.sleep_until(due)
            late = max(late, trio.current_time() - due)

    database = await Database.open(url)
    try:
        windows = WindowsPass(database, clock=SystemClock(), interval_secs=30.0, publish=lambda _: None)
        times = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            for _ in range(PASSES):
                began = time.perf_counter()
                snapshot = await windows.take()
                times.append(time.perf_counter() - began)
                if snapshot.failed:
                    raise RuntimeError(f"these windows failed: {snapshot.failed}")
            nursery.cancel_scope.cancel()
    finally:
        await database.aclose()
    return {
        "first_secs": round(times[0], 3),
        "best_secs": round(min(times[1:]), 3),
        "loop_stall_ms": round(late * 1000, 1),
        "prefetches": snapshot.prefetches.count if snapshot.prefetches else 0,
    }


def main() -> int:
    """One JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sqlite", action="store_true")
    parser.add_argument("--metrics", type=int, default=1_000_000)
    parser.add_argument("--spans", type=int, default=10_000_000)
    parser.add_argument("--days", type=float, default=90.0)
    options = parser.parse_args()
    with fresh_url(options.sqlite) as url:
        prepare(url, options.metrics, options.spans, options.days, time.time())
        found = trio.run(measure, url)
    print(json.dumps({"bench": "windows", **vars(options), **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
