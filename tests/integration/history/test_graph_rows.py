"""What the graph records for predictions: peaks of lost builds, closure sizes, marks of imports."""

from typing import Any

import pytest
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.shapes import Metrics
from gradient_protocol.messages.worker import ImportRequest
from gradient_server.domain.events import ImportSettled
from gradient_server.domain.job import eval_key
from gradient_server.graph.imports import request_import
from gradient_server.graph.resume import lose_assignments

from tests.integration.graph.pool import INSTANCE, Pool, derivation, output_path


async def ask(pool: Pool, assignment: str, query: str, *paths: str, worker: str = "w1") -> None:
    worker_id = await pool.worker(worker)
    request = ImportRequest(query_id=query, assignment_id=assignment, paths=list(paths))
    pool.publish(
        await pool.run(
            lambda c: request_import(c, request, worker_id=worker_id, now=pool.clock.now(), ids=pool.ids)
        )
    )


async def walking(pool: Pool, *derivations: Any, worker: str = "w1") -> str:  # noqa: ANN401 - derivations
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation), worker)
    assert assignment is not None
    await pool.batch(assignment, *derivations, worker=worker)
    return assignment


async def lifted(pool: Pool) -> set[str]:
    rows = await pool.database.read(
        lambda c: c.exec_driver_sql(
            "SELECT d.name FROM derivation_build b JOIN derivation d ON d.id = b.derivation"
            " WHERE b.ifd AND b.finished_at IS NULL"
        ).fetchall()
    )
    return {row[0] for row in rows}


async def test_builds_are_lowered_once_no_evaluation_waits_for_them(pool: Pool) -> None:
    graph = [derivation("a"), derivation("b", "a"), derivation("c", "a"), derivation("d")]
    first = await walking(pool, *graph)
    second = await walking(pool, *graph, worker="w2")
    await ask(pool, first, "q1", output_path("b"), output_path("d"))
    await ask(pool, second, "q2", output_path("c"), worker="w2")
    assert await lifted(pool) == {"a", "b", "c", "d"}
    # The first evaluation ends: b and d are ordinary again, a is still needed by the second's import.
    await pool.fail(first, FailureKind.PERMANENT)
    assert await lifted(pool) == {"a", "c"}
    assert pool.queued[await pool.key("a")].ifd
    # Its settled import lowers the rest.
    building = await pool.claim(await pool.key("a"), "w3")
    assert building is not None
    await pool.fail(building, FailureKind.PERMANENT, worker="w3")
    assert [event.query_id for event in pool.seen(ImportSettled)] == ["q2"]
    assert await lifted(pool) == set()


async def test_a_lowered_build_that_waits_is_announced_again(pool: Pool) -> None:
    first = await walking(pool, derivation("a"), derivation("b", "a"))
    other = await walking(pool, derivation("a"), worker="w2")
    await ask(pool, first, "q1", output_path("b"))
    assert pool.queued[await pool.key("a")].ifd
    await pool.fail(first, FailureKind.PERMANENT)
    assert not pool.queued[await pool.key("a")].ifd
    assert other


async def test_the_peak_of_a_lost_build_raises_its_prediction_and_is_a_row(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a")])
    key = await pool.key("a")
    assignment = await pool.claim(key)
    assert assignment is not None
    pool.publish(
        await pool.run(
            lambda c: lose_assignments(
                c, [assignment], instance_id=INSTANCE, now=pool.clock.now(), ids=pool.ids,
                peaks_mb={assignment: 4321, "another": 9},
            )
        )
    )  # fmt: skip
    assert pool.queued[key].peak_ram_mb == 4321
    # It was no out-of-memory kill: no worker is too small for it yet.
    assert pool.queued[key].needs_ram_over_mb is None
    row = "SELECT peak_ram_mb FROM derivation_metric WHERE assignment = :id AND build_time_ms IS NULL"
    assert await pool.scalar(row, id=assignment) == 4321


async def test_a_lost_build_that_was_never_seen_leaves_no_row(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a")])
    assignment = await pool.claim(await pool.key("a"))
    assert assignment is not None
    await pool.run(
        lambda c: lose_assignments(
            c, [assignment], instance_id=INSTANCE, now=pool.clock.now(), ids=pool.ids, peaks_mb={}
        )
    )
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_metric") == 0


@pytest.mark.parametrize("killed", [True, False])
async def test_a_failed_build_writes_a_row_only_after_an_out_of_memory_kill(pool: Pool, killed: bool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a")])
    assignment = await pool.claim(await pool.key("a"))
    assert assignment is not None
    kind = FailureKind.OUT_OF_MEMORY if killed else FailureKind.PERMANENT
    used = Metrics(build_time_ms=10, oom_killed=killed, concurrent_builds=0, peak_ram_mb=600)
    await pool.fail(assignment, kind, used=used)
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_metric") == int(killed)


async def test_figures_beyond_belief_are_stored_as_unknown(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a")])
    assignment = await pool.claim(await pool.key("a"))
    assert assignment is not None
    used = Metrics(
        build_time_ms=10**18, oom_killed=True, concurrent_builds=10**18, peak_ram_mb=10**18,
        cpu_time_ms=7, avg_cpu_pct=float("inf"), disk_read_bytes=10**18, cpu_core_score=float("nan"),
    )  # fmt: skip
    await pool.fail(assignment, FailureKind.OUT_OF_MEMORY, used=used)
    columns = ("build_time_ms", "peak_ram_mb", "avg_cpu_pct", "disk_read_bytes", "cpu_core_score")
    unknown = " AND ".join(f"{name} IS NULL" for name in columns)
    row = f"SELECT cpu_time_ms FROM derivation_metric WHERE concurrent_builds = 0 AND {unknown}"
    assert await pool.scalar(row) == 7
    assert await pool.scalar("SELECT peak_ram_mb FROM derivation_build") is None


async def test_the_closure_size_of_a_build_is_worked_out_once_and_kept(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a"), derivation("b", "a")])
    await pool.build(await pool.key("a"))
    required = pool.queued[await pool.key("b")].required_paths
    assert required
    size = sum(path.nar_size for path in required)
    assert size > 0
    assert pool.queued[await pool.key("b")].closure_size == size
    assert await pool.scalar("SELECT closure_size FROM derivation WHERE name = 'b'") == size
