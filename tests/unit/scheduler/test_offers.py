"""Windows on the queue: who is offered what, and what is said about it."""

import msgspec
import pytest
from gradient_protocol.kinds import JobKind
from gradient_protocol.limits import MAX_OFFER_BYTES, MAX_WINDOW_CANDIDATES
from gradient_protocol.messages.server import JobListChunk, JobOffer, RequiredPath, RevokeJob
from gradient_server.domain.events import JobUnqueued

from tests.fakes.scheduler import World, build, worker


def names(first: int, last: int) -> list[str]:
    return [f"build:{number:04}" for number in range(first, last)]


def queue_many(world: World, count: int, **fields: object) -> None:
    world.queue(*[build(f"{number:04}", **fields) for number in range(count)])


async def test_a_candidate_goes_to_thirty_two_workers_those_that_wait_first() -> None:
    world = World()
    for number in range(40):
        world.connect(worker(f"w{number:02}"))
    for number in range(35, 40):
        world.scheduler.request_job(f"w{number}", JobKind.BUILD)
    world.queue(build("x"))
    await world.settle()
    told_at_once = [name for name, outbox in world.outboxes.items() if outbox.offered()]
    assert told_at_once == ["w35", "w36", "w37", "w38", "w39"]
    tracked = world.scheduler.tracker.candidate("build:x")
    assert tracked is not None
    assert len(tracked.offered_to) == 32
    assert {f"w{number}" for number in range(35, 40)} <= set(tracked.offered_to)


async def test_only_eligible_workers_are_offered_a_candidate() -> None:
    world = World()
    world.connect(worker("arm", architectures=["aarch64-linux"]))
    world.connect(worker("other", projects=frozenset({"q"})))
    world.connect(worker("fits"))
    world.scheduler.draining("fits", "test")
    world.queue(build("x", system="x86_64-linux"))
    tracked = world.scheduler.tracker.candidate("build:x")
    assert tracked is not None
    assert tracked.offered_to == {}
    world.scheduler.undrain("fits")
    world.scheduler.request_job("fits", JobKind.BUILD)
    assert list(tracked.offered_to) == ["fits"]


@pytest.mark.parametrize("asked", ["before", "meanwhile"])
async def test_what_a_drained_worker_asked_for_stands_once_it_may_work_again(asked: str) -> None:
    world = World()
    world.connect(worker("a"))
    if asked == "before":
        world.scheduler.request_job("a", JobKind.BUILD)
    world.scheduler.draining("a", "test")
    if asked == "meanwhile":
        world.scheduler.request_job("a", JobKind.BUILD)
    world.queue(build("x"))
    await world.settle()
    assert world.outboxes["a"].offered() == []
    assert world.scheduler.idle_slots == []
    world.scheduler.undrain("a")
    await world.settle()
    assert world.outboxes["a"].offered() == ["build:x"]
    world.score("a", "build:x")
    await world.settle()
    assert len(world.assigned("a")) == 1


async def test_a_request_that_finds_nothing_gets_the_next_sixty_four() -> None:
    world = World()
    queue_many(world, 150)
    world.queue(build("late", prioritized=True))
    world.connect(worker("a"))
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    # The best first, by what is the same for every worker; the smaller id among equals.
    assert world.outboxes["a"].offered() == ["build:late", *names(0, 63)]
    # Nothing more before these are scored.
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert world.outboxes["a"].offered() == []


async def test_workers_that_ask_together_are_offered_different_candidates() -> None:
    world = World()
    queue_many(world, 128)
    for name in ("a", "b"):
        world.connect(worker(name))
        world.scheduler.request_job(name, JobKind.BUILD)
    await world.settle()
    first, second = world.outboxes["a"].offered(), world.outboxes["b"].offered()
    assert (len(first), len(second)) == (64, 64)
    assert not set(first) & set(second)


async def test_the_list_answers_even_an_empty_queue_and_closes_once() -> None:
    world = World()
    outbox = world.connect(worker("a"))
    world.scheduler.request_job_list("a")
    await world.settle()
    [chunk] = outbox.take(JobListChunk)
    assert (list(chunk.candidates), chunk.is_final) == ([], True)
    queue_many(world, 3)
    world.scheduler.request_job_list("a")
    await world.settle()
    chunks = outbox.take(JobListChunk)
    assert [chunk.is_final for chunk in chunks] == [True]
    assert len(chunks[0].candidates) == 3
    assert outbox.take(JobOffer) == []


async def test_a_list_asked_for_again_keeps_the_scores() -> None:
    world = World()
    world.connect(worker("a"))
    world.queue(build("x"))
    world.scheduler.request_job_list("a")
    await world.settle()
    world.score("a", "build:x")
    world.scheduler.request_job_list("a")
    await world.settle()
    assert world.outboxes["a"].offered() == ["build:x", "build:x"]
    # The worker sends changes only, so it will not score it again.
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert [message.job_id for message in world.assigned("a")] == ["build:x"]


async def test_nothing_is_offered_while_the_lane_has_no_room_and_nothing_is_forgotten() -> None:
    world = World()
    outbox = world.connect(worker("a"))
    world.scheduler.request_job("a", JobKind.BUILD)
    outbox.control_has_room = False
    queue_many(world, 3)
    await world.settle()
    world.bus.publish([JobUnqueued("build:0001", "aborted")])
    assert outbox.sent == []
    outbox.control_has_room = True
    await world.settle()
    assert outbox.offered() == ["build:0000", "build:0002"]
    assert outbox.take(RevokeJob) == []


async def test_no_message_is_larger_than_allowed_and_a_window_holds_a_thousand() -> None:
    world = World()
    outbox = world.connect(worker("a"))
    path = "0" * 32 + "-x"
    closure = tuple(RequiredPath(path=f"{path}{number}", nar_size=number) for number in range(200))
    queue_many(world, MAX_WINDOW_CANDIDATES + 50, required_paths=closure)
    world.scheduler.offers.flush(world.scheduler.offers.gathered)
    messages = outbox.take(JobOffer)
    assert all(len(msgspec.msgpack.encode(message)) <= MAX_OFFER_BYTES for message in messages)
    assert [message.is_final for message in messages[:-1]] == [False] * (len(messages) - 1)
    assert messages[-1].is_final
    assert sum(len(message.candidates) for message in messages) == MAX_WINDOW_CANDIDATES
    world.check()


async def test_a_candidate_too_large_for_a_message_is_not_offered_and_is_assigned_unscored() -> None:
    world = World()
    outbox = world.connect(worker("a"))
    path = "0" * 32 + "-" + "x" * 200
    closure = tuple(RequiredPath(path=f"{path}{number}", nar_size=number) for number in range(5_000))
    world.queue(build("huge", required_paths=closure))
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert outbox.offered() == []
    for _ in range(4):
        await world.tick()
    assert [message.job_id for message in world.assigned("a")] == ["build:huge"]


async def test_an_assignment_revokes_the_candidate_everywhere() -> None:
    world = World()
    for name in ("a", "b"):
        world.connect(worker(name))
        world.scheduler.request_job(name, JobKind.BUILD)
    world.queue(build("x"))
    await world.settle()
    world.score("a", "build:x")
    await world.settle()
    assert len(world.assigned("a")) == 1
    world.scheduler.offers.flush(world.scheduler.offers.gathered)
    assert world.outboxes["b"].revoked() == ["build:x"]
    # A late score of what is gone is ignored.
    world.score("b", "build:x")
    await world.settle()
    assert world.assigned("b") == []


async def test_what_a_changed_worker_can_no_longer_take_is_revoked() -> None:
    world = World()
    outbox = world.connect(worker("a"))
    world.queue(build("x"))
    world.scheduler.offers.flush(world.scheduler.offers.gathered)
    world.scheduler.update_projects("a", frozenset({"other"}))
    world.scheduler.offers.flush(world.scheduler.offers.gathered)
    assert outbox.offered() == ["build:x"]
    assert outbox.revoked() == ["build:x"]
    world.check()


async def test_an_evaluation_is_a_candidate_too() -> None:
    world = World()
    outbox = world.connect(worker("a"))
    from tests.fakes.scheduler import evaluation

    world.queue(evaluation("e"))
    world.scheduler.request_job_list("a")
    await world.settle()
    assert outbox.offered() == ["eval:e"]


async def test_a_long_queue_is_spread_over_the_pool() -> None:
    world = World()
    for number in range(40):
        world.connect(worker(f"w{number:02}"))
        world.scheduler.request_job_list(f"w{number:02}")
    await world.settle()
    queue_many(world, 400)
    windows = [len(one.windows[JobKind.BUILD]) for one in world.scheduler.pool]
    # Everyone has something to choose from, every job somebody who looks at it, and nobody nearly all of it.
    assert min(windows) >= 16
    assert max(windows) < 200
    offered = [len(one.offered_to) for one in world.scheduler.tracker.tables[JobKind.BUILD]]
    assert min(offered) >= 2
    assert sum(offered) < 4 * len(offered)


async def test_a_worker_left_with_too_little_is_filled_up_by_new_jobs() -> None:
    world = World()
    for number in range(20):
        world.connect(worker(f"w{number:02}"))
        world.scheduler.request_job_list(f"w{number:02}")
    queue_many(world, 400)
    poor = world.scheduler.pool.workers["w19"]
    window = poor.windows[JobKind.BUILD]
    world.bus.publish([JobUnqueued(entry.job.job_id, "aborted") for entry in list(window.entries)[2:]])
    assert len(window) == 2
    world.queue(*[build(f"late-{number}") for number in range(400)])
    assert len(window) >= 16
