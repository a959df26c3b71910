"""Every row of cluster-jobs.md, Placement, on the real scheduler with the database in memory."""

from dataclasses import replace

import pytest
from gradient_protocol.kinds import JobKind
from gradient_server.cluster.verdict import MemberState
from gradient_server.cluster.why import ClusterStage

from tests.fakes.cluster import ClusterWorld, cluster_info
from tests.fakes.scheduler import worker
from tests.unit.cluster.worlds import connect, pair_world


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
    world.runner.passes.run_one()
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


async def test_two_half_groups_never_wait_for_each_other() -> None:
    world = ClusterWorld()
    first = world.submit(cluster_info("first", members=3))
    world.submit(cluster_info("second", members=3, created_at=first.created_at + 1))
    connect(world, "a", "b", "c", "d")
    await world.plan()
    sent = {name: world.assigned(name) for name in "abcd"}
    assert sum(len(found) for found in sent.values()) == 3
    assert all(m.job_id.startswith("build:first") for found in sent.values() for m in found)


def zoned(world: ClusterWorld, **zones: str | None) -> None:
    for name, zone in zones.items():
        connect(world, name, zone=zone)


async def test_under_same_zone_all_members_sit_in_one_zone() -> None:
    world = ClusterWorld()
    zoned(world, a="west", b="east")
    world.submit(cluster_info("c", same_zone=True))
    await world.plan()
    assert len(world.runner.attempts) == 0
    zoned(world, d="east")
    await world.plan()
    assert [len(world.assigned(name)) for name in ("a", "b", "d")] == [0, 1, 1]


async def test_workers_without_a_zone_form_one_zone_of_their_own() -> None:
    world = ClusterWorld()
    zoned(world, a="west", b=None, d=None)
    world.submit(cluster_info("c", same_zone=True))
    await world.plan()
    assert [len(world.assigned(name)) for name in ("a", "b", "d")] == [0, 1, 1]


async def test_the_winning_zone_misses_the_least_among_those_that_seat_every_member() -> None:
    world = ClusterWorld()
    zoned(world, a="west", b="west", d="east", e="east", f="small")
    info = world.submit(cluster_info("c", same_zone=True))
    # `small` misses nothing and seats one member alone.
    missing = {"a": 9, "b": 9, "d": 5, "e": 12, "f": 0}
    for name, size in missing.items():
        for member in info.members:
            world.runner.floor.score(name, member.job_key, size)
    await world.plan()
    assert [len(world.assigned(name)) for name in "abdef"] == [0, 0, 1, 1, 0]


async def test_a_worker_seated_for_one_cluster_is_not_offered_to_the_next() -> None:
    world = ClusterWorld()
    first = world.submit(cluster_info("first"))
    world.submit(cluster_info("second", created_at=first.created_at + 1))
    connect(world, "a", "b", "d", max_concurrent_builds=4)
    await world.plan()
    assert [attempt.cluster_id for attempt in world.runner.attempts] == ["first"]
    assert sum(len(world.assigned(name)) for name in "abd") == 2


@pytest.mark.parametrize("wrong", ["kind", "capability", "project", "pin"])
async def test_a_seat_has_the_members_kind_and_pin_and_can_take_it(wrong: str) -> None:
    world = ClusterWorld()
    connect(world, "a")
    if wrong == "kind":
        world.connect(worker("b"))
        world.scheduler.request_job("b", JobKind.EVAL)
    elif wrong == "capability":
        world.connect(worker("b", builds=False))
        world.scheduler.request_job("b", JobKind.BUILD)
    elif wrong == "project":
        world.connect(worker("b", projects=frozenset({"other"})))
        world.scheduler.request_job("b", JobKind.BUILD)
    else:
        connect(world, "b")
    info = cluster_info("c")
    if wrong == "pin":
        info = replace(info, members=(info.members[0], replace(info.members[1], pin="host-d")))
    world.submit(info)
    await world.plan()
    assert len(world.runner.attempts) == 0
    assert world.assigned("a") == []
    connect(world, "d")
    await world.plan()
    assert len(world.assigned("d")) == 1


async def test_crossed_groups_that_want_each_others_workers_never_hold_half() -> None:
    world = ClusterWorld()
    for number, (name, pins) in enumerate((("first", "ab"), ("second", "ba"))):
        info = cluster_info(name, created_at=1_000_000.0 + number)
        members = tuple(replace(member, pin=pin) for member, pin in zip(info.members, pins, strict=True))
        world.submit(replace(info, members=members))
    connect(world, "a")
    await world.plan()
    assert len(world.runner.attempts) == 0, "half of either would wait for the other's half"
    connect(world, "b")
    assigned = await world.start("a", "b")
    assert {one.job_id for one in assigned.values()} == {"build:first-0", "build:first-1"}
    for message in assigned.values():
        await world.report(message.assignment_id, MemberState.SUCCEEDED)
    for name in ("a", "b"):
        world.scheduler.request_job(name, JobKind.BUILD)
    assigned = await world.start("a", "b")
    assert {name: one.job_id for name, one in assigned.items()} == {
        "a": "build:second-1",
        "b": "build:second-0",
    }
