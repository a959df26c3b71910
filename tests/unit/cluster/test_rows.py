"""Every row of cluster-jobs.md, Tracking, Placement, Prepare and Start, Signals, Recovery and Aging
Reservations, on the real scheduler with the database in memory. The database's part of the rows is
tested with the database.
"""

from dataclasses import replace

import pytest
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.server import ClusterSignal, JobOffer
from gradient_server.cluster.attempts import Attempt
from gradient_server.cluster.settings import ClusterSettings
from gradient_server.cluster.verdict import MemberState
from gradient_server.cluster.why import ClusterStage
from gradient_server.db.queries.signals import StoredSignal
from gradient_server.domain.cluster import OpenAttempt, OpenMember
from gradient_server.domain.events import JobUnqueued, SignalStored
from gradient_server.domain.status import ClusterStatus
from gradient_server.scoring.contexts import HistoryPrediction

from tests.fakes.cluster import ClusterWorld, cluster_info
from tests.fakes.scheduler import build, worker


def pair_world(**settings: float) -> ClusterWorld:
    """Two workers that wait, `a` and `b`."""
    world = ClusterWorld()
    if settings:
        world.runner.settings = world.runner.executor._settings = ClusterSettings(**settings)
    connect(world, "a", "b")
    return world


def connect(world: ClusterWorld, *names: str, **changes: object) -> None:
    for name in names:
        world.connect(worker(name, **changes))
        world.scheduler.request_job(name, JobKind.BUILD)


def only_attempt(world: ClusterWorld) -> Attempt:
    (attempt,) = world.runner.attempts
    return attempt


def signal(n: int, role: str = "server") -> StoredSignal:
    return StoredSignal(n=n, sender_role=role, sender_index=0, topic="t", payload=b"")


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


# Placement


async def test_the_pass_places_prioritised_clusters_first_then_the_oldest() -> None:
    world = ClusterWorld()
    first = world.submit(cluster_info("first"))
    world.submit(cluster_info("second", created_at=first.created_at + 1))
    world.submit(cluster_info("urgent", created_at=first.created_at + 2, prioritized=True))
    connect(world, "a", "b")
    await world.plan()
    assert world.assignment("a").job_id.startswith("build:urgent")
    connect(world, "d", "e")
    await world.plan()
    assert world.assignment("d").job_id.startswith("build:first")


async def test_a_worker_that_went_busy_since_the_snapshot_refuses_the_whole_step() -> None:
    world = pair_world()
    world.submit(cluster_info("c"))
    world.scheduler.pool.workers["b"].slots[JobKind.BUILD].wish = False
    world.runner.run_pass()
    assert len(world.runner.attempts) == 0
    assert set(world.scheduler.tracker.members) == {"build:c-0", "build:c-1"}
    assert world.scheduler.pool.assignments == {}


async def test_a_pinned_member_sits_on_its_worker_alone() -> None:
    world = pair_world()
    info = cluster_info("c")
    members = (info.members[0], replace(info.members[1], pin="host-a"))
    world.submit(replace(info, members=members))
    await world.plan()
    assert world.assignment("a").job_id == "build:c-1"
    assert world.assignment("b").job_id == "build:c-0"


async def test_a_cluster_without_a_full_placement_keeps_waiting_and_single_jobs_run() -> None:
    world = pair_world()
    world.submit(cluster_info("c", members=3))
    await world.single("single")
    await world.plan()
    assert world.assignment("a").job_id == "build:single"
    why = world.runner.explain("c")
    assert why.stage is ClusterStage.SEATS
    assert why.best_zone is not None
    assert (why.best_zone.seats_idle, why.best_zone.seats_able) == (1, 2)


async def test_why_names_what_nobody_has() -> None:
    world = pair_world()
    world.submit(cluster_info("c"), features=frozenset({"kvm"}))
    await world.plan()
    assert "lacks the feature kvm" in world.runner.explain("c").summary


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


# Recovery


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
        world.runner.run_pass()
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
    rows = tuple(
        OpenMember(
            assignment_id=seat.assignment_id,
            job_key=seat.member.job_key,
            worker_id=seat.worker_id,
            accepted=True,
            report_stored=False,
        )
        for seat in old.seats.values()
    )
    world = ClusterWorld()
    found = OpenAttempt(id=old.id, instance_id="instance-1", created_at=1.0, started_at=2.0, members=rows)
    world.clusters.clusters["c"] = replace(before.clusters.clusters["c"], open_attempt=found)
    world.clusters.attempts = before.clusters.attempts
    world.clusters.pending = before.clusters.pending
    await world.runner.load()
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


async def test_two_half_groups_never_wait_for_each_other() -> None:
    world = ClusterWorld()
    first = world.submit(cluster_info("first", members=3))
    world.submit(cluster_info("second", members=3, created_at=first.created_at + 1))
    connect(world, "a", "b", "c", "d")
    await world.plan()
    sent = {name: world.assigned(name) for name in "abcd"}
    assert sum(len(found) for found in sent.values()) == 3
    assert all(m.job_id.startswith("build:first") for found in sent.values() for m in found)


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


# Aging Reservations


async def reserving() -> ClusterWorld:
    """`c` wants two seats; `a` is idle, `b` runs a single job; 600 s have passed."""
    world = ClusterWorld()
    connect(world, "a", "b", max_concurrent_builds=1)
    await world.single("long")
    await world.plan()
    busy = next(name for name in ("a", "b") if world.outboxes[name].sent)
    world.busy = busy  # type: ignore[attr-defined] - the tests' own note
    message = world.assignment(busy)
    await world.reply(busy, message)
    world.long = message.assignment_id  # type: ignore[attr-defined] - the tests' own note
    world.submit(cluster_info("c"), system="x86_64-linux")
    await world.later(599.0)
    assert world.runner.desk.held is None
    await world.later(2.0)
    assert world.runner.desk.held is not None
    return world


async def test_target_a_placement_over_every_connected_eligible_worker_idle_ones_first() -> None:
    world = await reserving()
    assert world.runner.desk.workers == {"a", "b"}
    assert world.clusters.reserved is not None
    why = world.runner.explain("c")
    assert why.stage is ClusterStage.RESERVED
    assert why.reservation is not None
    assert [seat.running for seat in why.reservation.seats if not seat.is_idle] == [("long",)]


async def test_seats_get_no_new_single_job_of_the_reserved_kind() -> None:
    world = await reserving()
    await world.single("single")
    await world.later(5.0)
    assert world.assigned("a") == world.assigned("b") == []


async def test_commit_once_every_seat_is_idle() -> None:
    world = await reserving()
    busy: str = world.busy  # type: ignore[attr-defined] - the tests' own note
    await world.single("single")
    world.bus.publish(world.store.close(world.long))  # type: ignore[attr-defined] - the tests' own note
    world.scheduler.request_job(busy, JobKind.BUILD)
    assigned = await world.start("a", "b")
    assert {message.job_id for message in assigned.values()} == {"build:c-0", "build:c-1"}
    assert world.runner.desk.held is None
    await world.drain_work()
    assert world.clusters.reserved is None


async def test_one_at_a_time_and_others_plan_over_the_unreserved_idle_workers() -> None:
    world = await reserving()
    world.submit(cluster_info("d"))
    await world.later(700.0)
    assert world.runner.desk.held is not None
    assert world.runner.desk.held.cluster_id == "c"
    # Of another system, so that the holder itself cannot sit there.
    connect(world, "x", "y", architectures=["aarch64-linux"])
    await world.plan()
    assert {world.assignment(name).job_id for name in ("x", "y")} == {"build:d-0", "build:d-1"}
    assert world.assigned("a") == world.assigned("b") == []


@pytest.mark.parametrize("why", ["timeout", "disconnect", "left the queue"])
async def test_release_after_1800_seconds_on_a_disconnect_or_on_the_cluster_leaving(why: str) -> None:
    world = await reserving()
    await world.single("single")
    if why == "timeout":
        await world.later(1801.0)
        # Released, and reserved again: the next pass can.
        assert world.runner.desk.held is not None
        assert world.runner.desk.held.reserved_at == world.clock.monotonic()
        return
    if why == "disconnect":
        world.scheduler.worker_disconnected(world.busy)  # type: ignore[attr-defined] - the tests' own note
    else:
        world.bus.publish(world.clusters.abort("c"))
    await world.later(1.0)
    assert world.runner.desk.held is None
    assert world.clusters.reserved is None
    idle = next(name for name in ("a", "b") if name != world.busy)  # type: ignore[attr-defined] - see above
    assert world.assignment(idle).job_id == "build:single"


async def test_a_reservation_survives_a_failed_prepare_and_avoids_the_worker_that_rejected() -> None:
    world = await reserving()
    since = world.runner.desk.held.reserved_at if world.runner.desk.held else None
    connect(world, "x", max_concurrent_builds=1)
    await world.plan()
    names = [
        name
        for name in ("a", "b", "x")
        if any(True for m in world.outboxes[name].sent if not isinstance(m, JobOffer))
    ]
    rejecting, holding = names
    await world.reply(holding, world.assignment(holding))
    await world.reply(rejecting, world.assignment(rejecting), accepted=False)
    held = world.runner.desk.held
    assert held is not None
    assert held.reserved_at == since
    assert rejecting not in world.runner.desk.workers
    assert rejecting in world.runner.desk.avoided(world.clock.monotonic())


async def test_a_reservation_that_another_instance_holds_is_given_up() -> None:
    world = ClusterWorld()
    world.clusters.deny_reservation = True
    connect(world, "a")
    world.connect(worker("b"))
    world.submit(cluster_info("c"))
    await world.later(601.0)
    assert world.runner.desk.held is None
    await world.single("single")
    await world.settle()
    assert len(world.assigned("a")) == 1


# Several instances, and no starvation


async def test_what_other_instances_do_is_noticed_within_five_seconds() -> None:
    world = pair_world()
    info = cluster_info("c")
    # Another instance stored and queued it.
    world.clusters.clusters["c"] = info
    for member in info.members:
        name = member.job_key.removeprefix("build:")
        world.store.queued[member.job_key] = build(name, cluster="c")
    await world.runner.loader.refresh()
    await world.plan()
    assert len(world.assigned("a")) == len(world.assigned("b")) == 1
    # And one that another instance has ended is forgotten with its members.
    world.submit(cluster_info("d"))
    del world.clusters.clusters["d"]
    await world.runner.loader.refresh()
    assert world.runner.book.get("d") is None
    assert "build:d-0" not in world.scheduler.tracker


@pytest.mark.parametrize("reserves", [True, False])
async def test_a_cluster_of_four_starts_beside_an_endless_stream_of_single_jobs(reserves: bool) -> None:
    longest_secs = 50
    world = ClusterWorld()
    if not reserves:
        world.runner.desk.after_secs = float("inf")
    names = ("a", "b", "c", "d")
    connect(world, *names, max_concurrent_builds=1)
    running: dict[str, tuple[str, float]] = {}
    for number in range(20):
        await world.single(f"early-{number}")
    world.submit(cluster_info("k", members=4))
    submitted = world.clock.passed
    started = None
    for step in range(150):
        await world.single(f"s{step}")
        # Two ends at different times each, so that no four workers are ever idle by chance.
        for position, name in enumerate(names):
            for message in world.assigned(name):
                await world.reply(name, message)
                if message.cluster is None:
                    ends = world.clock.passed + longest_secs - 10 * position
                    running[name] = (message.assignment_id, ends)
        if len(world.runner.attempts):
            started = world.clock.passed - submitted
            break
        for name, (assignment_id, ends) in list(running.items()):
            if ends <= world.clock.passed:
                del running[name]
                world.bus.publish(world.store.close(assignment_id))
                world.scheduler.request_job(name, JobKind.BUILD)
        await world.later(5.0)
    if reserves:
        assert started is not None
        assert started <= 600 + longest_secs + 10
    else:
        assert started is None


async def seat_secs(backfill: bool) -> tuple[float, float]:
    """(idle seat-seconds of the reservation until the start, when the cluster started after it)."""
    world = ClusterWorld()
    world.runner.reserver._settings = ClusterSettings(backfill=backfill)
    connect(world, "a", "b", max_concurrent_builds=1)
    short, long = (
        HistoryPrediction(build_time_ms=secs * 1000.0, build_time_p95_ms=secs * 1000.0, samples=5)
        for secs in (10.0, 100.0)
    )
    await world.single("long")
    busy = next(name for name in ("a", "b") if world.outboxes[name].sent)
    idle = "b" if busy == "a" else "a"
    message = world.assignment(busy)
    await world.reply(busy, message)
    world.scheduler.pool.assignments[message.assignment_id].expected_secs = 700.0
    world.submit(cluster_info("c"))
    await world.later(601.0)
    assert world.runner.desk.held is not None
    idle_secs, running = 0.0, None
    for step in range(40):
        for name, history in (("s", short), ("l", long)):
            world.queue(build(f"{name}{step}"))
            world.scheduler.tracker.tables[JobKind.BUILD].set_history(f"build:{name}{step}", history)
        world.scheduler.offers.flush(world.scheduler.offers.gathered)
        for name in ("a", "b"):
            world.score(name, f"build:s{step}", f"build:l{step}")
        await world.settle()
        for single in world.assigned(idle) if running is None else []:
            assert single.job_id.startswith("build:s")
            await world.reply(idle, single)
            running = (single.assignment_id, world.clock.passed + 10.0)
        await world.later(5.0)
        if len(world.runner.attempts):
            return idle_secs, world.clock.passed - 601.0
        if running is None:
            idle_secs += 5.0
        elif running[1] <= world.clock.passed:
            world.bus.publish(world.store.close(running[0]))
            running = None
            world.scheduler.request_job(idle, JobKind.BUILD)
        if world.clock.passed >= 700.0 and message.assignment_id in world.store.open:
            world.bus.publish(world.store.close(message.assignment_id))
            world.scheduler.request_job(busy, JobKind.BUILD)
    raise AssertionError("the cluster never started")


async def test_backfill_keeps_reserved_seats_busy_with_short_builds_and_delays_nobody() -> None:
    idle_secs, started = await seat_secs(backfill=False)
    filled_secs, started_beside = await seat_secs(backfill=True)
    assert filled_secs <= 0.25 * idle_secs
    assert started_beside <= started + 10.0
