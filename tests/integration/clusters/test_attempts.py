"""Claim, start and close of attempts (cluster-jobs.md): each whole or not at all, on both databases."""

from dataclasses import replace

import pytest
import sqlalchemy as sa
from gradient_protocol.kinds import FailureKind
from gradient_server.db.queries import claims, instances
from gradient_server.db.queries.clusters import (
    claim_cluster,
    close_cluster_attempt,
    cluster_membership,
    start_cluster_attempt,
)
from gradient_server.domain.events import AssignmentClosed, ClusterChanged, JobQueued, MemberReported
from gradient_server.domain.status import AbortReason, AttemptOutcome
from gradient_server.graph.aborts import abort_evaluation, abort_job
from gradient_server.graph.prepares import fail_prepare
from gradient_server.graph.resume import resume
from gradient_server.graph.settle import abort_cluster

from tests.fixtures.kill import assert_atomic, dump
from tests.integration.clusters.group import INSTANCE, ClusterPool, cluster, members, race
from tests.integration.graph.pool import derivation


async def pair(pool: ClusterPool, **fields: object) -> str:
    return await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", **fields))  # type: ignore[arg-type]  # fields of a cluster


async def test_a_member_that_cannot_start_undoes_the_whole_claim(pool: ClusterPool) -> None:
    await pair(pool)
    claim = await pool.claim_of()
    later = pool.clock.now() + 60
    last = claim.members[1].job_key.removeprefix("build:")

    def hold_back(connection: sa.Connection) -> None:
        text = "UPDATE derivation_build SET not_before = :at WHERE id = :id"
        connection.execute(sa.text(text), {"at": later, "id": last})

    await pool.run(hold_back)
    before = await pool.database.read(dump)

    def claim_and_go_on(connection: sa.Connection) -> tuple[bool, object]:
        won = claim_cluster(connection, claim, now=pool.clock.now())
        return won, connection.execute(sa.text("SELECT COUNT(*) FROM cluster_job")).scalar()

    assert await pool.run(claim_and_go_on) == (False, 1)
    assert await pool.database.read(dump) == before


async def test_part_of_a_cluster_cannot_be_claimed(pool: ClusterPool) -> None:
    await pair(pool)
    whole = await pool.claim_of()
    part = replace(whole, members=whole.members[:1])
    assert not await pool.run(lambda c: claim_cluster(c, part, now=pool.clock.now()))
    on_one = replace(
        whole,
        members=[replace(member, worker_id=whole.members[0].worker_id) for member in whole.members],
    )
    with pytest.raises(ValueError, match="one worker"):
        await pool.run(lambda c: claim_cluster(c, on_one, now=pool.clock.now()))


async def test_nothing_is_left_of_a_claim_a_start_or_a_close_that_is_killed(pool: ClusterPool) -> None:
    await pair(pool)
    claim = await pool.claim_of()
    now = pool.clock.now()
    assert await assert_atomic(pool.database, lambda c: claim_cluster(c, claim, now=now))

    def accept_and_start(connection: sa.Connection) -> bool:
        for member in claim.members:
            claims.accept_assignment(connection, member.assignment_id, member.worker_id, now=now)
        return start_cluster_attempt(connection, claim.attempt_id, INSTANCE, now=now)

    assert await assert_atomic(pool.database, accept_and_start)
    assert await assert_atomic(
        pool.database,
        lambda c: close_cluster_attempt(c, claim.attempt_id, AttemptOutcome.FAILED, now=now),
    )
    assert await pool.open_rows() == 0
    assert await pool.statuses() == {"a": "Queued", "b": "Queued"}


async def test_nothing_is_left_of_a_failed_prepare_or_an_abort_that_is_killed(pool: ClusterPool) -> None:
    await pair(pool)
    group = await pool.hold_group()
    failed, _ = await assert_atomic(
        pool.database, lambda c: fail_prepare(c, group.attempt, "late", now=pool.clock.now())
    )
    assert failed
    await pool.start_group()
    cluster_id = await pool.cluster_id()
    events = await assert_atomic(
        pool.database, lambda c: abort_cluster(c, cluster_id, now=pool.clock.now(), ids=pool.ids)
    )
    assert events
    assert await pool.statuses() == {"a": "Aborted", "b": "Aborted"}


async def test_the_second_close_touches_nothing(pool: ClusterPool) -> None:
    await pair(pool)
    group = await pool.hold_group()
    closing = [
        lambda c: close_cluster_attempt(c, group.attempt, AttemptOutcome.PREPARE_FAILED, now=pool.clock.now())
        for _ in range(3)
    ]
    assert sorted(map(bool, await race(pool, *closing))) == [False, False, True]
    rows = await pool.run(lambda c: c.exec_driver_sql("SELECT status FROM dispatched_job").scalars().all())
    assert sorted(rows) == ["Abandoned", "Abandoned", "Completed"]
    before = await pool.database.read(dump)
    assert not await pool.run(closing[0])
    assert await pool.database.read(dump) == before


async def test_fifty_failed_prepares_leave_nothing_open_and_use_nothing(pool: ClusterPool) -> None:
    await pair(pool)
    for _ in range(50):
        assert (await pool.fail_prepare(await pool.hold_group()))[0]
    last = await pool.hold_group()
    assert await pool.attempts() == [("PrepareFailed", False)] * 50 + [(None, False)]
    assert await pool.open_rows() == 2
    [info] = await pool.infos()
    assert info.attempts == 0
    assert info.open_attempt is not None
    assert info.open_attempt.id == last.attempt
    assert await pool.scalar("SELECT MAX(attempts) FROM derivation_build") == 0


@pytest.mark.parametrize("how", ["not accepted", "rejected", "reported", "aborted", "succeeded", "owner"])
async def test_what_cannot_be_started(pool: ClusterPool, how: str) -> None:
    await pair(pool)
    group = await pool.hold_group()
    assignment, worker = await pool.assignment(group, "b")
    owner = INSTANCE
    if how == "not accepted":
        await pool.run(lambda c: c.exec_driver_sql("UPDATE dispatched_job SET status = 'Assigned'"))
    elif how == "rejected":
        await pool.run(lambda c: claims.close_abandoned(c, assignment, now=pool.clock.now()))
    elif how == "reported":
        reported = await pool.fails(group, "b", FailureKind.ABORTED)
        assert reported.events == [MemberReported(group.attempt, assignment)]
    elif how == "aborted":
        now = pool.clock.now()
        await pool.run(lambda c: claims.store_abort(c, assignment, AbortReason.DRAINED, now=now))
    elif how == "succeeded":
        # A held member that was never started cannot have succeeded: it counts as rejected.
        await pool.complete(assignment, worker)
    else:
        owner = "another instance"
    before = await pool.database.read(dump)
    assert not await pool.start(group, owner)
    assert await pool.database.read(dump) == before
    assert await pool.settle(group) is None
    failed, events = await pool.fail_prepare(group)
    assert failed
    assert await pool.statuses() == {"a": "Queued", "b": "Queued"}
    kinds = [type(event) for event in events]
    assert kinds == sorted(kinds, key=[AssignmentClosed, JobQueued].index)
    # What a held member reported never reached its build, and it can all begin again.
    assert await pool.scalar("SELECT COUNT(*) FROM build_attempt") == 0
    await pool.start_group()


async def test_an_attempt_starts_once(pool: ClusterPool) -> None:
    await pair(pool)
    group = await pool.start_group()
    assert not await pool.start(group)
    [info] = await pool.infos()
    assert info.attempts == 1


async def test_an_evaluations_abort_during_a_prepare_frees_every_hold_at_once(pool: ClusterPool) -> None:
    evaluation = await pair(pool)
    group = await pool.hold_group()
    events = await pool.run(lambda c: abort_evaluation(c, evaluation, now=pool.clock.now(), ids=pool.ids))
    assert events is not None
    closed = {event.assignment_id for event in events if isinstance(event, AssignmentClosed)}
    assert closed == set(group.assignments.values())
    assert [event.status for event in events if isinstance(event, ClusterChanged)] == ["Aborted"]
    assert await pool.attempts() == [("Aborted", False)]
    assert await pool.statuses() == {"a": "Aborted", "b": "Aborted"}
    assert await pool.open_rows() == 0
    assert not await pool.start(group)


async def test_an_evaluations_abort_decides_a_running_attempt(pool: ClusterPool) -> None:
    evaluation = await pair(pool)
    group = await pool.start_group()
    await pool.succeeds(group, "a")
    await pool.run(lambda c: abort_evaluation(c, evaluation, now=pool.clock.now(), ids=pool.ids))
    assert await pool.attempts() == [("Aborted", True)]
    assert await pool.cluster_status() == "Aborted"
    assert await pool.statuses() == {"a": "Completed", "b": "Aborted"}
    assert await pool.settle(group) is None


async def test_an_abort_reaches_no_member_that_others_want(pool: ClusterPool) -> None:
    first = await pair(pool)
    await pair(pool)
    group = await pool.start_group()
    await pool.run(lambda c: abort_evaluation(c, first, now=pool.clock.now(), ids=pool.ids))
    assert await pool.cluster_status() == "Running"
    for name in "ab":
        await pool.succeeds(group, name)
    assert await pool.verdict(group) == "Complete"


@pytest.mark.parametrize("started", [False, True])
async def test_a_person_who_aborts_a_member_ends_its_cluster(pool: ClusterPool, started: bool) -> None:
    await pair(pool)
    group = await (pool.start_group() if started else pool.hold_group())
    key = await pool.key("a")
    events = await pool.run(lambda c: abort_job(c, key, now=pool.clock.now(), ids=pool.ids))
    assert events
    assert await pool.attempts() == [("Aborted", started)]
    assert await pool.statuses() == {"a": "Aborted", "b": "Aborted"}
    assert await pool.settle(group) is None


async def test_a_cluster_is_aborted_while_it_waits_too_and_only_once(pool: ClusterPool) -> None:
    evaluation = await pair(pool)
    wanted = await pool.cluster_id()

    async def abort() -> object:
        events = await pool.run(lambda c: abort_cluster(c, wanted, now=pool.clock.now(), ids=pool.ids))
        pool.publish(events or [])
        return events

    assert await abort()
    assert await pool.cluster_status() == "Aborted"
    assert await pool.statuses() == {"a": "Aborted", "b": "Aborted"}
    assert await pool.evaluation_status(evaluation) == "Failed"
    assert not pool.queued
    assert await abort() is None


async def test_a_failed_dependency_that_races_a_claim_has_one_outcome(pool: ClusterPool) -> None:
    await pool.with_cluster(
        derivation("base"), derivation("a", "base"), *members("b"), cluster=cluster("a", "b")
    )
    failing = await pool.claim(await pool.key("base"))
    assert failing is not None
    await pool.fail(failing, FailureKind.PERMANENT)
    assert await pool.cluster_status() == "Failed"
    assert await pool.statuses() == {"base": "Failed", "a": "DependencyFailed", "b": "Aborted"}
    claim = await pool.claim_of()
    assert not await pool.run(lambda c: claim_cluster(c, claim, now=pool.clock.now()))


async def test_a_dead_instances_prepare_is_closed_by_its_successor(pool: ClusterPool) -> None:
    await pair(pool)
    await pool.run(
        lambda c: [
            instances.register_instance(c, name, advertise_url=None, now=pool.clock.now())
            for name in (INSTANCE, "next")
        ]
    )
    held = await pool.hold_group()
    await pool.run(lambda c: instances.stop_instance(c, INSTANCE, now=pool.clock.now()))
    taken = await pool.run(
        lambda c: instances.take_over(c, INSTANCE, "next", silent_since=0, now=pool.clock.now())
    )
    assert taken is not None
    assert taken.attempts == (held.attempt,)
    assert await pool.attempts() == [("PrepareFailed", False)]
    assert await pool.statuses() == {"a": "Queued", "b": "Queued"}
    assert await pool.open_rows() == 0


async def test_memberships_of_a_batch(pool: ClusterPool) -> None:
    evaluation = await pool.with_cluster(*members("a", "b"), derivation("alone"), cluster=cluster("a", "b"))
    keys = [await pool.key(name) for name in ("a", "b", "alone")]
    found = await pool.database.read(lambda c: cluster_membership(c, [*keys, f"eval:{evaluation}"]))
    wanted = await pool.cluster_id()
    assert {key: (m.cluster_id, m.status) for key, m in found.items()} == dict.fromkeys(
        keys[:2], (wanted, "Queued")
    )


async def test_a_held_member_that_is_not_listed_is_left_to_the_attempt(pool: ClusterPool) -> None:
    await pair(pool)
    group = await pool.start_group()
    assignment, worker = await pool.assignment(group, "a")
    worker_id = await pool.worker(worker)
    decision = await pool.run(
        lambda c: resume(
            c, worker_id=worker_id, instance_id=INSTANCE, running=[], now=pool.clock.now(), ids=pool.ids
        )
    )
    assert decision.lost_members == [assignment]
    assert await pool.open_rows() == 2
