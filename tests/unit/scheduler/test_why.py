"""Why a job waits, in words that say what is missing."""

from gradient_protocol.kinds import JobKind
from gradient_server.scheduler.model import DECISION_RING
from gradient_server.scheduler.why import Standing, WhyState

from tests.fakes.scheduler import World, build, metrics, worker


async def test_nobody_is_connected() -> None:
    world = World()
    world.queue(build("x"))
    answer = world.scheduler.why("build:x")
    assert (answer.state, answer.summary) == (WhyState.PENDING, "no worker is connected")


async def test_a_feature_that_no_worker_has_is_named() -> None:
    world = World()
    world.connect(worker("a"))
    world.queue(build("x", features=frozenset({"big-parallel", "kvm"})))
    alone = world.scheduler.why("build:x").summary
    assert alone == "the one connected worker cannot take it: it lacks the features big-parallel, kvm"
    world.connect(worker("b", system_features=["kvm"]))
    answer = world.scheduler.why("build:x")
    assert [one.standing for one in answer.workers] == [Standing.INELIGIBLE] * 2
    assert [one.text for one in answer.workers] == [
        "lacks the features big-parallel, kvm",
        "lacks the feature big-parallel",
    ]
    assert "none of 2 connected workers can take it" in answer.summary


async def test_each_worker_says_what_stands_in_the_way() -> None:
    world = World()
    names = ["arm", "elsewhere", "drains", "full", "unscored", "hot", "asks-not"]
    for name in names:
        changes = {"architectures": ["aarch64-linux"]} if name == "arm" else {}
        projects = frozenset({"q"}) if name == "elsewhere" else None
        maximum = 1 if name in ("full", "hot") else 2
        world.connect(worker(name, projects=projects, max_concurrent_builds=maximum, **changes))
    for name in ("full", "hot"):
        world.scheduler.request_job(name, JobKind.BUILD)
        world.queue(build(f"other-{name}"))
        world.score(name, f"build:other-{name}")
        await world.settle()
        [message] = world.assigned(name)
        await world.answer(name, message)
    world.scheduler.heartbeat("hot", metrics(cpu_usage_pct=95.0))
    from msgspec.structs import replace

    more = replace(worker("hot").capabilities, max_concurrent_builds=4)
    world.scheduler.update_capabilities("hot", more)
    world.queue(build("x", system="x86_64-linux"))
    for name in ("hot", "asks-not"):
        world.score(name, "build:x")
    world.scheduler.draining("drains", "moving house")
    answer = world.scheduler.why("build:x")
    standing = {one.worker_id: (one.standing, one.text) for one in answer.workers}
    assert standing["arm"] == (Standing.INELIGIBLE, "is not x86_64-linux (has aarch64-linux)")
    assert standing["elsewhere"] == (Standing.INELIGIBLE, "is not registered for the job's project")
    assert standing["drains"] == (Standing.DRAINING, "is draining: moving house")
    assert standing["full"] == (Standing.BUSY, "has 1 slot, all in use")
    assert standing["unscored"][0] is Standing.VETOED
    assert "RescoreWaitRule" in standing["unscored"][1]
    assert standing["hot"][0] is Standing.BELOW_FLOOR
    assert standing["asks-not"][0] is Standing.NOT_ASKING
    hot = next(one for one in answer.workers if one.worker_id == "hot")
    assert hot.score_breakdown is not None
    assert hot.score_breakdown["rules"]["ResourceSaturationRule"] == -8600.0


async def test_backoff_cluster_and_unknown_jobs() -> None:
    world = World()
    world.queue(build("later", not_before=world.clock.now() + 60), build("member", cluster="c1"))
    assert world.scheduler.why("build:later").state is WhyState.HELD_BACK
    assert "60 s" in world.scheduler.why("build:later").summary
    assert world.scheduler.why("build:member").state is WhyState.CLUSTER
    assert world.scheduler.why("build:nothing").state is WhyState.UNKNOWN


async def test_an_assigned_job_tells_its_breakdown_and_the_runner_up() -> None:
    world = World()
    world.connect(worker("a"))
    world.scheduler.request_job("a", JobKind.BUILD)
    world.queue(build("first", prioritized=True), build("second"))
    world.score("a", "build:first", "build:second")
    await world.settle()
    [message] = world.assigned("a")
    assert message.job_id == "build:first"
    answer = world.scheduler.why("build:first")
    assert (answer.state, answer.worker_name) == (WhyState.ASSIGNED, "host-a")
    assert answer.score_breakdown is not None
    assert answer.score_breakdown["rules"]["QosRule"] == 5000.0
    assert answer.score_breakdown["estimate"]["fallbacks"] == ["download_speed", "upload_speed", "history"]
    assert answer.runner_up is not None
    assert answer.runner_up.job_id == "build:second"
    # The same in everything but what the rules tell apart.
    differs = {
        rule for rule, points in answer.runner_up.rules.items()
        if points != answer.score_breakdown["rules"][rule]
    }  # fmt: skip
    assert differs == {"QosRule"}
    assert answer.runner_up.total == sum(answer.runner_up.rules.values())
    [decision] = world.scheduler.recent_decisions()
    assert (decision.chosen, decision.pending, decision.considered) == ("build:first", 2, 2)
    assert [one.job_id for one in decision.best] == ["build:first", "build:second"]


async def test_the_newest_two_hundred_decisions_are_kept_with_the_candidates_they_rejected() -> None:
    world = World()
    world.connect(worker("a", ram_total_mb=4000))
    world.scheduler.heartbeat("a", metrics(ram_free_mb=4000, cpu_usage_pct=99.0))
    world.scheduler.request_job("a", JobKind.BUILD)
    world.queue(build("runs"))
    world.score("a", "build:runs")
    await world.settle()
    [message] = world.assigned("a")
    await world.answer("a", message)
    # From now on the host counts as saturated, and what waits is below the floor each time it asks.
    world.queue(build("waits"))
    world.score("a", "build:waits")
    before = len(world.scheduler.recent_decisions())
    for _ in range(DECISION_RING + 3):
        world.clock.passed += 1.0
        world.scheduler.request_job("a", JobKind.BUILD)
        await world.tick()
    decisions = world.scheduler.recent_decisions()
    assert before < len(decisions) == DECISION_RING == 200
    assert [one.at for one in decisions] == sorted((one.at for one in decisions), reverse=True)
    newest = decisions[0]
    assert (newest.chosen, newest.considered, newest.below_floor) == (None, 1, 1)
    assert [(one.job_id, one.rules["ResourceSaturationRule"]) for one in newest.best] == [
        ("build:waits", -8600.0)
    ]
