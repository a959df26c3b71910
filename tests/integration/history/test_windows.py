"""The instance windows on both databases, against sums written out in Python."""

import math
import random
import statistics
from dataclasses import fields
from unittest import mock

import pytest
import sqlalchemy as sa
import trio
from gradient_protocol.kinds import SpanKind
from gradient_server.db.hot import HotStatement
from gradient_server.db.queries import windows as queries
from gradient_server.db.runner import Database
from gradient_server.history.refresh import WindowsPass
from gradient_server.history.windows import WindowsSnapshot
from gradient_server.scoring.contexts import InstanceContext, Windowed

from tests.fixtures.graph import make_build, make_derivation, make_evaluation
from tests.fixtures.times import START, FakeClock
from tests.integration.history.rows import add_assignment, add_metric, add_span

WINDOWS = (300.0, 3600.0, 86400.0)


def passes(database: Database, clock: FakeClock) -> WindowsPass:
    return WindowsPass(database, clock=clock, interval_secs=30.0, publish=lambda _: None)


def averages(samples: list[tuple[float, float | None]]) -> Windowed:
    """The means of (age, value) over the three windows."""
    means = []
    for secs in WINDOWS:
        known = [value for age, value in samples if age < secs and value is not None]
        means.append(statistics.fmean(known) if known else math.nan)
    return Windowed(*means)


def assert_window(got: Windowed, expected: Windowed, name: str) -> None:
    for one in fields(Windowed):
        value = getattr(expected, one.name)
        assert getattr(got, one.name) == pytest.approx(value, nan_ok=True, rel=1e-9), (name, one.name)


@pytest.mark.parametrize("seed", [1, 2])
async def test_windows_of_both_tables_are_the_means_of_their_rows(
    database: Database, clock: FakeClock, seed: int
) -> None:
    rng = random.Random(seed)
    ages = [rng.choice([100.0, 299.0, 1000.0, 3500.0, 5000.0, 80000.0, 90000.0]) for _ in range(60)]

    def some(value: float) -> int | None:
        return None if rng.random() < 0.3 else int(rng.random() * value)

    builds = [
        {
            "peak_ram_mb": some(9000),
            "cpu_time_ms": some(1e6),
            "avg_cpu_pct": None if rng.random() < 0.3 else rng.random() * 400,
            "disk_read_bytes": some(1e9),
            "disk_write_bytes": some(1e9),
            "build_time_ms": some(1e6),
            "closure_size": some(1e9),
            "oom_killed": rng.random() < 0.2,
        }
        for _ in ages
    ]
    waits = [
        {"ready_at": START - age - rng.random() * 100, "missing_nar_size": some(1e9),
         "missing_count": some(50), "dependency_count": some(9)}
        for age in ages
    ]  # fmt: skip

    def fill(connection: sa.Connection) -> None:
        derivation = make_derivation(connection)
        build = make_build(connection, derivation)
        for age, values in zip(ages, builds, strict=True):
            add_metric(connection, START - age, derivation, **values)
        for age, values in zip(ages, waits, strict=True):
            add_assignment(connection, START - age, build=build, **values)
        # None of these counts: a cluster's member, an evaluation, a build that never was ready.
        for more in ({"cluster_role": "node", "ready_at": 0.0}, {"ready_at": None}):
            add_assignment(connection, START - 10, build=build, missing_nar_size=1 << 40, **more)

    await database.run(fill)
    taken = (await passes(database, clock).take()).context()
    both = list(zip(ages, builds, strict=True))
    for name in ("peak_ram_mb", "cpu_time_ms", "avg_cpu_pct", "build_time_ms", "closure_size"):
        assert_window(getattr(taken, name), averages([(age, row[name]) for age, row in both]), name)
    disk = [
        (age, None if row["disk_read_bytes"] is None and row["disk_write_bytes"] is None
         else (row["disk_read_bytes"] or 0) + (row["disk_write_bytes"] or 0))
        for age, row in both
    ]  # fmt: skip
    assert_window(taken.disk_bytes, averages(disk), "disk_bytes")
    assert_window(
        taken.oom_rate, averages([(age, float(row["oom_killed"])) for age, row in both]), "oom_rate"
    )
    for secs, median, completed in zip(
        WINDOWS,
        (taken.build_time_median_ms.w5m, taken.build_time_median_ms.w1h, taken.build_time_median_ms.w24h),
        (taken.completed.w5m, taken.completed.w1h, taken.completed.w24h),
        strict=True,
    ):
        inside = [row for age, row in both if age < secs]
        times = [row["build_time_ms"] for row in inside if row["build_time_ms"] is not None]
        assert median == pytest.approx(statistics.median(times))
        ended = sum(row["build_time_ms"] is not None and not row["oom_killed"] for row in inside)
        assert completed == ended
    waited = list(zip(ages, waits, strict=True))
    assert_window(
        taken.wait_secs, averages([(age, START - age - row["ready_at"]) for age, row in waited]), "wait_secs"
    )
    megabytes = [
        (age, None if row["missing_nar_size"] is None else row["missing_nar_size"] / 2**20)
        for age, row in waited
    ]
    assert_window(taken.nar_size_mb, averages(megabytes), "nar_size_mb")
    assert_window(taken.missing_paths, averages([(a, row["missing_count"]) for a, row in waited]), "paths")
    assert_window(taken.dependency_cnt, averages([(a, row["dependency_count"]) for a, row in waited]), "deps")


async def test_nothing_measured_is_unknown_and_a_measured_zero_is_zero(
    database: Database, clock: FakeClock
) -> None:
    empty = (await passes(database, clock).take()).context()
    unknown = [one.name for one in fields(InstanceContext) if isinstance(getattr(empty, one.name), Windowed)]
    for name in unknown:
        if name != "completed":
            assert math.isnan(getattr(empty, name).w24h), name
    assert empty.completed == Windowed(0.0, 0.0, 0.0)
    await database.run(lambda c: add_metric(c, START - 10, peak_ram_mb=0, build_time_ms=0))
    measured = (await passes(database, clock).take()).context()
    assert measured.peak_ram_mb == Windowed(0.0, 0.0, 0.0)
    assert measured.oom_rate == Windowed(0.0, 0.0, 0.0)
    assert measured.unmeasured_build_ram_mb == 0.0


def peak_of(spans: list[tuple[float, float, int]]) -> float:
    """The highest sum of rates, looked at in every span's start."""
    rates = [(start, max(end, start + 0.001), stored * 8e-6) for start, end, stored in spans]
    return max(
        sum(mbit / (end - start) for start, end, mbit in rates if start <= at < end) for at, _, _ in rates
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_the_peak_throughput_is_the_highest_sum_of_overlapping_rates(
    database: Database, clock: FakeClock, seed: int
) -> None:
    rng = random.Random(seed)
    spans = []
    for _ in range(40):
        start = START - 1 - rng.random() * 3000
        spans.append((start, start + rng.choice([0.0, 1.0, 30.0, 200.0]), rng.randrange(1, 10**8)))
    spans = [(start, min(end, START), stored) for start, end, stored in spans]

    def fill(connection: sa.Connection) -> None:
        one = add_assignment(connection, START - 4000, build=make_build(connection))
        for start, end, stored in spans:
            add_span(connection, one, "NarFetch", start, end, stored_bytes=stored)
        # Too old, of another kind, unknown, from the future, and beyond belief.
        add_span(connection, one, "NarFetch", START - 7000, START - 3601, stored_bytes=10**13)
        add_span(connection, one, "Prefetch", START - 70, START - 1, stored_bytes=10**13)
        add_span(connection, one, "NarFetch", START - 70, START - 1)
        add_span(connection, one, "NarFetch", START + 900, START + 1000, stored_bytes=10**13)
        add_span(connection, one, "NarFetch", START - 70, START - 1, stored_bytes=1 << 62)
        # Any number of bytes may be; not all of them in no time.
        add_span(connection, one, "NarFetch", START - 70, START - 70, stored_bytes=10**12)
        add_span(connection, one, "NarFetch", START - 70, START - 69, stored_bytes=10**12)

    await database.run(fill)
    taken = await passes(database, clock).take()
    assert taken.read_mbps == pytest.approx(peak_of(spans), rel=1e-6)
    assert taken.write_mbps is None or math.isnan(taken.write_mbps)
    assert taken.context().storage_read_mbps.w1h == pytest.approx(peak_of(spans), rel=1e-6)


async def test_stored_bytes_are_divided_by_the_nar_bytes_of_the_parent(
    database: Database, clock: FakeClock
) -> None:
    def fill(connection: sa.Connection) -> None:
        one = add_assignment(connection, START - 400, build=make_build(connection))
        other = add_assignment(connection, START - 400, build=make_build(connection))
        # The same positions in another job must not be taken for parents.
        add_span(connection, other, "Compress", START - 9, START - 8, nar_bytes=10**9, position=7)
        for position, packed, pushed in ((7, 1000, 300), (8, 3000, 500)):
            add_span(connection, one, "Compress", START - 9, START - 8, nar_bytes=packed, position=position)
            add_span(
                connection, one, "NarPush", START - 8, START - 7,
                stored_bytes=pushed, nar_bytes=999999, parent=position,
            )  # fmt: skip
        add_span(connection, one, "NarPush", START - 8, START - 7, stored_bytes=10**6)

    await database.run(fill)
    taken = await passes(database, clock).take()
    assert taken.stored_per_nar_byte == pytest.approx(800 / 4000)
    assert taken.context().compression_ratio.w1h == pytest.approx(0.2)


async def test_fits_find_what_the_spans_were_made_of(database: Database, clock: FakeClock) -> None:
    rng = random.Random(4)

    def fill(connection: sa.Connection) -> None:
        one = add_assignment(connection, START - 80000, build=make_build(connection))
        for number in range(100):
            nar_bytes, paths = rng.randrange(10**6, 10**9), rng.randrange(1, 40)
            secs = 3.6 + nar_bytes / 29e6 + 0.18 * paths
            end = START - 700 * number
            add_span(connection, one, "Prefetch", end - secs, end, nar_bytes=nar_bytes, paths=paths)
        for number in range(20):
            nar_bytes = rng.randrange(10**6, 10**9)
            end = START - 3000 * number
            add_span(
                connection, one, "SubstituteFetch", end - 0.4 - nar_bytes / 50e6, end,
                nar_bytes=nar_bytes, paths=1,
            )  # fmt: skip

    await database.run(fill)
    context = (await passes(database, clock).take()).context()
    assert context.per_path_secs == pytest.approx(0.18, rel=1e-3)
    assert context.substitute_cost is not None
    assert context.substitute_cost.per_path_secs == pytest.approx(0.4, rel=1e-3)
    assert context.substitute_cost.secs_per_mb == pytest.approx(1 / 50, rel=1e-3)


async def test_evaluations_are_averaged_by_task_fetch_and_rest_apart(
    database: Database, clock: FakeClock
) -> None:
    def fill(connection: sa.Connection) -> tuple[str, str]:
        evaluation = make_evaluation(connection)
        task = connection.scalar(sa.text("SELECT task FROM evaluation WHERE id = :id"), {"id": evaluation})
        runs = ((10.0, 4.0, True), (20.0, None, True), (8.0, 6.0, False))
        for total, fetch, walked in runs:
            at = START - 86400.0
            one = add_assignment(
                connection, at - 99, evaluation=evaluation, accepted_at=at, finished_at=at + total
            )
            if fetch is not None:
                parent = add_span(connection, one, "Fetch", at, at + fetch)
                add_span(connection, one, "Fetch", at, at + 1, parent=parent)
            if walked:
                add_span(connection, one, "Evaluation", at + 5, at + 6)
        # Not completed, too old, a cluster's member.
        for more in ({"status": "Failed"}, {"finished_at": START - 8 * 86400.0}, {"cluster_role": "node"}):
            values = {"finished_at": START - 1, **more}
            add_assignment(connection, START - 9 * 86400.0, evaluation=evaluation, **values)
        return evaluation, str(task)

    _, task = await database.run(fill)
    durations = (await passes(database, clock).take()).evaluations
    own = durations.of(task)
    assert own.fetch_secs == pytest.approx(5.0)
    assert own.rest_secs == pytest.approx((6.0 + 20.0) / 2)
    assert durations.of("another task") == durations.overall == own


async def test_a_failed_query_empties_its_own_windows_only(database: Database, clock: FakeClock) -> None:
    await database.run(lambda c: add_metric(c, START - 10, peak_ram_mb=500))
    with mock.patch.object(queries, "wait_averages", side_effect=RuntimeError("the disk is on fire")):
        taken = await passes(database, clock).take()
    assert taken.waits == (None, None, None)
    assert [name.split()[0] for name in taken.failed] == ["waits"] * 3
    context = taken.context()
    assert math.isnan(context.wait_secs.w1h)
    assert context.peak_ram_mb.w24h == 500.0
    assert context.active_builds == 0


@pytest.mark.parametrize("absurd", [1 << 62, (1 << 63) - 1])
async def test_absurd_numbers_poison_no_window(database: Database, clock: FakeClock, absurd: int) -> None:
    def fill(connection: sa.Connection) -> None:
        build = make_build(connection)
        for size in (absurd, 1 << 20):
            one = add_assignment(
                connection,
                START - 10,
                build=build,
                ready_at=START - 20,
                missing_nar_size=size,
                missing_count=size,
            )
            for kind in SpanKind:
                add_span(connection, one, kind.value, START - 5, START - 4, nar_bytes=size, stored_bytes=size)

    await database.run(fill)
    taken = await passes(database, clock).take()
    assert taken.failed == ()
    context = taken.context()
    assert context.nar_size_mb.w1h == 1.0
    assert context.storage_read_mbps.w1h == pytest.approx(8.388608)


def test_a_snapshot_of_nothing_leaves_every_window_unknown() -> None:
    context = WindowsSnapshot(taken_at=START).context()
    assert math.isnan(context.completed.w5m)
    assert math.isnan(context.per_path_secs)
    assert context.substitute_cost is None


async def test_passes_follow_each_other_and_each_is_published_whole(
    database: Database, clock: FakeClock
) -> None:
    published: list[WindowsSnapshot] = []
    runner = WindowsPass(database, clock=clock, interval_secs=0.01, publish=published.append)
    async with trio.open_nursery() as nursery:
        await nursery.start(runner.run)
        with trio.fail_after(30):
            while not published:
                await trio.sleep(0.01)
            await database.run(lambda c: add_metric(c, START - 10, peak_ram_mb=700))
            while published[-1].context().unmeasured_build_ram_mb != 700.0:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert not any(snapshot.failed for snapshot in published)


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (queries._BUILDS, "idx-derivation_metric-created"),
        (queries._MEDIAN, "idx-derivation_metric-created"),
        (queries._WAITS, "idx-dispatched_job-windows"),
        (queries._PEAK, "COVERING INDEX idx-span-windows"),
        (queries._FIT, "COVERING INDEX idx-span-windows"),
        (queries._RATIO, "idx-span-windows"),
        (queries._EVALUATIONS, "idx-dispatched_job-evaluated"),
    ],
    ids=["builds", "median", "waits", "peak", "fit", "ratio", "evaluations"],
)
async def test_a_pass_reads_indexes_and_no_whole_table(
    sqlite_database: Database, statement: HotStatement, index: str
) -> None:
    parameters = {"since": 0.0, "until": 1.0, "kind": "Prefetch", "shortest": 0.001}

    def plan(connection: sa.Connection) -> list[str]:
        driver = connection.connection.driver_connection
        assert driver is not None
        text = statement.text("sqlite")
        return [row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {text}", parameters)]

    steps = await sqlite_database.read(plan)
    assert any(index in step for step in steps), steps
    tables = ("derivation_metric", "dispatched_job", "span")
    assert not {f"SCAN {table}" for table in tables} & set(steps), steps


async def test_sums_are_not_compiled_each_time_they_are_read(postgres_database: Database) -> None:
    assert await postgres_database.read(lambda c: c.scalar(sa.text("SHOW jit"))) == "off"
