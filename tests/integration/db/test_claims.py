"""The claim and the ends of an assignment, with races that meet at a barrier, on both databases."""

import threading
from collections.abc import Callable

import pytest
import sqlalchemy as sa
import trio
from gradient_server.db import tables
from gradient_server.db.queries.claims import (
    Claim,
    accept_assignment,
    claim_assignment,
    close_abandoned,
    note_log,
    open_assignments,
    reject_assignment,
    store_abort,
)
from gradient_server.db.runner import Database
from gradient_server.domain.job import build_key, eval_key
from gradient_server.domain.status import AbortReason, BuildStatus, EvaluationStatus

from tests.fixtures import graph
from tests.fixtures.databases import count
from tests.fixtures.times import START

NOW = START + 10


def claim(job_key: str, number: int = 1, **more: object) -> Claim:
    return Claim(
        assignment_id=f"a-{number}",
        job_key=job_key,
        worker_id=f"w-{number}",
        instance_id="i-1",
        **more,  # type: ignore[arg-type]  # the test names fields of Claim
    )


async def race(database: Database, *contenders: Callable[[sa.Connection], object]) -> list[object]:
    """All at once: on PostgreSQL every one is inside its transaction before the first goes on."""
    barrier = threading.Barrier(len(contenders) if database.dialect == "postgresql" else 1)
    answers: list[object] = []

    async def contend(fn: Callable[[sa.Connection], object]) -> None:
        tries = []

        def attempt(connection: sa.Connection) -> object:
            if not tries:
                tries.append(1)
                barrier.wait(10)
            return fn(connection)

        answers.append(await database.run(attempt))

    async with trio.open_nursery() as nursery:
        for contender in contenders:
            nursery.start_soon(contend, contender)
    return answers


@pytest.mark.parametrize("kind", ["build", "eval"])
async def test_one_of_four_claims_wins(database: Database, kind: str) -> None:
    if kind == "build":
        key = build_key(await database.run(graph.make_build))
    else:
        key = eval_key(await database.run(graph.make_evaluation))
    answers = await race(
        database,
        *(lambda c, n=number: claim_assignment(c, claim(key, n), now=NOW) for number in range(4)),
    )
    assert sorted(answers) == [False, False, False, True]
    [opened] = await database.read(open_assignments)
    assert opened.job_key == key
    assert await database.read(lambda c: graph.job_status(c, key)) == "Assigned"
    assert await database.read(lambda c: count(c, tables.dispatched_job)) == 1


async def test_a_claim_records_the_moment(database: Database) -> None:
    key = build_key(await database.run(graph.make_build))
    made = claim(
        key,
        missing_count=3,
        missing_nar_size=5_000_000_000,
        dependency_count=7,
        score_breakdown={"rules": {"WaitTimeRule": 1.5}, "total": 1.5},
    )
    assert await database.run(lambda c: claim_assignment(c, made, now=NOW))
    row = await database.read(lambda c: c.execute(sa.select(tables.dispatched_job)).one())
    assert (row.missing_count, row.missing_nar_size, row.dependency_count) == (3, 5_000_000_000, 7)
    assert row.score_breakdown == {"rules": {"WaitTimeRule": 1.5}, "total": 1.5}
    assert (row.queued_at, row.ready_at, row.assigned_at, row.accepted_at) == (START, START, NOW, None)
    assert row.log_truncated is False


@pytest.mark.parametrize("status", [status for status in BuildStatus if status != BuildStatus.QUEUED])
async def test_only_a_queued_build_can_be_claimed(sqlite_database: Database, status: BuildStatus) -> None:
    key = build_key(await sqlite_database.run(lambda c: graph.make_build(c, status=status)))
    assert not await sqlite_database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    assert await sqlite_database.read(lambda c: graph.job_status(c, key)) == status
    assert await sqlite_database.read(open_assignments) == []


@pytest.mark.parametrize(
    "status", [status for status in EvaluationStatus if status != EvaluationStatus.QUEUED]
)
async def test_only_a_queued_evaluation_can_be_claimed(
    sqlite_database: Database, status: EvaluationStatus
) -> None:
    key = eval_key(await sqlite_database.run(lambda c: graph.make_evaluation(c, status=status)))
    assert not await sqlite_database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    assert await sqlite_database.read(open_assignments) == []


async def test_an_evaluation_whose_abort_was_asked_for_cannot_be_claimed(database: Database) -> None:
    evaluation = await database.run(graph.make_evaluation)
    await database.run(lambda c: c.execute(tables.evaluation.update().values(abort_requested_at=NOW)))
    assert not await database.run(lambda c: claim_assignment(c, claim(eval_key(evaluation)), now=NOW))


async def test_backoff_holds_a_claim_back_until_its_moment(database: Database) -> None:
    key = build_key(await database.run(lambda c: graph.make_build(c, not_before=NOW)))
    assert not await database.run(lambda c: claim_assignment(c, claim(key), now=NOW - 0.5))
    assert await database.run(lambda c: claim_assignment(c, claim(key), now=NOW))


async def test_an_unknown_job_cannot_be_claimed(database: Database) -> None:
    assert not await database.run(lambda c: claim_assignment(c, claim("build:none"), now=NOW))


@pytest.mark.parametrize("kind", ["build", "eval"])
async def test_a_member_is_claimed_by_its_attempt_alone(database: Database, kind: str) -> None:
    def prepare(connection: sa.Connection) -> tuple[str, str]:
        if kind == "build":
            build = graph.make_build(connection)
            key, cluster = build_key(build), graph.make_member(connection, build=build)
        else:
            evaluation = graph.make_evaluation(connection)
            key, cluster = eval_key(evaluation), graph.make_member(connection, evaluation=evaluation)
        connection.execute(
            tables.cluster_attempt.insert().values(
                id="attempt", cluster_job=cluster, instance="i-1", created_at=NOW
            )
        )
        return key, cluster

    key, _ = await database.run(prepare)
    assert not await database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    member = claim(key, cluster_attempt="attempt", cluster_role="node", cluster_index=0)
    assert await database.run(lambda c: claim_assignment(c, member, now=NOW))
    [opened] = await database.read(open_assignments)
    assert (opened.cluster_attempt, opened.cluster_role, opened.cluster_index) == ("attempt", "node", 0)


async def test_a_job_that_becomes_a_member_never_starts_alone(database: Database) -> None:
    """Submission and claim both lock the job first: whoever is second sees what the first did."""
    build = await database.run(graph.make_build)
    key = build_key(build)

    def submit(connection: sa.Connection) -> bool:
        row = tables.derivation_build.c
        locked = connection.scalar(
            sa.select(row.status).where(row.id == build).with_for_update(key_share=True)
        )
        if locked != "Queued":
            return False
        graph.make_member(connection, build=build)
        return True

    await database.run(graph.make_project)
    answers = await race(database, submit, lambda c: claim_assignment(c, claim(key), now=NOW))
    assert sorted(answers) == [False, True]


async def test_accepting_twice_is_one_acceptance(database: Database) -> None:
    key = build_key(await database.run(graph.make_build))
    await database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    assert not await database.run(lambda c: accept_assignment(c, "a-1", "w-2", now=NOW))
    assert not await database.run(lambda c: accept_assignment(c, "a-1", "w-1", now=NOW, instance_id="i-2"))
    assert await database.run(lambda c: accept_assignment(c, "a-1", "w-1", now=NOW + 1))
    assert await database.run(lambda c: accept_assignment(c, "a-1", "w-1", now=NOW + 2, instance_id="i-1"))
    [opened] = await database.read(lambda c: open_assignments(c, worker_id="w-1"))
    assert (opened.status, opened.accepted_at) == ("Accepted", NOW + 1)
    assert await database.read(lambda c: open_assignments(c, worker_id="w-2")) == []


async def test_reject_queues_the_job_again_and_uses_no_attempt(database: Database) -> None:
    key = build_key(await database.run(graph.make_build))
    await database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    assert await database.run(lambda c: reject_assignment(c, "a-1", "w-2", now=NOW)) is None
    closed = await database.run(lambda c: reject_assignment(c, "a-1", "w-1", now=NOW))
    assert closed is not None
    assert (closed.job_key, closed.requeued) == (key, True)
    assert await database.run(lambda c: reject_assignment(c, "a-1", "w-1", now=NOW)) is None
    assert await database.read(lambda c: graph.job_status(c, key)) == "Queued"
    assert await database.read(lambda c: c.scalar(sa.select(tables.derivation_build.c.attempts))) == 0
    assert await database.run(lambda c: claim_assignment(c, claim(key, 2), now=NOW))


async def test_an_accepted_assignment_cannot_be_rejected(database: Database) -> None:
    key = build_key(await database.run(graph.make_build))
    await database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    await database.run(lambda c: accept_assignment(c, "a-1", "w-1", now=NOW))
    assert await database.run(lambda c: reject_assignment(c, "a-1", "w-1", now=NOW)) is None
    assert await database.read(lambda c: graph.job_status(c, key)) == "Assigned"


async def test_of_accept_and_abandon_both_see_one_order(database: Database) -> None:
    key = build_key(await database.run(graph.make_build))
    await database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    accepted, closed = [], []
    await race(
        database,
        lambda c: accepted.append(accept_assignment(c, "a-1", "w-1", now=NOW)),
        lambda c: closed.append(close_abandoned(c, "a-1", now=NOW)),
        lambda c: closed.append(close_abandoned(c, "a-1", now=NOW)),
    )
    assert len([entry for entry in closed if entry is not None]) == 1
    assert await database.read(open_assignments) == []
    assert await database.read(lambda c: graph.job_status(c, key)) == "Queued"


@pytest.mark.parametrize(
    ("reason", "requeued"),
    [
        (AbortReason.USER, False),
        (AbortReason.EVALUATION, False),
        (AbortReason.REVOKED, True),
        (AbortReason.DRAINED, True),
        (AbortReason.UNANSWERED, True),
    ],
)
async def test_the_stored_reason_decides_whether_the_job_waits_again(
    database: Database, reason: AbortReason, requeued: bool
) -> None:
    key = build_key(await database.run(graph.make_build))
    await database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    assert await database.run(lambda c: store_abort(c, "a-1", reason, now=NOW))
    closed = await database.run(lambda c: close_abandoned(c, "a-1", now=NOW + 300))
    assert closed is not None
    assert (closed.abort_reason, closed.requeued) == (reason, requeued)


async def test_the_wish_of_a_user_overrides_an_abort_that_would_requeue(database: Database) -> None:
    key = build_key(await database.run(graph.make_build))
    await database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    assert await database.run(lambda c: store_abort(c, "a-1", AbortReason.DRAINED, now=NOW))
    assert not await database.run(lambda c: store_abort(c, "a-1", AbortReason.REVOKED, now=NOW))
    assert await database.run(lambda c: store_abort(c, "a-1", AbortReason.USER, now=NOW + 1))
    assert not await database.run(lambda c: store_abort(c, "a-1", AbortReason.DRAINED, now=NOW + 2))
    [opened] = await database.read(open_assignments)
    assert (opened.abort_reason, opened.abort_requested_at) == (AbortReason.USER, NOW + 1)


async def test_a_log_only_grows(database: Database) -> None:
    key = build_key(await database.run(graph.make_build))
    await database.run(lambda c: claim_assignment(c, claim(key), now=NOW))
    assert await database.run(lambda c: note_log(c, "a-1", 500, truncated=False))
    assert not await database.run(lambda c: note_log(c, "a-1", 400, truncated=False))
    assert await database.run(lambda c: note_log(c, "a-1", 500, truncated=True))
    [opened] = await database.read(open_assignments)
    assert (opened.log_bytes, opened.log_truncated) == (500, True)
