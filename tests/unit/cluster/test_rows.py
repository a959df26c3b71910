"""Every row of cluster-jobs.md, Tracking, Prepare and Start, and Signals, on the real scheduler
with the database in memory. The database's part of the rows is tested with the database.
"""

from dataclasses import replace

import pytest
from gradient_protocol.kinds import EvalStep, JobKind
from gradient_protocol.messages.server import ClusterSignal
from gradient_protocol.messages.shapes import EvalJob
from gradient_server.cluster.verdict import MemberState
from gradient_server.cluster.why import ClusterStage
from gradient_server.domain.events import ClusterQueued, JobUnqueued, SignalStored
from gradient_server.domain.status import ClusterStatus

from tests.fakes.cluster import ClusterWorld, cluster_info
from tests.fakes.scheduler import build, evaluation, worker
from tests.unit.cluster.worlds import connect, only_attempt, pair_world, signal

# Tracking


async def test_can_start_members_of_a_queued_cluster_join_the_book_and_others_wait_for_theirs() -> None:
    world = pair_world()
    info = world.submit(cluster_info("c", status=ClusterStatus.RUNNING))
    await world.plan()
    assert all(member.job_key in world.runner.book for member in info.members)
    assert world.assigned("a") == world.assigned("b") == []
    await world.single("single")
    await world.plan()
    assert len(world.assigned("a")) == 1


async def test_waiting_a_cluster_can_start_once_every_member_arrived() -> None:
    world = pair_world()
    info = cluster_info("c")
    world.clusters.clusters["c"] = info
    world.queue(build("c-0", cluster="c"))
    await world.plan()
    assert world.runner.explain("c").stage in (ClusterStage.UNKNOWN, ClusterStage.MEMBERS)
    await world.plan()
    assert world.runner.explain("c").stage is ClusterStage.MEMBERS
    world.queue(build("c-1", cluster="c"))
    await world.plan()
    assert len(world.assigned("a")) == len(world.assigned("b")) == 1


async def test_waiting_a_member_unable_to_start_any_more_holds_its_cluster_back() -> None:
    world = ClusterWorld()
    world.submit(cluster_info("c"))
    world.bus.publish([JobUnqueued("build:c-1", "resync")])
    connect(world, "a", "b")
    await world.plan()
    assert world.assigned("a") == []
    world.queue(build("c-1", cluster="c"))
    await world.plan()
    assert len(world.assigned("a")) == 1


async def test_offered_workers_score_members_and_single_assignment_never_sees_them() -> None:
    world = ClusterWorld()
    connect(world, "a")
    info = world.submit(cluster_info("c"))
    await world.later(1.0)
    assert set(world.outboxes["a"].offered()) == {member.job_key for member in info.members}
    world.score("a", "build:c-0", missing=7)
    assert world.runner.floor.reported_bytes("build:c-0", "a") == 7
    await world.tick()
    assert world.assigned("a") == []
    world.bus.publish([JobUnqueued("build:c-1", "resync")])
    world.scheduler.offers.flush(world.scheduler.offers.gathered)
    assert world.outboxes["a"].revoked() == ["build:c-1"]


@pytest.mark.parametrize("how", ["reject", "disconnect"])
async def test_running_a_reject_or_a_disconnect_never_requeues_a_member_as_a_single_job(how: str) -> None:
    world = pair_world()
    connect(world, "c")
    world.submit(cluster_info("c"))
    await world.plan()
    message = world.assignment("a")
    if how == "reject":
        await world.reply("a", message, accepted=False)
    else:
        world.scheduler.worker_disconnected("a")
        await world.drain_work()
    await world.tick()
    assert world.assigned("c") == []
    assert set(world.scheduler.tracker.members) == {"build:c-0", "build:c-1"}


async def test_idle_slots_older_than_25_seconds_are_ignored() -> None:
    world = pair_world()
    world.clock.passed += 25.5
    world.submit(cluster_info("c"))
    await world.plan()
    assert world.assigned("a") == []
    await world.later(0.0)
    assert len(world.assigned("a")) == 1


async def test_members_evaluations_evaluate_in_one_job() -> None:
    world = pair_world()
    info = cluster_info("c")
    members = tuple(replace(member, job_key=f"eval:c-{n}") for n, member in enumerate(info.members))
    info = replace(info, members=members)
    world.clusters.clusters["c"] = info
    world.bus.publish([ClusterQueued(info)])
    # A worker that evaluates and one that only fetches: a single evaluation would be split between them.
    world.connect(worker("f", evaluates=False))
    for name in ("a", "b", "f"):
        world.scheduler.request_job(name, JobKind.EVAL)
    world.queue(*(evaluation(f"c-{n}", cluster="c") for n in range(2)))
    await world.plan()
    for name in ("a", "b"):
        job = world.assignment(name).job
        assert isinstance(job, EvalJob)
        assert job.steps == [EvalStep.FETCH, EvalStep.EVALUATE]
    assert world.assigned("f") == []


@pytest.mark.parametrize("how", ["assignment", "full worker", "disconnect"])
async def test_what_clears_an_idle_slot_leaves_no_seat(how: str) -> None:
    world = ClusterWorld()
    connect(world, "a", "b", max_concurrent_builds=1)
    if how == "disconnect":
        world.scheduler.worker_disconnected("b")
    else:
        await world.single("single")
        await world.plan()
    if how == "full worker":
        for name in ("a", "b"):
            world.scheduler.request_job(name, JobKind.BUILD)
    world.submit(cluster_info("c"))
    await world.plan()
    assert len(world.runner.attempts) == 0
    assert set(world.scheduler.tracker.members) == {"build:c-0", "build:c-1"}


# Prepare and Start


async def test_every_member_accepted_startcluster_to_every_member() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    assigned = await world.start("a", "b")
    for name, message in assigned.items():
        assert message.cluster is not None
        assert message.cluster.hold_secs == 40.0
        (start,) = world.starts(name)
        assert [(entry.role, entry.index, entry.worker) for entry in start.roster] == [
            ("server", 0, "host-" + next(n for n, m in assigned.items() if m.job_id == "build:c-0")),
            ("client", 0, "host-" + next(n for n, m in assigned.items() if m.job_id == "build:c-1")),
        ]


async def test_a_member_rejected_prepare_failed_and_the_cluster_waits_again_after_30_seconds() -> None:
    world = pair_world()
    info = world.submit(cluster_info("c"))
    await world.plan()
    first, second = world.assignment("a"), world.assignment("b")
    await world.reply("a", first)
    await world.reply("b", second, accepted=False)
    assert len(world.aborts("a")) == len(world.aborts("b")) == 1
    assert world.clusters.clusters[info.id].attempts == 0
    for name in ("a", "b"):
        world.scheduler.request_job(name, JobKind.BUILD)
    await world.later(29.0)
    assert world.assigned("a") == []
    await world.later(1.5)
    assert len(world.assigned("a")) == 1


async def test_prepare_timeout_without_every_acceptance_same_as_a_reject() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    await world.plan()
    await world.reply("a", world.assignment("a"))
    await world.later(29.0)
    assert world.aborts("a") == []
    await world.later(1.5)
    assert len(world.aborts("a")) == len(world.aborts("b")) == 1
    assert world.runner.prepares_failed == 1


async def test_a_held_member_reporting_jobfailed_before_the_start_same_as_a_reject() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    await world.plan()
    first = world.assignment("a")
    await world.reply("a", first)
    await world.report(first.assignment_id, MemberState.ABORTED)
    assert len(world.aborts("b")) == 1
    assert world.runner.prepares_failed == 1
    assert world.clusters.clusters["c"].status is ClusterStatus.QUEUED


async def test_a_success_of_a_held_member_counts_as_rejected() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    await world.plan()
    first = world.assignment("a")
    await world.reply("a", first)
    await world.report(first.assignment_id, MemberState.SUCCEEDED)
    assert world.runner.prepares_failed == 1
    assert first.job_id in world.scheduler.pool.workers["a"].excluded


async def test_the_claim_is_lost_nothing_written_and_the_members_are_looked_up_again() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    taken = world.store.queued.pop("build:c-1")
    await world.plan()
    assert world.clusters.attempts == {}
    assert world.assigned("a") == world.assigned("b") == []
    # The workers' wishes stand: single jobs go on.
    await world.single("single")
    await world.settle()
    assert len(world.assigned("a")) == 1
    world.store.queued[taken.job_id] = taken
    await world.tick()
    connect(world, "d")
    await world.plan()
    assert len(world.assigned("b")) == len(world.assigned("d")) == 1


async def test_an_unanswered_member_counts_as_rejected_after_30_seconds() -> None:
    world = pair_world(prepare_timeout_secs=300.0)
    world.submit(cluster_info("c"))
    await world.plan()
    await world.reply("a", world.assignment("a"))
    await world.tick(30.0)
    await world.drain_work()
    assert world.runner.prepares_failed == 1
    assert world.store.aborts == {}


# Signals


async def test_signals_reach_members_after_startcluster_in_one_order_and_never_the_sender() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    assigned = await world.start("a", "b")
    attempt = only_attempt(world)
    sender = next(n for n, m in assigned.items() if m.job_id == "build:c-0")
    other = next(n for n in assigned if n != sender)
    world.clusters.signals = [signal(n) for n in range(1, 101)]
    world.bus.publish([SignalStored(attempt.id, 100)])
    await world.runner.sessions.forward()
    sent = [type(one).__name__ for one in world.outboxes[other].sent if type(one).__name__ != "JobOffer"]
    assert sent == ["StartCluster", *["ClusterSignal"] * 100]
    assert [one.n for one in world.outboxes[other].take(ClusterSignal)] == list(range(1, 101))
    assert world.outboxes[sender].take(ClusterSignal) == []


async def test_signals_wait_for_room_and_go_on_where_they_stopped() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    assigned = await world.start("a", "b")
    attempt = only_attempt(world)
    other = next(n for n, m in assigned.items() if m.job_id == "build:c-1")
    world.outboxes[other].control_has_room = False
    world.clusters.signals = [signal(1)]
    world.bus.publish([SignalStored(attempt.id, 1)])
    await world.runner.sessions.forward()
    assert world.outboxes[other].take(ClusterSignal) == []
    world.outboxes[other].control_has_room = True
    await world.runner.sessions.forward()
    assert len(world.outboxes[other].take(ClusterSignal)) == 1


async def test_a_resumed_member_gets_startcluster_if_held_and_every_signal_after_its_last() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    assigned = await world.start("a", "b")
    attempt = only_attempt(world)
    world.clusters.signals = [signal(n, role="x") for n in (1, 2, 3)]
    for held, last in ((True, 0), (False, 2)):
        world.scheduler.worker_disconnected("a")
        world.connect(worker("a"))
        world.runner.worker_resumed("a", [(assigned["a"].assignment_id, attempt.id, held, last)], [])
        await world.runner.sessions.forward()
        assert len(world.starts("a")) == held
        assert [one.n for one in world.outboxes["a"].take(ClusterSignal)] == list(range(last + 1, 4))


async def test_fifty_failed_prepares_in_a_row_leave_no_attempt_open_and_no_slot_taken() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    for _ in range(50):
        await world.plan()
        for name in ("a", "b"):
            await world.reply(name, world.assignment(name), accepted=name == "a")
        assert world.clusters.open_attempts("c") == []
        assert world.scheduler.pool.assignments == {}
        world.clock.passed += 31.0
        for name in ("a", "b"):
            world.scheduler.request_job(name, JobKind.BUILD)
    assert world.runner.prepares_failed == 50
    assert world.clusters.clusters["c"].attempts == 0
