"""The sweeps over the graph: what they find, what they leave alone, and that they end."""

import pytest
import sqlalchemy as sa
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.worker import ImportRequest
from gradient_server.db.queries.instances import database_now, register_instance, stop_instance, take_over
from gradient_server.domain.events import AbortWanted
from gradient_server.domain.job import eval_key
from gradient_server.domain.status import AbortReason
from gradient_server.graph.imports import request_import
from gradient_server.graph.sweeps import (
    AbandonedDispatch,
    StuckJobs,
    close_abandoned_dispatches,
    end_stalled_evaluations,
    find_abandoned_dispatches,
    find_stalled_evaluations,
    find_stuck,
    queued_builds,
    repair,
)
from gradient_server.graph.work import Work

from tests.integration.clusters.group import ClusterPool, cluster, members
from tests.integration.graph.pool import INSTANCE, Pool, derivation, output_path

TIMES = {"timeout_secs": 3_600.0, "margin_secs": 300.0}


async def enter(pool: Pool, instance: str) -> None:
    def do(connection: sa.Connection) -> None:
        register_instance(connection, instance, advertise_url=None, now=database_now(connection))

    await pool.run(do)


async def found(pool: Pool, *attended: str, instance: str = INSTANCE) -> list[AbandonedDispatch]:
    workers = {await pool.worker(name) for name in attended}
    before = pool.clock.now()
    return await pool.run(
        lambda c: find_abandoned_dispatches(c, instance_id=instance, attended=workers, before=before)
    )


async def close(pool: Pool, *assignments: str, attended: bool = False, instance: str = INSTANCE) -> int:
    def do(connection: sa.Connection) -> tuple[int, Work]:
        work = Work(connection, pool.clock.now(), pool.ids)
        closed = close_abandoned_dispatches(
            work, assignments, instance_id=instance, is_attended=lambda _: attended
        )
        return closed, work

    closed, work = await pool.run(do)
    pool.publish(work.events)
    return closed


async def test_an_assignment_whose_worker_is_away_without_a_grace_is_closed_and_its_job_goes_on(
    pool: Pool,
) -> None:
    await enter(pool, INSTANCE)
    await pool.evaluate(await pool.submit(), [derivation("a"), derivation("b")])
    assert await pool.claim(await pool.key("b"), "here") is not None
    left = await pool.claim(await pool.key("a"), "away")
    assert left is not None
    assert await found(pool, "here", "away") == []
    assert await found(pool, "here") == [], "it was made just now"
    pool.clock.advance(61)
    assert [one.assignment_id for one in await found(pool, "here")] == [left]
    # Its worker came back between the look and the deed.
    assert await close(pool, left, attended=True) == 0
    assert await close(pool, left) == 1
    assert await close(pool, left) == 0, "a pass may be repeated"
    assert await pool.statuses() == {"a": "Queued", "b": "Assigned"}
    assert await pool.key("a") in pool.queued
    assert (
        await pool.scalar("SELECT attempts FROM derivation_build WHERE id = :id", id=await pool.build_id("a"))
        == 1
    )


async def test_an_assignment_of_an_instance_that_was_succeeded_belongs_to_nobody(pool: Pool) -> None:
    await enter(pool, "other")
    await enter(pool, INSTANCE)
    await pool.evaluate(await pool.submit(), [derivation("a")])
    await pool.run(lambda c: stop_instance(c, INSTANCE, now=1.0))
    assert await pool.run(lambda c: take_over(c, INSTANCE, "other", silent_since=0.0, now=2.0)) is not None
    # A claim that was on its way while its instance was taken for dead.
    late = await pool.claim(await pool.key("a"), "w1")
    assert late is not None
    pool.clock.advance(61)
    (one,) = await found(pool, "w1", instance="other")
    assert (one.assignment_id, one.ownerless) == (late, True)
    assert await close(pool, late, attended=True, instance="other") == 1
    assert await pool.statuses() == {"a": "Queued"}


async def test_an_assignment_of_a_living_instance_is_its_own_business(pool: Pool) -> None:
    await enter(pool, "other")
    await enter(pool, INSTANCE)
    await pool.evaluate(await pool.submit(), [derivation("a")])
    held = await pool.claim(await pool.key("a"))
    assert held is not None
    pool.clock.advance(1_000)
    assert await found(pool, instance="other") == []
    assert await close(pool, held, instance="other") == 0


async def test_what_is_hung_at_its_worker_fails_after_its_timeout_and_a_margin(pool: Pool) -> None:
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None

    async def look() -> dict[str, str]:
        now = pool.clock.now()
        return await pool.run(lambda c: find_stalled_evaluations(c, now=now, **TIMES))

    pool.clock.advance(3_000)
    await pool.batch(assignment, derivation("a"))
    pool.clock.advance(3_600)
    assert await look() == {}, "it was heard of within its time"
    pool.clock.advance(301)
    assert await look() == {evaluation: assignment}

    def end(connection: sa.Connection) -> tuple[int, Work]:
        work = Work(connection, pool.clock.now(), pool.ids)
        return end_stalled_evaluations(work, **TIMES), work

    ended, work = await pool.run(end)
    pool.publish(work.events)
    assert ended == 1
    assert await pool.evaluation_status(evaluation) == "Failed"
    assert await pool.statuses() == {"a": "Aborted"}
    assert [(one.assignment_id, one.reason) for one in pool.seen(AbortWanted)] == [
        (assignment, AbortReason.EVALUATION)
    ]
    assert await look() == {}
    await pool.fail(assignment, FailureKind.ABORTED)
    assert await pool.evaluation_status(evaluation) == "Failed"


async def test_an_evaluation_that_waits_for_an_import_is_not_hung(pool: Pool) -> None:
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    await pool.batch(assignment, derivation("a"))
    worker = await pool.worker("w1")
    query = ImportRequest(query_id="q", assignment_id=assignment, paths=[output_path("a")])
    await pool.run(
        lambda c: request_import(c, query, worker_id=worker, now=pool.clock.now(), ids=pool.ids) and None
    )
    pool.clock.advance(100_000)
    now = pool.clock.now()
    assert await pool.run(lambda c: find_stalled_evaluations(c, now=now, **TIMES)) == {}


async def mend(pool: Pool) -> StuckJobs:
    def do(connection: sa.Connection) -> tuple[StuckJobs, Work]:
        work = Work(connection, pool.clock.now(), pool.ids)
        return repair(work), work

    stuck, work = await pool.run(do)
    pool.publish(work.events)
    assert not len(await pool.run(find_stuck)), "once is enough"
    return stuck


# What a bug, or a hand in the database, would leave; no code of ours makes any of these states.
@pytest.mark.parametrize(
    ("damage", "field", "then"),
    [
        (
            "DELETE FROM dispatched_job WHERE finished_at IS NULL",
            "builds_to_queue",
            {"a": "Queued", "b": "Created"},
        ),
        (
            "UPDATE derivation_build SET status = 'Completed', finished_at = 1.0 WHERE status = 'Assigned'",
            "builds_to_settle",
            {"a": "Completed", "b": "Queued"},
        ),
        (
            "UPDATE derivation_build SET status = 'Failed', finished_at = 1.0 WHERE status = 'Assigned'",
            "builds_to_settle",
            {"a": "Failed", "b": "DependencyFailed"},
        ),
    ],
)  # fmt: skip
async def test_builds_that_wait_for_nothing_are_moved_on(
    pool: Pool, damage: str, field: str, then: dict[str, str]
) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a"), derivation("b", "a")])
    assert await pool.claim(await pool.key("a")) is not None
    build = await pool.build_id("a")
    assert not len(await pool.run(find_stuck))
    await pool.run(lambda c: c.execute(sa.text(damage)) and None)
    assert getattr(await mend(pool), field) == [build]
    assert await pool.statuses() == then
    assert (await pool.evaluation_status(evaluation) == "Failed") is ("Failed" in then.values())


async def test_evaluations_that_wait_for_nothing_are_moved_on(pool: Pool) -> None:
    running, built = await pool.submit(), await pool.submit()
    await pool.evaluate(built, [derivation("a")])
    assert await pool.claim(eval_key(running)) is not None
    damage = (
        "DELETE FROM dispatched_job WHERE finished_at IS NULL",
        "UPDATE derivation_build SET status = 'Completed', finished_at = 1.0",
        "UPDATE build_job SET outcome = 'Completed', finished_at = 1.0",
    )
    for text in damage:
        await pool.run(lambda c, text=text: c.execute(sa.text(text)) and None)  # type: ignore[misc]  # a default
    stuck = await mend(pool)
    assert (stuck.evaluations_to_queue, stuck.evaluations_to_end) == ([running], [built])
    assert await pool.evaluation_status(built) == "Completed"
    assert await pool.evaluation_status(running) == "Queued"
    assert eval_key(running) in pool.queued


async def test_what_waits_is_listed_in_windows(pool: Pool) -> None:
    await pool.evaluate(await pool.submit(), [derivation(name) for name in "abc"])
    first = await pool.run(lambda c: queued_builds(c, above="", many=2))
    rest = await pool.run(lambda c: queued_builds(c, above=first[-1], many=2))
    assert (len(first), len(rest)) == (2, 1)
    assert {f"build:{build}" for build in (*first, *rest)} == set(pool.queued)


async def test_members_of_an_open_attempt_are_their_owners(
    database: object, clock: object, ids: object
) -> None:
    pool = ClusterPool(database, clock, ids, None)  # type: ignore[arg-type]  # as the clusters' own fixture
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    await pool.start_group()
    pool.clock.advance(100_000)
    assert await found(pool) == []
    assert not len(await pool.run(find_stuck))
