"""What follows a failed job: the table of failure kinds, healing, and losses."""

from typing import Any

import pytest
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.shapes import GitSource
from gradient_server.domain.events import JobUnqueued, PathForgotten
from gradient_server.domain.job import eval_key
from gradient_server.graph.resume import lose_assignments
from gradient_server.graph.settings import GraphSettings

from tests.fixtures.graph import store_path
from tests.integration.graph.pool import INSTANCE, SOURCE, Pool, derivation, metrics, output_path


async def started(pool: Pool, *names: str) -> str:
    """An evaluation of these independent builds, walked."""
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation(name) for name in names])
    return evaluation


async def try_once(pool: Pool, kind: FailureKind, name: str = "a", **fields: Any) -> None:  # noqa: ANN401 - many types
    assignment = await pool.claim(await pool.key(name))
    assert assignment is not None
    await pool.fail(assignment, kind, **fields)


async def test_transient_failures_are_tried_three_times_with_growing_pauses(pool: Pool) -> None:
    evaluation = await started(pool, "a")
    key = await pool.key("a")
    for pause_secs in (30, 60):
        await try_once(pool, FailureKind.TRANSIENT)
        assert pool.queued[key].not_before == pool.clock.now() + pause_secs
        assert await pool.claim(key) is None
        pool.clock.advance(pause_secs)
    await try_once(pool, FailureKind.TRANSIENT)
    assert await pool.statuses() == {"a": "Failed"}
    assert await pool.evaluation_status(evaluation) == "Failed"
    assert await pool.scalar("SELECT failure_kind FROM derivation_build") == "Transient"
    assert await pool.scalar("SELECT COUNT(*) FROM build_attempt") == 3


@pytest.mark.parametrize("kind", [FailureKind.PERMANENT, FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY])
async def test_final_failures_cascade(pool: Pool, kind: FailureKind) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(
        evaluation, [derivation("a"), derivation("b", "a"), derivation("c", "b"), derivation("d")]
    )
    await try_once(pool, kind)
    assert await pool.statuses() == {
        "a": "Failed",
        "b": "DependencyFailed",
        "c": "DependencyFailed",
        "d": "Queued",
    }
    assert await pool.evaluation_status(evaluation) == "Building"
    await pool.build(await pool.key("d"))
    assert await pool.evaluation_status(evaluation) == "Failed"
    assert (
        await pool.scalar(
            "SELECT b.error FROM derivation_build b JOIN derivation d ON d.id = b.derivation"
            " WHERE d.name = 'c'"
        )
        == "it needs a, which failed"
    )


@pytest.fixture
def roomy(pool: Pool) -> Pool:
    """A pool that knows of a worker with 1,000 MiB."""
    pool.settings = GraphSettings(largest_worker_ram_mb=lambda: 1_000)
    return pool


async def test_out_of_memory_is_retried_once_where_there_is_more(roomy: Pool) -> None:
    await started(roomy, "a")
    await try_once(roomy, FailureKind.OUT_OF_MEMORY, used=metrics(peak_ram_mb=500, oom_killed=True))
    job = roomy.queued[await roomy.key("a")]
    assert (job.peak_ram_mb, job.needs_ram_over_mb, job.not_before) == (500, 500, None)
    await try_once(roomy, FailureKind.OUT_OF_MEMORY, used=metrics(peak_ram_mb=600, oom_killed=True))
    assert await roomy.statuses() == {"a": "Failed"}


async def test_out_of_memory_is_final_where_nobody_has_more(roomy: Pool) -> None:
    await started(roomy, "a")
    await try_once(roomy, FailureKind.OUT_OF_MEMORY, used=metrics(peak_ram_mb=1_000, oom_killed=True))
    assert await roomy.statuses() == {"a": "Failed"}


async def test_canceled_and_unwanted_aborts_cost_what_they_should(pool: Pool) -> None:
    await started(pool, "a")
    for _ in range(5):
        await try_once(pool, FailureKind.CANCELED)
    assert await pool.scalar("SELECT attempts FROM derivation_build") == 0
    # Nobody asked for this abort: as Transient.
    await try_once(pool, FailureKind.ABORTED)
    assert await pool.scalar("SELECT attempts FROM derivation_build") == 1
    assert await pool.statuses() == {"a": "Queued"}


async def test_missing_substitutes_are_tolerated_twice_and_then_count(pool: Pool) -> None:
    await started(pool, "a")
    for _ in range(2):
        await try_once(pool, FailureKind.SUBSTITUTE_UNAVAILABLE)
        assert pool.queued[await pool.key("a")].not_before is None
    for pause_secs in (30, 60):
        await try_once(pool, FailureKind.SUBSTITUTE_UNAVAILABLE)
        pool.clock.advance(pause_secs)
    await try_once(pool, FailureKind.SUBSTITUTE_UNAVAILABLE)
    assert await pool.statuses() == {"a": "Failed"}


async def chain(pool: Pool) -> str:
    """a, b on a, and c on b, where a and b are built; b refers to a."""
    evaluation = await pool.submit()
    await pool.evaluate(
        evaluation,
        [derivation("a", sources=[SOURCE]), derivation("b", "a"), derivation("c", "b"), derivation("d", "a")],
    )
    await pool.build(await pool.key("a"))
    await pool.build(await pool.key("b"), references=[output_path("a")])
    return evaluation


async def test_a_missing_input_is_made_again_and_only_that(pool: Pool) -> None:
    evaluation = await chain(pool)
    assert set(pool.queued) == {await pool.key("c"), await pool.key("d")}
    await try_once(pool, FailureKind.INPUTS_UNAVAILABLE, "c", missing=[output_path("a")])
    # b has its output, but its closure is broken: it waits with c. d would miss the same path.
    assert await pool.statuses() == {"a": "Queued", "b": "Created", "c": "Created", "d": "Created"}
    assert set(pool.queued) == {await pool.key("a")}
    assert PathForgotten(output_path("a")) in pool.seen(PathForgotten)
    assert await pool.key("d") in [event.job_id for event in pool.seen(JobUnqueued)]
    await pool.build(await pool.key("a"))
    assert await pool.statuses() == {"a": "Completed", "b": "Completed", "c": "Queued", "d": "Queued"}
    await pool.build(await pool.key("c"))
    await pool.build(await pool.key("d"))
    assert await pool.evaluation_status(evaluation) == "Completed"
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_build") == 4


async def test_healing_ends_after_three_loops(pool: Pool) -> None:
    evaluation = await chain(pool)
    await pool.build(await pool.key("d"))
    for _ in range(3):
        await try_once(pool, FailureKind.INPUTS_UNAVAILABLE, "c", missing=[output_path("b")])
        await pool.build(await pool.key("b"))
    await try_once(pool, FailureKind.INPUTS_UNAVAILABLE, "c", missing=[output_path("b")])
    assert (await pool.statuses())["c"] == "Failed"
    assert await pool.evaluation_status(evaluation) == "Failed"


async def test_a_report_cannot_make_the_server_forget_what_the_job_does_not_need(pool: Pool) -> None:
    await chain(pool)
    await pool.hold(store_path("precious"))
    await try_once(
        pool, FailureKind.INPUTS_UNAVAILABLE, "d", missing=[output_path("b"), store_path("precious")]
    )
    assert not pool.seen(PathForgotten)
    assert pool.queued[await pool.key("d")].not_before == pool.clock.now() + 30


async def test_a_lost_source_cannot_be_made_again(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a", sources=[SOURCE])])
    await try_once(pool, FailureKind.INPUTS_UNAVAILABLE, missing=[SOURCE])
    assert await pool.evaluation_status(evaluation) == "Failed"
    assert "submit it again" in await pool.scalar("SELECT error FROM derivation_build")
    assert await pool.scalar("SELECT COUNT(*) FROM cached_path") == 0


async def test_a_dependency_that_fails_on_its_second_making_takes_its_dependents_with_it(pool: Pool) -> None:
    evaluation = await chain(pool)
    running = await pool.claim(await pool.key("d"), "w2")
    assert running is not None
    await try_once(pool, FailureKind.INPUTS_UNAVAILABLE, "c", missing=[output_path("a")])
    await try_once(pool, FailureKind.PERMANENT, "a")
    assert await pool.statuses() == {
        "a": "Failed",
        "b": "DependencyFailed",
        "c": "DependencyFailed",
        "d": "Assigned",
    }
    # d was running all the while; its retry finds nothing to wait for.
    await pool.fail(running, FailureKind.TRANSIENT, worker="w2")
    assert (await pool.statuses())["d"] == "DependencyFailed"
    assert await pool.evaluation_status(evaluation) == "Failed"


async def test_a_failed_evaluation_takes_back_its_wishes(pool: Pool) -> None:
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    await pool.batch(assignment, derivation("a"), derivation("b", "a"))
    await pool.fail(assignment, FailureKind.TIMEOUT)
    assert await pool.evaluation_status(evaluation) == "Failed"
    assert set((await pool.statuses()).values()) == {"Aborted"}
    assert not pool.queued


async def test_an_evaluation_is_retried_and_its_walk_may_repeat_itself(pool: Pool) -> None:
    evaluation = await pool.submit()
    key = eval_key(evaluation)
    assignment = await pool.claim(key)
    assert assignment is not None
    await pool.batch(assignment, derivation("a"), errors=["half a walk"])
    await pool.fail(assignment, FailureKind.TRANSIENT)
    assert pool.queued[key].not_before == pool.clock.now() + 30
    pool.clock.advance(30)
    await pool.evaluate(evaluation, [derivation("a"), derivation("b", "a")])
    await pool.build(await pool.key("a"))
    await pool.build(await pool.key("b"))
    assert await pool.evaluation_status(evaluation) == "Completed"


@pytest.mark.parametrize("git", [True, False])
async def test_an_evaluation_whose_source_is_gone(pool: Pool, git: bool) -> None:
    fields: dict[str, Any] = {"source": GitSource(url="https://example.org/x"), "source_path": SOURCE}
    evaluation = await pool.submit(**(fields if git else {}))
    await pool.hold(SOURCE)
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    await pool.fail(assignment, FailureKind.INPUTS_UNAVAILABLE, missing=[SOURCE])
    assert await pool.evaluation_status(evaluation) == ("Queued" if git else "Failed")
    if git:
        assert len(pool.queued[eval_key(evaluation)].steps) == 2


@pytest.mark.parametrize(("accept", "attempts"), [(True, 1), (False, 0)])
async def test_a_lost_build_uses_an_attempt_only_if_it_was_accepted(
    pool: Pool, accept: bool, attempts: int
) -> None:
    await started(pool, "a")
    assignment = await pool.claim(await pool.key("a"), accept=accept)
    assert assignment is not None

    async def lose(instance: str) -> int:
        events = await pool.run(
            lambda c: lose_assignments(
                c, [assignment, "unknown"], instance_id=instance, now=pool.clock.now(), ids=pool.ids
            )
        )
        pool.publish(events)
        return len(events)

    assert await lose("another") == 0
    assert await lose(INSTANCE) > 0
    assert await pool.statuses() == {"a": "Queued"}
    assert await pool.scalar("SELECT attempts FROM derivation_build") == attempts
    assert await pool.scalar("SELECT status FROM dispatched_job WHERE id = :id", id=assignment) == "Abandoned"
    assert await pool.scalar("SELECT outcome FROM build_attempt") == "Lost"
    assert await lose(INSTANCE) == 0
