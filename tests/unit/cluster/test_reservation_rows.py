"""Every row of cluster-jobs.md, Aging Reservations, several instances, and no starvation, on the real
scheduler with the database in memory.
"""

import pytest
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.server import JobOffer
from gradient_server.cluster.settings import ClusterSettings
from gradient_server.cluster.why import ClusterStage
from gradient_server.scoring.contexts import HistoryPrediction

from tests.fakes.cluster import ClusterWorld, cluster_info
from tests.fakes.scheduler import build, worker
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
