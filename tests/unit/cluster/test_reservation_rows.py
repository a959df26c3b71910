"""Every row of cluster-jobs.md, Aging Reservations, several instances, and no starvation, on the real
scheduler with the database in memory.
"""

import pytest
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.server import JobOffer
from gradient_server.cluster.why import ClusterStage
from gradient_server.domain.cluster import StoppingAttempt

from tests.fakes.cluster import ClusterWorld, cluster_info
from tests.fakes.scheduler import START, build, worker
from tests.fakes.starvation import LONG_SECS, simulate
from tests.unit.cluster.worlds import connect, pair_world


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


async def test_a_cluster_whose_survivors_stop_elsewhere_is_left_to_that_instance() -> None:
    world = pair_world()
    stopping = StoppingAttempt(id="t", instance_id="instance-2", until=START + 300.0, members=())
    info = cluster_info("c", stopping_attempt=stopping)
    world.clusters.clusters["c"] = info
    for member in info.members:
        name = member.job_key.removeprefix("build:")
        world.store.queued[member.job_key] = build(name, cluster="c")
    await world.runner.loader.refresh()
    await world.plan()
    assert world.assigned("a") == world.assigned("b") == []
    # It was told that they have ended, or the 300 s are over.
    world.clock.passed += 301.0
    for name in ("a", "b"):
        world.scheduler.request_job(name, JobKind.BUILD)
    await world.runner.loader.refresh()
    await world.plan()
    assert len(world.assigned("a")) == len(world.assigned("b")) == 1


async def test_a_cluster_of_four_starts_beside_an_endless_stream_of_single_builds() -> None:
    outcome = await simulate(reserves=True)
    assert outcome.reserved_after_secs == 600.0
    assert outcome.started_after_secs is not None
    assert outcome.started_after_secs <= 600.0 + LONG_SECS
    assert outcome.builds_meanwhile == 0


async def test_the_control_without_reservations_does_not_start() -> None:
    assert (await simulate(reserves=False)).started_after_secs is None


async def test_backfill_keeps_reserved_seats_busy_with_short_builds_and_delays_nobody() -> None:
    without = await simulate(reserves=True)
    beside = await simulate(reserves=True, backfill=True)
    assert without.idle_worker_secs > 0
    assert beside.idle_worker_secs <= 0.25 * without.idle_worker_secs
    assert beside.builds_meanwhile > 0
    assert beside.started_after_secs == without.started_after_secs
