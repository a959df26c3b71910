"""Aborts: what they end, what they leave alone, and what their reasons decide."""

import pytest
from gradient_protocol.kinds import FailureKind
from gradient_server.domain.events import AbortWanted
from gradient_server.domain.job import eval_key
from gradient_server.domain.status import AbortReason
from gradient_server.graph.aborts import (
    abort_assignments_of_worker,
    abort_evaluation,
    abort_job,
    reap_unconfirmed,
    unconfirmed_aborts,
)

from tests.integration.graph.pool import INSTANCE, Pool, derivation


async def abort(pool: Pool, evaluation: str) -> bool:
    events = await pool.run(lambda c: abort_evaluation(c, evaluation, now=pool.clock.now(), ids=pool.ids))
    pool.publish(events or [])
    return events is not None


async def abort_one(pool: Pool, key: str) -> bool:
    events = await pool.run(lambda c: abort_job(c, key, now=pool.clock.now(), ids=pool.ids))
    pool.publish(events or [])
    return events is not None


async def test_an_aborted_evaluation_leaves_alone_what_others_want(pool: Pool) -> None:
    first, second = await pool.submit(), await pool.submit(project="other")
    await pool.evaluate(first, [derivation("a"), derivation("b", "a"), derivation("c")])
    await pool.evaluate(second, [derivation("a"), derivation("d", "a")])
    running = await pool.claim(await pool.key("c"))
    assert await abort(pool, first)
    assert await pool.evaluation_status(first) == "Aborted"
    assert await pool.statuses() == {"a": "Queued", "b": "Aborted", "c": "Assigned", "d": "Created"}
    assert pool.queued[await pool.key("a")].projects == ("project-other",)
    wanted = pool.seen(AbortWanted)
    assert [(event.assignment_id, event.reason) for event in wanted] == [(running, AbortReason.EVALUATION)]
    assert running is not None
    await pool.fail(running, FailureKind.ABORTED)
    assert (await pool.statuses())["c"] == "Aborted"
    await pool.build(await pool.key("a"))
    await pool.build(await pool.key("d"))
    assert await pool.evaluation_status(second) == "Completed"
    assert not await abort(pool, first)


async def test_a_queued_and_a_running_evaluation_are_aborted(pool: Pool) -> None:
    waiting, running = await pool.submit(), await pool.submit()
    assignment = await pool.claim(eval_key(running))
    assert assignment is not None
    await pool.batch(assignment, derivation("a"))
    assert await abort(pool, waiting)
    assert await abort(pool, running)
    assert not pool.queued
    assert await pool.evaluation_status(waiting) == "Aborted"
    assert [event.assignment_id for event in pool.seen(AbortWanted)] == [assignment]
    # Its worker had not heard of it yet.
    await pool.batch(assignment, derivation("b"))
    await pool.fail(assignment, FailureKind.ABORTED)
    assert await pool.statuses() == {"a": "Aborted"}
    assert await pool.evaluation_status(running) == "Aborted"
    assert not await pool.run(lambda c: abort_evaluation(c, "nobody", now=1.0, ids=pool.ids))


async def test_who_joins_a_build_that_is_being_aborted_gets_it(pool: Pool) -> None:
    first = await pool.submit()
    await pool.evaluate(first, [derivation("a")])
    running = await pool.claim(await pool.key("a"))
    assert running is not None
    await abort(pool, first)
    second = await pool.submit()
    await pool.evaluate(second, [derivation("a")])
    await pool.fail(running, FailureKind.ABORTED)
    assert await pool.statuses() == {"a": "Queued"}
    assert await pool.scalar("SELECT attempts FROM derivation_build") == 0
    await pool.build(await pool.key("a"))
    assert await pool.evaluation_status(second) == "Completed"


async def test_a_success_that_was_on_its_way_stands(pool: Pool) -> None:
    first = await pool.submit()
    await pool.evaluate(first, [derivation("a")])
    running = await pool.claim(await pool.key("a"))
    assert running is not None
    job = await pool.job(await pool.key("a"))
    await pool.output(running, job)
    await pool.hold(job.outputs[0].path)  # type: ignore[union-attr]  # it is a build
    await abort(pool, first)
    await pool.complete(running)
    assert await pool.statuses() == {"a": "Completed"}


async def test_an_aborted_job_is_aborted_for_everyone(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a"), derivation("b"), derivation("c", "a", "b")])
    running = await pool.claim(await pool.key("a"))
    assert await abort_one(pool, await pool.key("b"))
    assert await pool.statuses() == {"a": "Assigned", "b": "Aborted", "c": "DependencyFailed"}
    assert await abort_one(pool, await pool.key("a"))
    assert not await abort_one(pool, await pool.key("c"))
    assert running is not None
    # What would be tried again is not: a person asked for its end.
    await pool.fail(running, FailureKind.TRANSIENT)
    assert (await pool.statuses())["a"] == "Aborted"
    assert await pool.evaluation_status(evaluation) == "Failed"


@pytest.mark.parametrize("reason", [AbortReason.REVOKED, AbortReason.DRAINED, AbortReason.UNANSWERED])
async def test_the_servers_own_aborts_requeue_without_using_an_attempt(
    pool: Pool, reason: AbortReason
) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a")])
    running = await pool.claim(await pool.key("a"))
    assert running is not None
    worker = await pool.worker("w1")
    events = await pool.run(
        lambda c: abort_assignments_of_worker(
            c, worker, reason, now=pool.clock.now(), ids=pool.ids, text="off you go"
        )
    )
    assert events == [AbortWanted(running, worker, reason, "off you go")]
    await pool.fail(running, FailureKind.ABORTED)
    assert await pool.statuses() == {"a": "Queued"}
    assert await pool.scalar("SELECT attempts FROM derivation_build") == 0


@pytest.mark.parametrize(
    ("reason", "status"), [(AbortReason.DRAINED, "Queued"), (AbortReason.EVALUATION, "Aborted")]
)
async def test_an_abort_that_nobody_confirms_is_reaped(pool: Pool, reason: AbortReason, status: str) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a")])
    running = await pool.claim(await pool.key("a"))
    assert running is not None
    worker = await pool.worker("w1")
    if reason is AbortReason.EVALUATION:
        await abort(pool, evaluation)
    else:
        await pool.run(
            lambda c: abort_assignments_of_worker(
                c, worker, reason, now=pool.clock.now(), ids=pool.ids, text=""
            )
        )
    since = pool.clock.now()
    assert await pool.run(lambda c: unconfirmed_aborts(c, INSTANCE, since - 1)) == []
    overdue = await pool.run(lambda c: unconfirmed_aborts(c, INSTANCE, since))
    assert overdue == [running]
    pool.publish(await pool.run(lambda c: reap_unconfirmed(c, overdue, now=pool.clock.now(), ids=pool.ids)))
    assert await pool.statuses() == {"a": status}
    assert await pool.scalar("SELECT COUNT(*) FROM dispatched_job WHERE finished_at IS NULL") == 0
