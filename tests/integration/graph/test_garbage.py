"""Garbage collection: what is past its time goes from the top down, and nothing that is wanted."""

import os
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa
from gradient_protocol.kinds import FailureKind
from gradient_server.domain.events import Bus, Event, ObjectUnused
from gradient_server.domain.job import eval_key
from gradient_server.domain.sweeps import Sweep
from gradient_server.graph import garbage
from gradient_server.graph.known import known_derivations, stale_derivations, touch_derivations
from gradient_server.net.services import Services
from gradient_server.storage import orphans
from gradient_server.storage.retention import Retention

from tests.fakes.collecting import collecting
from tests.fixtures.graph import store_path
from tests.integration.graph.pool import Pool, derivation, object_of, output_path

DAY = 86_400.0
TABLES = (
    "evaluation", "build_job", "derivation", "derivation_build", "build_attempt", "dispatched_job",
    "derivation_metric", "derivation_output", "derivation_dependency", "evaluation_note", "span",
)  # fmt: skip


class Collector:
    """Passes over the pool's database, as the server's loop makes them, and what became unused."""

    def __init__(self, pool: Pool, base_dir: Path) -> None:
        bus = Bus()
        self.unused: list[str] = []
        bus.subscribe(
            lambda event: self.unused.append(event.object) if isinstance(event, ObjectUnused) else None
        )
        self.services: Services = collecting(pool.database, pool.clock, base_dir, bus=bus)
        self._retention = Retention(self.services)

    def _note(self, event: Event) -> None:
        if isinstance(event, ObjectUnused):
            self.unused.append(event.object)

    async def collect(self) -> Counter[Sweep]:
        """What one pass took away."""
        before = Counter(self.services.sweep_figures.found)
        await self._retention.collect()
        assert not self.services.sweep_figures.failures
        return self.services.sweep_figures.found - before


@pytest.fixture
async def collector(pool: Pool, tmp_path: Path) -> Collector:
    return Collector(pool, tmp_path)


async def counts(pool: Pool) -> dict[str, int]:
    return {table: await pool.scalar(f"SELECT COUNT(*) FROM {table}") for table in TABLES}


async def held(pool: Pool) -> set[str]:
    return set(await pool.run(lambda c: c.execute(sa.text("SELECT path FROM cached_path")).scalars().all()))


async def built(pool: Pool, *derivations: object) -> str:
    """An evaluation that is over, with everything built."""
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, list(derivations))  # type: ignore[arg-type]  # derivations
    while pool.queued:
        await pool.build(next(iter(pool.queued)))
    return evaluation


async def test_everything_of_an_old_evaluation_goes_in_one_pass(pool: Pool, collector: Collector) -> None:
    await built(pool, derivation("a"), derivation("b", "a"), derivation("c", "b", runtime_only=["a"]))
    objects = {object_of(path) for path in await held(pool)}
    pool.clock.advance(89.9 * DAY)
    assert not await collector.collect()
    pool.clock.advance(0.2 * DAY)
    found = await collector.collect()
    assert (found[Sweep.EVALUATIONS], found[Sweep.DERIVATIONS], found[Sweep.NARS]) == (1, 3, 4)
    assert set(await counts(pool)) == set(TABLES)
    assert set((await counts(pool)).values()) == {0}
    assert await held(pool) == set()
    assert set(collector.unused) == objects
    assert not await collector.collect()


async def test_what_a_younger_evaluation_wants_stays_with_all_below_it(
    pool: Pool, collector: Collector
) -> None:
    await built(pool, derivation("a"), derivation("b", "a"), derivation("old", "a"))
    pool.clock.advance(60 * DAY)
    await built(pool, derivation("a"), derivation("b", "a"))
    pool.clock.advance(60 * DAY)
    found = await collector.collect()
    assert (found[Sweep.EVALUATIONS], found[Sweep.DERIVATIONS], found[Sweep.NARS]) == (1, 1, 1)
    assert await pool.statuses() == {"a": "Completed", "b": "Completed"}
    assert output_path("a") in await held(pool)
    assert output_path("old") not in await held(pool)


async def test_an_evaluation_that_runs_keeps_everything_however_long_it_takes(
    pool: Pool, collector: Collector
) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a"), derivation("b", "a")])
    await pool.build(await pool.key("a"))
    running = await pool.claim(await pool.key("b"))
    assert running is not None
    pool.clock.advance(1_000 * DAY)
    assert not await collector.collect()
    await pool.output(running, await pool.job(await pool.key("b")))
    await pool.hold(output_path("b"))
    await pool.complete(running)
    assert await pool.evaluation_status(evaluation) == "Completed"


async def test_an_aborted_evaluation_waits_for_the_worker_that_still_has_its_job(
    pool: Pool, collector: Collector
) -> None:
    evaluation = await pool.submit()
    running = await pool.claim(eval_key(evaluation))
    assert running is not None
    await pool.run(
        lambda c: c.execute(sa.text("UPDATE evaluation SET status = 'Aborted', finished_at = 1.0"))
    )
    pool.clock.advance(1_000 * DAY)
    assert not await collector.collect()
    await pool.fail(running, FailureKind.ABORTED)
    assert (await collector.collect())[Sweep.EVALUATIONS] == 1


async def test_a_derivation_that_a_walk_was_told_of_stays_until_the_walk_names_it(
    pool: Pool, collector: Collector
) -> None:
    await built(pool, derivation("a"), derivation("b", "a"))
    pool.clock.advance(1_000 * DAY)
    known, now = store_path("b.drv"), pool.clock.now()
    assert await pool.run(lambda c: stale_derivations(c, [known], now=now)) == [known]
    assert await pool.run(lambda c: touch_derivations(c, [known], now=now)) == [known]
    assert await pool.run(lambda c: stale_derivations(c, [known], now=now)) == []
    found = await collector.collect()
    assert (found[Sweep.EVALUATIONS], found[Sweep.DERIVATIONS]) == (1, 0)
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("c", "b")])
    assert (await pool.statuses())["c"] == "Queued"
    # One that goes before it is noted is not said to be known.
    gone = store_path("gone.drv")
    assert await pool.run(lambda c: touch_derivations(c, [gone], now=now)) == []
    assert await pool.run(lambda c: known_derivations(c, [known, gone])) == [known]


async def test_old_failures_of_what_stays_go(pool: Pool, collector: Collector) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a")])
    failed = await pool.claim(await pool.key("a"))
    assert failed is not None
    await pool.fail(failed, FailureKind.PERMANENT)
    pool.clock.advance(60 * DAY)
    await built(pool, derivation("a"))
    pool.clock.advance(60 * DAY)
    found = await collector.collect()
    assert (found[Sweep.EVALUATIONS], found[Sweep.DERIVATIONS]) == (1, 1)
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_build") == 1
    assert await pool.statuses() == {"a": "Completed"}


async def test_a_path_keeps_what_it_refers_to_and_nothing_else_does(pool: Pool, collector: Collector) -> None:
    await pool.hold(store_path("lib"))
    await pool.hold(store_path("tool"), references=[store_path("lib"), store_path("tool")])
    pool.clock.advance(50 * DAY)
    await pool.hold(store_path("young"), references=[store_path("lib")])
    pool.clock.advance(50 * DAY)
    assert (await collector.collect())[Sweep.NARS] == 1
    assert await held(pool) == {store_path("lib"), store_path("young")}
    pool.clock.advance(50 * DAY)
    assert (await collector.collect())[Sweep.NARS] == 2


async def test_a_pass_that_breaks_off_anywhere_is_finished_by_the_next(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Batches of one, so that there are many places to break off at.
    monkeypatch.setattr(garbage, "_MAX_EVALUATIONS", 1)
    monkeypatch.setattr(garbage, "_MAX_WISHES", 1)
    monkeypatch.setattr(garbage, "_MAX_AT_ONCE", 1)
    monkeypatch.setattr(garbage, "_WINDOW", 2)
    await built(pool, derivation("a"), derivation("b", "a"))
    await built(pool, derivation("b2", "a2"), derivation("a2"))
    pool.clock.advance(1_000 * DAY)
    kept = await built(pool, derivation("a"))
    real, left = pool.database.run, 0

    async def run(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise sqlite3.OperationalError("database or disk is full")
        return await real(*arguments)  # type: ignore[arg-type]  # as it came

    pool.database.run = run  # type: ignore[method-assign, assignment]  # of this test alone
    tries = 0
    while tries < 100:
        left, tries = 2, tries + 1
        attempt = Collector(pool, tmp_path)
        await attempt._retention.collect()
        pool.database.run = real  # type: ignore[method-assign]  # as it was
        assert await pool.evaluation_status(kept) == "Completed"
        assert output_path("a") in await held(pool)
        pool.database.run = run  # type: ignore[method-assign, assignment]  # of this test alone
        if not attempt.services.sweep_figures.failures:
            break
    pool.database.run = real  # type: ignore[method-assign]  # as it was
    assert 5 < tries < 100
    assert await pool.statuses() == {"a": "Completed"}
    assert output_path("b2") not in await held(pool)


async def test_logs_go_with_their_assignments(pool: Pool, collector: Collector, tmp_path: Path) -> None:
    logs = collector.services.logs
    await built(pool, derivation("a"))
    assignments = await pool.run(
        lambda c: c.execute(sa.text("SELECT id FROM dispatched_job")).scalars().all()
    )
    for name in (*assignments, "nobody", "young"):
        logs.append(name, 0, b"said", compressed=False)
    files = {file.stem: file for file in (tmp_path / "logs").rglob("*.log")}
    for name, file in files.items():
        age_secs = 0 if name == "young" else orphans.YOUNG_SECS + 60
        os.utime(file, (pool.clock.now() - age_secs,) * 2)
    assert (await collector.collect())[Sweep.LOGS] == 1
    pool.clock.advance(100 * DAY)
    for file in files.values():
        if file.exists() and file.stem != "young":
            os.utime(file, (1, 1))
    os.utime(files["young"], (pool.clock.now(),) * 2)
    assert (await collector.collect())[Sweep.LOGS] == len(assignments)
    assert [file.stem for file in (tmp_path / "logs").rglob("*.log")] == ["young"]
