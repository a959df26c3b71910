"""Every row of cluster-jobs.md, Recovery, and what a restart goes on with, on the real scheduler with the
database in memory.
"""

from dataclasses import replace

import pytest
from gradient_protocol.kinds import JobKind
from gradient_server.cluster.verdict import MemberState
from gradient_server.cluster.why import ClusterStage
from gradient_server.domain.status import AttemptOutcome, ClusterStatus

from tests.fakes.cluster import cluster_info
from tests.fakes.scheduler import worker
from tests.unit.cluster.worlds import connect, only_attempt, pair_world


async def test_complete_when_every_member_succeeded() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    assigned = await world.start("a", "b")
    await world.report(assigned["a"].assignment_id, MemberState.SUCCEEDED)
    assert len(world.runner.attempts) == 1
    await world.report(assigned["b"].assignment_id, MemberState.SUCCEEDED)
    assert world.clusters.clusters["c"].status is ClusterStatus.COMPLETED
    assert len(world.runner.attempts) == 0
    assert world.runner.book.get("c") is None
    assert world.aborts("a") == world.aborts("b") == []


async def test_complete_when_the_primary_succeeded_and_still_running_ones_are_aborted() -> None:
    world = pair_world()
    info = cluster_info("c")
    world.submit(replace(info, members=(replace(info.members[0], primary=True), info.members[1])))
    assigned = await world.start("a", "b")
    primary = next(n for n, m in assigned.items() if m.job_id == "build:c-0")
    other = next(n for n in assigned if n != primary)
    await world.report(assigned[primary].assignment_id, MemberState.SUCCEEDED)
    assert world.clusters.clusters["c"].status is ClusterStatus.COMPLETED
    assert len(world.aborts(other)) == 1
    assert world.aborts(primary) == []


async def test_retry_every_member_goes_back_and_prepares_anew_once_survivors_have_ended() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    assigned = await world.start("a", "b")
    await world.report(assigned["a"].assignment_id, MemberState.FAILED)
    assert len(world.aborts("b")) == 1
    for name in ("a", "b"):
        world.scheduler.request_job(name, JobKind.BUILD)
    await world.later(20.0)
    assert world.assigned("a") == []
    await world.report(assigned["b"].assignment_id, MemberState.ABORTED)
    again = await world.start("a", "b")
    assert again["a"].cluster is not None
    assert assigned["a"].cluster is not None
    assert again["a"].cluster.attempt != assigned["a"].cluster.attempt


async def test_a_cluster_that_is_wanted_again_while_its_last_members_stop_runs_again() -> None:
    world = pair_world()
    info = cluster_info("c")
    info = replace(info, members=(replace(info.members[0], primary=True), info.members[1]))
    world.submit(info)
    assigned = await world.start("a", "b")
    primary = next(name for name, one in assigned.items() if one.job_id == "build:c-0")
    helper = "b" if primary == "a" else "a"
    await world.report(assigned[primary].assignment_id, MemberState.SUCCEEDED)
    # Its output was lost.
    world.bus.publish(world.clusters.revive("c"))
    await world.later(20.0)
    await world.report(assigned[helper].assignment_id, MemberState.ABORTED)
    for name in ("a", "b"):
        world.scheduler.request_job(name, JobKind.BUILD)
    second = await world.start("a", "b")
    assert {one.job_id for one in second.values()} == {"build:c-0", "build:c-1+"}
    for one in second.values():
        await world.report(one.assignment_id, MemberState.SUCCEEDED)
    assert world.runner.book.get("c") is None


async def test_retry_waits_at_most_300_seconds_for_survivors() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    assigned = await world.start("a", "b")
    await world.report(assigned["a"].assignment_id, MemberState.FAILED)
    for name in ("a", "b"):
        world.scheduler.request_job(name, JobKind.BUILD)
    await world.later(299.0)
    assert world.assigned("a") == []
    await world.later(1.5)
    assert len(world.assigned("a")) == 1


async def test_fail_without_budget_ends_the_cluster() -> None:
    world = pair_world()
    world.submit(cluster_info("c", retry_budget=0))
    assigned = await world.start("a", "b")
    await world.report(assigned["a"].assignment_id, MemberState.FAILED)
    assert world.clusters.clusters["c"].status is ClusterStatus.FAILED
    assert len(world.aborts("b")) == 1
    await world.report(assigned["b"].assignment_id, MemberState.ABORTED)
    assert world.runner.book.get("c") is None


@pytest.mark.parametrize("when", ["claiming", "preparing", "running"])
async def test_abort_of_the_cluster_reaches_every_member_at_once(when: str) -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    if when == "claiming":
        world.runner.passes.run_one()
        world.bus.publish(world.clusters.abort("c"))
        await world.drain_work()
        assert world.assigned("a") == world.assigned("b") == []
    else:
        await world.plan()
        messages = {name: world.assignment(name) for name in ("a", "b")}
        if when == "running":
            for name, message in messages.items():
                await world.reply(name, message)
        world.bus.publish(world.clusters.abort("c"))
        assert len(world.aborts("a")) == len(world.aborts("b")) == 1
        for message in messages.values():
            await world.report(message.assignment_id, MemberState.ABORTED)
    assert len(world.runner.attempts) == 0
    assert world.scheduler.pool.assignments == {}
    world.check()


async def test_members_lost_with_their_worker_report_into_the_same_verdict() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    await world.start("a", "b")
    world.scheduler.worker_disconnected("a")
    await world.later(59.0)
    assert world.clusters.clusters["c"].status is ClusterStatus.RUNNING
    world.scheduler.worker_lost("a")
    await world.drain_work()
    assert world.clusters.clusters["c"].status is ClusterStatus.QUEUED
    assert len(world.aborts("b")) == 1


async def test_members_reaped_after_an_unconfirmed_abort_report_into_the_same_verdict() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    assigned = await world.start("a", "b")
    world.runner.abort_wanted(assigned["a"].assignment_id)
    await world.later(299.0)
    assert world.clusters.clusters["c"].status is ClusterStatus.RUNNING
    await world.later(2.0)
    assert world.clusters.clusters["c"].status is ClusterStatus.QUEUED


async def test_reports_arriving_after_the_verdict_change_nothing() -> None:
    world = pair_world()
    world.submit(cluster_info("c", retry_budget=0))
    assigned = await world.start("a", "b")
    await world.report(assigned["a"].assignment_id, MemberState.FAILED)
    before = dict(world.clusters.clusters)
    await world.report(assigned["b"].assignment_id, MemberState.SUCCEEDED)
    await world.report(assigned["b"].assignment_id, MemberState.SUCCEEDED)
    assert world.clusters.clusters == before
    assert len(world.runner.attempts) == 0


async def test_a_started_attempt_is_taken_up_again_after_a_restart() -> None:
    before = pair_world()
    before.submit(cluster_info("c"))
    assigned = await before.start("a", "b")
    old = only_attempt(before)
    world = await before.restarted()
    world.connect(worker("a"))
    world.runner.worker_resumed("a", [(assigned["a"].assignment_id, old.id, True, 0)], [])
    assert world.starts("a") == []  # the other's address is not known yet
    world.connect(worker("b"))
    world.runner.worker_resumed("b", [(assigned["b"].assignment_id, old.id, False, 0)], [])
    assert len(world.starts("a")) == 1
    assert world.starts("b") == []
    for name in ("a", "b"):
        await world.report(assigned[name].assignment_id, MemberState.SUCCEEDED)
    assert world.clusters.clusters["c"].status is ClusterStatus.COMPLETED


@pytest.mark.parametrize("how", ["dropped", "lost", "300 seconds"])
async def test_survivors_of_a_retry_are_waited_for_across_a_restart(how: str) -> None:
    before = pair_world()
    before.submit(cluster_info("c"))
    assigned = await before.start("a", "b")
    await before.report(assigned["a"].assignment_id, MemberState.FAILED)
    await before.later(10.0)
    world = await before.restarted()
    assert world.runner.awaited_workers() == ["a", "b"]
    # Others than the survivor's host could seat it at once.
    connect(world, "a", "x")
    await world.later(60.0)
    assert world.assigned("a") == world.assigned("x") == []
    assert world.runner.explain("c").stage is ClusterStage.SURVIVORS
    if how == "dropped":
        world.connect(worker("b"))
        world.runner.worker_resumed("b", [], [])
    elif how == "lost":
        world.scheduler.worker_lost("b")
    else:
        await world.later(229.0)
        assert world.assigned("a") == []
        await world.later(2.0)
    await world.later(1.0)
    assert len(world.assigned("a")) == len(world.assigned("x")) == 1
    assert [one.survivors_until for one in world.clusters.attempts.values()] == [None, None]


async def test_a_prepare_that_a_restart_interrupts_is_free_of_charge_and_begins_anew() -> None:
    before = pair_world()
    before.submit(cluster_info("c"))
    await before.plan()
    await before.reply("a", before.assignment("a"))
    world = await before.restarted()
    connect(world, "a", "b")
    await world.start("a", "b")
    assert [one.outcome for one in world.clusters.attempts.values()] == [AttemptOutcome.PREPARE_FAILED, None]
    assert world.clusters.clusters["c"].attempts == 1
