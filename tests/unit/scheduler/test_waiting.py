"""The waiting build: who may wait, where, what is kept for it, and every way a wait ends."""

import pytest
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.server import AssignJob
from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.waiting import WaitingBuilds
from gradient_server.scoring.policy import policy_by_name

from tests.fakes.scheduler import START, World, build, metrics, worker

TOTAL = 4000


def sized(name: str, peak_ram_mb: int, **changes: object) -> PendingJob:
    """A build that is known to need this much."""
    return build(name, peak_ram_mb=peak_ram_mb, **changes)


def waiting(world: World) -> WaitingBuilds:
    return world.scheduler.dispatcher.waiting


def kept_mb(world: World, worker_id: str) -> float:
    return world.scheduler.pool.workers[worker_id].context.metrics.ram_reserved_for_waiting_build_mb


async def occupied(world: World, worker_id: str, mb: int, name: str = "first") -> AssignJob:
    """A worker of 4000 MB with four slots, which runs a build that holds `mb` of it."""
    world.connect(worker(worker_id, ram_total_mb=TOTAL, max_concurrent_builds=4))
    world.scheduler.heartbeat(worker_id, metrics(ram_free_mb=TOTAL, build_peak_ram_mb={}))
    world.scheduler.request_job(worker_id, JobKind.BUILD)
    await give(world, worker_id, sized(name, mb))
    return await take(world, worker_id)


async def give(world: World, worker_id: str, *jobs: PendingJob) -> None:
    """The jobs are queued and scored by the worker."""
    world.queue(*jobs)
    await world.settle()
    world.score(worker_id, *(job.job_id for job in jobs))
    await world.settle()


async def take(world: World, worker_id: str) -> AssignJob:
    """The worker gets a job, takes it, and asks for another."""
    [message] = world.assigned(worker_id)
    await world.answer(worker_id, message)
    world.scheduler.request_job(worker_id, JobKind.BUILD)
    await world.settle()
    return message


async def ended(world: World, message: AssignJob) -> None:
    world.bus.publish(world.store.close(message.assignment_id))
    await world.settle()


async def test_a_held_build_waits_after_60_s_and_small_ones_no_longer_slip_in() -> None:
    world = World()
    first = await occupied(world, "a", 2000)
    await give(world, "a", sized("large", 3000))
    assert waiting(world).build_of("a") is None
    world.clock.passed += 60
    await give(world, "a", sized("small", 400, ready_at=START + 60))
    assert waiting(world).build_of("a") == "build:large"
    # 1.1 times its peak, which leaves less than nothing of what is left.
    assert kept_mb(world, "a") == pytest.approx(3300, abs=1)
    assert world.assigned("a") == []
    await ended(world, first)
    assert [one.job_id for one in world.assigned("a")] == ["build:large"]
    assert (waiting(world).build_of("a"), kept_mb(world, "a")) == (None, 0.0)


async def test_without_the_wait_the_stream_of_small_builds_goes_on_and_on() -> None:
    """The control of the test above: a build that has not been ready for 60 s is passed by."""
    world = World()
    await occupied(world, "a", 2000)
    await give(world, "a", sized("large", 3000))
    world.clock.passed += 59
    await give(world, "a", sized("small", 400, ready_at=START + 59))
    assert [one.job_id for one in world.assigned("a")] == ["build:small"]


async def test_what_fits_beside_the_kept_memory_still_runs() -> None:
    world = World()
    await occupied(world, "a", 1500)
    await give(world, "a", sized("large", 2300, prioritized=True))
    assert kept_mb(world, "a") == 2530.0
    # 4000 - 1500 - 2530 is nothing; a fetch needs nothing.
    await give(world, "a", build("fetch", is_fixed_output=True), sized("small", 300))
    assert [one.job_id for one in world.assigned("a")] == ["build:fetch"]


async def test_a_prioritised_build_waits_at_once_and_goes_first() -> None:
    world = World()
    await occupied(world, "a", 3000)
    world.clock.passed += 100
    jobs = [
        sized("old", 2000, ready_at=START),
        sized("later", 2000, prioritized=True, ready_at=START + 99),
        sized("now", 2000, prioritized=True, ready_at=START + 98),
    ]
    await give(world, "a", *jobs)
    assert waiting(world).build_of("a") == "build:now"


async def test_no_smaller_id_goes_before_a_prioritised_build() -> None:
    world = World()
    await occupied(world, "a", 3000)
    world.clock.passed += 100
    await give(world, "a", sized("a", 2000), sized("b", 2000, prioritized=True, ready_at=START + 99))
    assert waiting(world).build_of("a") == "build:b"


async def test_of_equals_the_one_that_was_ready_first_waits_and_the_smaller_id_breaks_ties() -> None:
    world = World()
    await occupied(world, "a", 3000)
    world.clock.passed += 100
    await give(world, "a", sized("c", 2000, ready_at=START + 1), sized("b", 2000), sized("a", 2000))
    assert waiting(world).build_of("a") == "build:a"


async def test_each_build_waits_for_one_worker_and_each_worker_for_one_build() -> None:
    world = World()
    await occupied(world, "a", 3000, "first-a")
    await occupied(world, "b", 3000, "first-b")
    await give(world, "a", sized("x", 2000, prioritized=True))
    world.score("b", "build:x")
    await world.settle()
    assert (waiting(world).worker_of("build:x"), waiting(world).build_of("b")) == ("a", None)
    await give(world, "b", sized("y", 2000, prioritized=True))
    assert (waiting(world).build_of("a"), waiting(world).build_of("b")) == ("build:x", "build:y")


async def test_an_assignment_anywhere_ends_the_wait() -> None:
    world = World()
    await occupied(world, "a", 3000)
    await give(world, "a", sized("x", 2000, prioritized=True))
    assert kept_mb(world, "a") == 2200.0
    world.connect(worker("b", ram_total_mb=TOTAL))
    world.scheduler.request_job("b", JobKind.BUILD)
    world.score("b", "build:x")
    await world.settle()
    assert [one.job_id for one in world.assigned("b")] == ["build:x"]
    assert (waiting(world).build_of("a"), kept_mb(world, "a")) == (None, 0.0)


async def test_a_lost_and_a_draining_worker_end_the_wait() -> None:
    for end in (
        lambda world: world.scheduler.worker_disconnected("a"),
        lambda world: world.scheduler.draining("a", "kernel"),
    ):
        world = World()
        await occupied(world, "a", 3000)
        await give(world, "a", sized("x", 2000, prioritized=True))
        assert waiting(world).worker_of("build:x") == "a"
        end(world)
        assert (len(waiting(world)), waiting(world).worker_of("build:x")) == (0, None)


async def test_a_round_without_a_veto_for_want_of_memory_ends_the_wait() -> None:
    world = World()
    first = await occupied(world, "a", 3000)
    world.clock.passed += 70
    await give(world, "a", sized("x", 2000))
    assert waiting(world).build_of("a") == "build:x"
    # The host is full of others' work: nothing that ends here would make room.
    world.scheduler.heartbeat("a", metrics(ram_free_mb=100, build_peak_ram_mb={}))
    world.connect(worker("b", ram_total_mb=TOTAL))
    await ended(world, first)
    assert world.assigned("a") == []
    assert (waiting(world).build_of("a"), kept_mb(world, "a")) == (None, 0.0)


async def test_the_waiting_build_is_taken_below_the_floor() -> None:
    world = World()
    first = await occupied(world, "a", 3000)
    await give(world, "a", sized("x", 2000, ready_at=START + 100))
    world.clock.passed += 170
    await world.tick()
    assert waiting(world).build_of("a") == "build:x"
    other = await _second(world)
    # Its CPU is used up, so the build scores far below the floor; but it fits.
    world.scheduler.heartbeat(
        "a", metrics(ram_free_mb=TOTAL, cpu_usage_pct=99.0, build_peak_ram_mb={other.assignment_id: 1})
    )
    await ended(world, first)
    [message] = world.assigned("a")
    assert message.job_id == "build:x"
    assert world.store.claims[-1].score_breakdown is not None
    assert world.store.claims[-1].score_breakdown["total"] < 0


async def _second(world: World) -> AssignJob:
    await give(world, "a", build("fetch", is_fixed_output=True))
    return await take(world, "a")


async def test_a_build_that_is_held_for_another_reason_too_does_not_wait() -> None:
    world = World()
    await occupied(world, "a", 3000)
    # Not scored yet: RescoreWaitRule holds it as well.
    world.queue(sized("x", 2000, prioritized=True))
    await world.tick()
    assert waiting(world).build_of("a") is None


async def test_a_policy_without_memory_knows_no_waits() -> None:
    world = World(policy=policy_by_name("simple"))
    await occupied(world, "a", 3000)
    await give(world, "a", sized("x", 3900, prioritized=True))
    assert [one.job_id for one in world.assigned("a")] == ["build:x"]


async def test_why_says_what_has_to_be_released_where_and_that_it_is_kept() -> None:
    world = World()
    await occupied(world, "a", 3000)
    await give(world, "a", sized("x", 2000, prioritized=True))
    [standing] = world.scheduler.why("build:x").workers
    # 2200 are needed, 1000 are left.
    assert standing.text.endswith(
        "; it fits once 1.2 GiB are released there, and what is released is kept for it"
    )


async def test_a_build_larger_than_every_worker_runs_alone_on_the_largest_and_why_says_so() -> None:
    world = World()
    first = await occupied(world, "a", 1000)
    world.connect(worker("small", ram_total_mb=3000))
    world.scheduler.request_job("small", JobKind.BUILD)
    await give(world, "a", sized("huge", 6000))
    world.score("small", "build:huge")
    await world.settle()
    # Neither the smaller one, nor the largest while it holds a reservation.
    assert world.assigned("a") == []
    assert world.assigned("small") == []
    standings = {one.worker_id: one.text for one in world.scheduler.why("build:huge").workers}
    assert standings["a"].endswith(
        "; it needs 6.4 GiB of 3.9 GiB, so it may not fit;"
        " no worker has more, and it starts alone there once what runs has ended"
    )
    assert standings["small"].endswith("; it needs 6.4 GiB of 2.9 GiB, so it may not fit")
    await ended(world, first)
    assert [one.job_id for one in world.assigned("a")] == ["build:huge"]


async def test_one_larger_than_every_worker_waits_for_the_largest_and_is_not_passed_by_for_ever() -> None:
    world = World()
    first = await occupied(world, "a", 1000)
    world.connect(worker("small", ram_total_mb=3000))
    await give(world, "a", sized("huge", 6000))
    world.clock.passed += 60
    for number in range(3):
        await give(world, "a", sized(f"small-{number}", 300, ready_at=world.clock.now()))
        assert world.assigned("a") == []
    assert (waiting(world).build_of("a"), kept_mb(world, "a")) == ("build:huge", 6601.0)
    await ended(world, first)
    # Alone: what is reserved for it leaves nothing for the small ones, which still wait.
    assert [one.job_id for one in world.assigned("a")] == ["build:huge"]
    assert waiting(world).build_of("a") is None
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert world.assigned("a") == []


async def test_before_its_60_s_one_larger_than_every_worker_is_passed_by() -> None:
    """The control of the test above."""
    world = World()
    await occupied(world, "a", 1000)
    await give(world, "a", sized("huge", 6000))
    world.clock.passed += 59
    await give(world, "a", sized("small", 300, ready_at=START + 59))
    assert [one.job_id for one in world.assigned("a")] == ["build:small"]


async def test_a_larger_worker_ends_the_wait_of_one_that_fits_there() -> None:
    world = World()
    await occupied(world, "a", 1000)
    await give(world, "a", sized("huge", 6000))
    world.clock.passed += 60
    await world.tick()
    assert waiting(world).build_of("a") == "build:huge"
    world.connect(worker("b", ram_total_mb=2 * TOTAL))
    await give(world, "a", sized("small", 300))
    assert [one.job_id for one in world.assigned("a")] == ["build:small"]
    assert waiting(world).build_of("a") is None
