"""Histories from the database to the pending job, on both databases."""

import math
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa
import trio
from gradient_protocol.kinds import EvalStep, JobKind
from gradient_server.db import tables
from gradient_server.db.queries import history as queries
from gradient_server.db.runner import Database
from gradient_server.history import refresh
from gradient_server.history.adopted import adopted_ram_mb
from gradient_server.history.book import HistoryBook, HistoryKey
from gradient_server.history.prediction import EvalDuration
from gradient_server.history.refresh import HistoryLoader, load_predictions
from gradient_server.history.windows import EvalDurations
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scoring.policy import policy_by_name

from tests.fakes.scheduler import World, build, worker
from tests.fixtures.graph import make_build, make_derivation, make_evaluation
from tests.fixtures.times import START, FakeClock
from tests.integration.history.rows import add_metric

DAY = 86_400.0


def key(name: str = "package", architecture: str = "any") -> HistoryKey:
    return HistoryKey(JobKind.BUILD, name, architecture)


async def predictions(database: Database, *keys: HistoryKey, durations: EvalDurations | None = None) -> Any:  # noqa: ANN401 - by key
    return await database.read(
        lambda c: load_predictions(c, keys, durations or EvalDurations(), since=START - 90 * DAY, now=START)
    )


async def test_the_latest_twenty_rows_of_the_name_and_architecture_count(database: Database) -> None:
    def fill(connection: sa.Connection) -> None:
        for number in range(25):
            # The older, the larger: a 21st would show.
            add_metric(connection, START - number, peak_ram_mb=100 + number, build_time_ms=1000)
        add_metric(connection, START, peak_ram_mb=7000, architecture="arm")
        add_metric(connection, START, peak_ram_mb=7000, history_name="another")

    await database.run(fill)
    found = await predictions(database, key(), key("nobody"))
    assert found[key()].samples == 20
    # The nearest rank of 95 % of 20 values is the 19th.
    assert found[key()].peak_ram_mb == 118.0
    assert found[key("nobody")].samples == 0
    assert math.isnan(found[key("nobody")].peak_ram_mb)


async def test_rows_beyond_the_retention_are_not_read(database: Database) -> None:
    await database.run(lambda c: add_metric(c, START - 91 * DAY, peak_ram_mb=100))
    assert (await predictions(database, key()))[key()].samples == 0


async def test_output_sizes_are_summed_by_derivation_where_all_are_known(database: Database) -> None:
    def fill(connection: sa.Connection) -> None:
        whole = make_derivation(connection, "whole", outputs=("out", "dev"))
        partly = make_derivation(connection, "partly", outputs=("out", "dev"))
        outputs = tables.derivation_output
        for derivation, name, size in ((whole, "out", 1000), (whole, "dev", 500), (partly, "out", 9)):
            where = (outputs.c.derivation == derivation) & (outputs.c.name == name)
            connection.execute(outputs.update().where(where).values(nar_size=size))
        add_metric(connection, START, whole, disk_read_bytes=5, disk_write_bytes=None)
        add_metric(connection, START, partly)

    await database.run(fill)
    found = (await predictions(database, key()))[key()]
    assert (found.output_nar_size, found.disk_bytes) == (1500.0, 5.0)


async def test_one_query_a_pair_and_one_more_where_there_is_history(database: Database) -> None:
    await database.run(lambda c: add_metric(c, START))
    keys = [key(), key("x"), key("y")]
    with (
        mock.patch.object(queries, "metric_rows", wraps=queries.metric_rows) as rows,
        mock.patch.object(queries, "execute_text", wraps=queries.execute_text) as statements,
    ):
        await predictions(database, *keys)
    assert rows.call_count == 3
    assert statements.call_count == 3 + 1


async def test_an_evaluation_has_its_tasks_peak_and_the_time_of_its_steps(database: Database) -> None:
    def fill(connection: sa.Connection) -> str:
        evaluation = make_evaluation(connection)
        task = connection.scalar(sa.text("SELECT task FROM evaluation WHERE id = :id"), {"id": evaluation})
        for number, (age, peak) in enumerate([(10.0, 300), (20.0, 200), (25 * 3600.0, 9000), (5.0, None)]):
            connection.execute(
                tables.evaluation_metric.insert().values(
                    evaluation=evaluation, assignment=f"e{number}", task=task, created_at=START - age,
                    derivations=1, known=0, wall_ms=1, cpu_ms=1, peak_rss_mb=peak,
                )
            )  # fmt: skip
        return str(task)

    task = await database.run(fill)
    durations = EvalDurations({task: EvalDuration(fetch_secs=3.0, rest_secs=8.0)})
    both = HistoryKey(JobKind.EVAL, task, steps=(EvalStep.FETCH, EvalStep.EVALUATE))
    cached = HistoryKey(JobKind.EVAL, task, steps=(EvalStep.EVALUATE,))
    found = await predictions(database, both, cached, durations=durations)
    assert found[both].peak_ram_mb == 300.0
    assert (found[both].build_time_ms, found[both].uncontended_build_time_ms) == (11_000.0, 11_000.0)
    assert found[cached].uncontended_build_time_ms == 8_000.0


class Scene:
    """A scheduler with a book that a loader serves from a database."""

    def __init__(self, database: Database, policy: str = "resource-aware") -> None:
        self.world = World(policy=policy_by_name(policy))
        self.book = HistoryBook()
        world = self.world
        self.world.scheduler = Scheduler(
            store=world.store, bus=world.bus, clock=world.clock, ids=world.scheduler.dispatcher._ids,
            settings=world.settings, policy=world.policy, histories=self.book,
        )  # fmt: skip
        self.loader = HistoryLoader(
            database,
            self.book,
            clock=FakeClock(),
            retention_days=90,
            swap_in=self.world.scheduler.set_history,
        )


async def test_a_build_is_not_assigned_before_its_history_is_known(database: Database) -> None:
    await database.run(lambda c: add_metric(c, START, history_name="x", peak_ram_mb=1234))
    scene = Scene(database)
    world = scene.world
    world.connect(worker("a"))
    world.scheduler.request_job("a", JobKind.BUILD)
    world.queue(build("x"))
    world.score("a", "build:x")
    await world.settle()
    assert world.assigned("a") == []
    assert await scene.loader.load_batch()
    await world.settle()
    assert [one.job_id for one in world.assigned("a")] == ["build:x"]
    [assignment] = world.scheduler.pool.of_worker("a")
    assert assignment.ram_reserved_mb == 1234.0


async def test_a_worker_that_comes_before_any_history_is_loaded_need_not_wait_for_the_tick(
    database: Database,
) -> None:
    """A restart: everything is queued at once, and the workers are back within a second."""
    scene = Scene(database)
    world = scene.world
    world.queue(*[build(name) for name in ("x", "y")])
    world.connect(worker("a", max_concurrent_builds=1))
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert world.outboxes["a"].offered() == ["build:x", "build:y"]
    world.score("a", "build:x", "build:y")
    assert world.assigned("a") == []
    assert await scene.loader.load_batch()
    await world.settle()
    assert len(world.assigned("a")) == 1


async def test_a_run_that_ends_swaps_the_fresh_prediction_in(database: Database) -> None:
    scene = Scene(database)
    world = scene.world
    world.connect(worker("a", max_concurrent_builds=1))
    world.scheduler.request_job("a", JobKind.BUILD)
    world.queue(build("one", pname="x"), build("two", pname="x"))
    world.score("a", "build:one")
    await scene.loader.load_batch()
    await world.settle()
    [message] = world.assigned("a")
    await world.answer("a", message)
    await database.run(lambda c: add_metric(c, START, history_name="x", peak_ram_mb=555))
    world.bus.publish(world.store.close(message.assignment_id))
    scene.book.want_outdated()
    await scene.loader.load_batch()
    tracked = world.scheduler.tracker.candidate("build:two")
    assert tracked is not None
    assert tracked.history.peak_ram_mb == 555.0
    world.check()


async def test_a_policy_without_history_loads_none(database: Database) -> None:
    scene = Scene(database, "simple")
    world = scene.world
    world.connect(worker("a"))
    world.scheduler.request_job("a", JobKind.BUILD)
    world.queue(build("x"))
    world.score("a", "build:x")
    await world.settle()
    assert len(world.assigned("a")) == 1
    assert not await scene.loader.load_batch()


async def test_a_failed_load_leaves_the_job_without_history_and_assignable(database: Database) -> None:
    scene = Scene(database)
    world = scene.world
    world.connect(worker("a"))
    world.scheduler.request_job("a", JobKind.BUILD)
    world.queue(build("x"))
    world.score("a", "build:x")
    with mock.patch.object(refresh, "load_predictions", side_effect=RuntimeError("no")):
        await scene.loader.load_batch()
    await world.settle()
    assert [one.job_id for one in world.assigned("a")] == ["build:x"]


async def test_the_loader_runs_by_itself(database: Database) -> None:
    scene = Scene(database)
    async with trio.open_nursery() as nursery:
        await nursery.start(scene.loader.run)
        for name in ("x", "y"):
            scene.world.queue(build(name))
            with trio.fail_after(5):
                while scene.world.scheduler.tracker.tables[JobKind.BUILD].unpredicted_jobs:
                    await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("own_peak", "expected"), [(None, 800.0), (900, 900.0), (700, 800.0)], ids=["history", "own", "both"]
)
async def test_an_adopted_build_reserves_the_larger_of_history_and_its_own_peak(
    database: Database, own_peak: int | None, expected: float
) -> None:
    def fill(connection: sa.Connection) -> tuple[str, str]:
        derivation = make_derivation(connection, "package")
        one = make_build(connection, derivation)
        connection.execute(tables.derivation_build.update().values(peak_ram_mb=own_peak))
        add_metric(connection, START, derivation, peak_ram_mb=800)
        return one, make_build(connection)

    known, unknown = await database.run(fill)

    def read(connection: sa.Connection) -> dict[str, float]:
        return adopted_ram_mb(connection, [known, unknown], now=START, retention_days=90)

    assert await database.read(read) == {known: expected}
