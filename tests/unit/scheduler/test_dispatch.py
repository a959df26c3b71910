"""From a wish to an AssignJob: what is sent, when, and what is not."""

import pytest
from gradient_protocol.kinds import EvalStep, JobKind, JobStage
from gradient_protocol.messages.server import AssignJob
from gradient_protocol.messages.shapes import EvalJob
from gradient_server.domain.events import AbortWanted, JobUnqueued
from gradient_server.domain.status import AbortReason
from gradient_server.scheduler.model import AssignedJob

from tests.fakes.scheduler import World, build, evaluation, metrics, worker


async def ready_world(*workers: str) -> World:
    world = World()
    for name in workers:
        world.connect(worker(name))
        world.scheduler.request_job(name, JobKind.BUILD)
    await world.settle()
    return world


async def assign(world: World, worker_id: str, job_name: str, *, accepted: bool = True) -> AssignJob:
    world.queue(build(job_name))
    world.score(worker_id, f"build:{job_name}")
    await world.settle()
    [message] = world.assigned(worker_id)
    await world.answer(worker_id, message, accepted=accepted)
    return message


async def test_a_build_is_offered_at_once_and_assigned_when_its_score_comes() -> None:
    world = await ready_world("a")
    world.queue(build("x"))
    await world.settle()
    assert world.outboxes["a"].offered() == ["build:x"]
    assert world.assigned("a") == []
    world.score("a", "build:x", missing=5)
    await world.settle()
    [message] = world.assigned("a")
    assert message.job_id == "build:x"
    [claim] = world.store.claims
    assert (claim.missing_nar_size, claim.missing_count) == (5, 0)
    assert claim.score_breakdown is not None
    assert claim.score_breakdown["rules"]["RescoreWaitRule"] == 0.0


async def test_an_unscored_build_is_assigned_after_four_ticks() -> None:
    world = await ready_world("a")
    world.queue(build("x"))
    for _ in range(3):
        await world.tick()
        assert world.assigned("a") == []
    await world.tick()
    assert [message.job_id for message in world.assigned("a")] == ["build:x"]


async def test_an_evaluation_needs_no_score() -> None:
    world = World()
    world.connect(worker("a"))
    world.scheduler.request_job("a", JobKind.EVAL)
    world.queue(evaluation("e"))
    await world.settle()
    assert [message.job_id for message in world.assigned("a")] == ["eval:e"]


async def test_a_wish_is_consumed_and_ignored_while_the_assignment_is_unanswered() -> None:
    world = await ready_world("a")
    world.queue(build("x"), build("y"))
    world.score("a", "build:x", "build:y")
    await world.settle()
    [first] = world.assigned("a")
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert world.assigned("a") == []
    await world.answer("a", first)
    await world.tick()
    assert world.assigned("a") == []
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert len(world.assigned("a")) == 1


async def test_a_request_right_behind_the_answer_is_heard_before_the_answer_is_stored() -> None:
    world = await ready_world("a")
    world.queue(build("x"), build("y"))
    world.score("a", "build:x", "build:y")
    await world.settle()
    [first] = world.assigned("a")
    from gradient_protocol.messages.worker import AssignJobResponse

    response = AssignJobResponse(assignment_id=first.assignment_id, accepted=True)
    world.scheduler.answer_arrived("a", response)
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.scheduler.assignment_answered("a", response)
    await world.settle()
    assert world.store.accepted == {first.assignment_id}
    assert len(world.assigned("a")) == 1


async def test_slots_are_never_exceeded_and_a_request_before_the_close_counts() -> None:
    world = await ready_world("a")
    first = await assign(world, "a", "x")
    world.scheduler.request_job("a", JobKind.BUILD)
    await assign(world, "a", "y")
    world.queue(build("z"))
    # The worker gave the slot back when it sent its final report; the commit comes later.
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert world.assigned("a") == []
    assert world.scheduler.idle_slots == []
    world.bus.publish(world.store.close(first.assignment_id))
    world.scheduler.offers.flush(world.scheduler.offers.gathered)
    world.score("a", "build:z")
    await world.settle()
    assert [message.job_id for message in world.assigned("a")] == ["build:z"]


async def test_a_rejected_job_goes_to_another_and_not_back_for_thirty_seconds() -> None:
    world = await ready_world("a")
    await assign(world, "a", "x", accepted=False)
    assert "build:x" in world.store.queued
    world.scheduler.request_job("a", JobKind.BUILD)
    world.score("a", "build:x")
    await world.tick(29.0)
    assert world.assigned("a") == []
    world.connect(worker("b"))
    world.scheduler.request_job("b", JobKind.BUILD)
    world.score("b", "build:x")
    await world.settle()
    assert [message.job_id for message in world.assigned("b")] == ["build:x"]


async def test_a_rejected_job_comes_back_after_thirty_seconds() -> None:
    world = await ready_world("a")
    await assign(world, "a", "x", accepted=False)
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.tick(30.0)
    world.score("a", "build:x")
    await world.settle()
    assert [message.job_id for message in world.assigned("a")] == ["build:x"]


async def test_an_unanswered_assignment_is_aborted_after_thirty_seconds() -> None:
    world = await ready_world("a")
    aborts: list[AbortWanted] = []
    world.bus.subscribe(lambda event: aborts.append(event) if isinstance(event, AbortWanted) else None)
    world.queue(build("x"))
    world.score("a", "build:x")
    await world.settle()
    [message] = world.assigned("a")
    await world.tick(29.9)
    assert aborts == []
    await world.tick(0.1)
    assert [(one.assignment_id, one.reason) for one in aborts] == [
        (message.assignment_id, AbortReason.UNANSWERED)
    ]
    # Too late, and still not a second start of anything.
    await world.answer("a", message)
    assert world.store.accepted == set()
    await world.tick()
    assert len(aborts) == 1


async def test_a_lost_claim_sends_nothing_and_the_wish_goes_on() -> None:
    world = await ready_world("a")
    world.queue(build("x"), build("y"))
    del world.store.queued["build:x"]  # another instance has it
    world.score("a", "build:x", "build:y")
    await world.settle()
    assert [message.job_id for message in world.assigned("a")] == ["build:y"]
    world.store.queued["build:x"] = build("x")
    await world.tick()
    assert "build:x" in world.scheduler.tracker


@pytest.mark.parametrize("change", ["disconnect", "replace", "drain", "abort", "stop"])
async def test_what_changes_during_the_claim_gives_the_job_back(change: str) -> None:
    world = await ready_world("a")
    world.queue(build("x"))

    def interfere() -> None:
        world.store.before_claim = lambda: None
        if change == "disconnect":
            world.scheduler.worker_disconnected("a")
        elif change == "replace":
            world.connect(worker("a"))
        elif change == "drain":
            world.scheduler.draining("a", "test")
        elif change == "abort":
            [assignment_id] = world.store.open
            world.bus.publish([AbortWanted(assignment_id, "a", AbortReason.USER, "test")])
        else:
            world.scheduler.drain()

    world.store.before_claim = interfere
    world.score("a", "build:x")
    await world.settle()
    assert world.assigned("a") == []
    assert world.store.open == {}
    assert "build:x" in world.scheduler.tracker
    assert world.scheduler.pool.assignments == {}


async def test_a_job_that_is_unqueued_leaves_windows_and_is_not_assigned() -> None:
    world = await ready_world("a")
    world.queue(build("x"))
    await world.settle()
    world.bus.publish([JobUnqueued("build:x", "aborted")])
    world.score("a", "build:x")
    await world.settle()
    assert world.assigned("a") == []
    world.scheduler.offers.flush(world.scheduler.offers.gathered)
    assert world.outboxes["a"].revoked() == ["build:x"]


async def test_a_disconnect_keeps_assignments_and_a_resume_takes_them_up() -> None:
    world = await ready_world("a")
    message = await assign(world, "a", "x")
    world.scheduler.stage(message.assignment_id, JobStage.PREFETCH)
    world.scheduler.worker_disconnected("a")
    assert [one.job_id for one in world.scheduler.snapshot().away] == ["build:x"]
    adopted = AssignedJob(
        assignment_id=message.assignment_id, job_id=message.job_id, kind=JobKind.BUILD, accepted=True
    )
    world.connect(worker("a"), [adopted])
    world.check()
    [state] = world.scheduler.snapshot().workers
    assert [one.job_id for one in state.assignments] == ["build:x"]
    assert state.slots["Build"].open == 1


async def test_what_a_resume_does_not_list_is_let_go() -> None:
    world = await ready_world("a")
    message = await assign(world, "a", "x")
    world.scheduler.worker_disconnected("a")
    world.bus.publish(world.store.requeue(message.assignment_id))
    world.connect(worker("a"))
    world.check()
    assert world.scheduler.pool.assignments == {}
    assert "build:x" in world.scheduler.tracker


async def test_a_worker_lost_after_the_grace_holds_nothing() -> None:
    world = await ready_world("a")
    await assign(world, "a", "x")
    world.scheduler.worker_disconnected("a")
    world.scheduler.worker_lost("a")
    assert world.scheduler.pool.assignments == {}


async def test_an_idle_slot_is_recorded_refreshed_and_forgotten() -> None:
    world = await ready_world("a")
    [(worker_id, kind, since, _)] = world.scheduler.idle_slots
    assert (worker_id, kind) == ("a", JobKind.BUILD)
    world.clock.passed += 20
    world.scheduler.request_job("a", JobKind.BUILD)
    world.clock.passed += 20
    [(_, _, still_since, _)] = world.scheduler.idle_slots
    assert still_since == since
    world.clock.passed += 6
    assert world.scheduler.idle_slots == []
    world.scheduler.request_job("a", JobKind.BUILD)
    assert len(world.scheduler.idle_slots) == 1
    await assign(world, "a", "x")
    assert world.scheduler.idle_slots == []


async def test_an_evaluation_is_split_while_an_evaluator_that_does_not_fetch_is_idle() -> None:
    world = World()
    world.connect(worker("fetches"))
    world.connect(worker("evaluates", fetch=False))
    world.scheduler.request_job("evaluates", JobKind.EVAL)
    world.queue(evaluation("e"))
    world.scheduler.request_job("fetches", JobKind.EVAL)
    await world.settle()
    [message] = world.assigned("fetches")
    assert isinstance(message.job, EvalJob)
    assert message.job.steps == [EvalStep.FETCH]
    assert world.assigned("evaluates") == []


async def test_an_evaluation_stays_whole_without_one() -> None:
    world = World()
    world.connect(worker("both"))
    world.connect(worker("fetcher", evaluates=False))
    world.scheduler.request_job("fetcher", JobKind.EVAL)
    world.queue(evaluation("e"))
    await world.settle()
    assert world.assigned("fetcher") == []
    world.scheduler.request_job("both", JobKind.EVAL)
    await world.settle()
    [message] = world.assigned("both")
    assert isinstance(message.job, EvalJob)
    assert message.job.steps == [EvalStep.FETCH, EvalStep.EVALUATE]


async def test_a_job_is_held_back_until_its_backoff_has_passed() -> None:
    world = await ready_world("a")
    world.queue(build("x", not_before=world.clock.now() + 7))
    await world.tick(5.0)
    assert world.scheduler.tracker.candidate("build:x") is None
    await world.tick(2.0)
    world.score("a", "build:x")
    await world.settle()
    assert [message.job_id for message in world.assigned("a")] == ["build:x"]


async def test_a_member_of_a_cluster_is_never_assigned_alone() -> None:
    world = await ready_world("a")
    world.queue(build("x", cluster="c"))
    world.score("a", "build:x")
    for _ in range(6):
        await world.tick()
    assert world.assigned("a") == []
    assert world.outboxes["a"].offered() == []
    assert "build:x" in world.scheduler.tracker


async def test_after_an_out_of_memory_kill_a_larger_worker_is_taken_while_there_is_one() -> None:
    world = await ready_world("small")
    world.connect(worker("large", ram_total_mb=32_000))
    world.queue(build("x", needs_ram_over_mb=8000, peak_ram_mb=4000))
    world.score("small", "build:x")
    await world.tick()
    assert world.assigned("small") == []
    world.scheduler.worker_disconnected("large")
    await world.tick()
    assert [message.job_id for message in world.assigned("small")] == ["build:x"]


async def test_ram_that_is_reserved_holds_the_next_build_until_it_is_given_back() -> None:
    world = await ready_world("a")
    world.scheduler.heartbeat("a", metrics(ram_free_mb=8000, build_peak_ram_mb={}))
    world.queue(build("x", peak_ram_mb=5000), build("y", peak_ram_mb=5000))
    world.score("a", "build:x", "build:y")
    await world.settle()
    [first] = world.assigned("a")
    await world.answer("a", first)
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert world.assigned("a") == []
    world.bus.publish(world.store.close(first.assignment_id))
    await world.settle()
    assert len(world.assigned("a")) == 1


async def test_a_stale_answer_changes_nothing() -> None:
    world = await ready_world("a", "b")
    world.queue(build("x"))
    world.score("a", "build:x")
    await world.settle()
    [message] = world.assigned("a")
    await world.answer("b", message, accepted=False)
    assert message.assignment_id in world.store.open
    await world.answer("a", message)
    await world.answer("a", message, accepted=False)
    assert world.store.accepted == {message.assignment_id}
    assert world.scheduler.snapshot().workers[0].slots["Build"].open == 1


async def test_a_request_that_came_before_the_close_is_answered_by_it_with_more_candidates() -> None:
    world = World()
    world.connect(worker("a", max_concurrent_builds=1))
    world.scheduler.request_job("a", JobKind.BUILD)
    first = await assign(world, "a", "first")
    world.outboxes["a"].offered()
    world.scheduler.request_job("a", JobKind.BUILD)
    # A candidate that was never offered to the worker.
    world.scheduler.tracker.add(build("next"), world.clock.now())
    world.bus.publish(world.store.close(first.assignment_id))
    await world.settle()
    assert world.outboxes["a"].offered() == ["build:next"]
    assert len(world.scheduler.idle_slots) == 1


async def test_what_was_gathered_for_a_busy_worker_is_told_once_it_waits() -> None:
    world = await ready_world("a")
    await assign(world, "a", "first")
    world.outboxes["a"].offered()
    world.queue(build("next"))
    await world.settle()
    assert world.outboxes["a"].offered() == []
    world.scheduler.request_job("a", JobKind.BUILD)
    await world.settle()
    assert world.outboxes["a"].offered() == ["build:next"]
