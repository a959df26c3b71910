"""Clusters come into being, are joined, skipped or run anew, and are refused (operations.md, Recipes)."""

from collections.abc import Sequence
from functools import partial

import pytest
from gradient_protocol.kinds import FailureKind
from gradient_server.db.queries.cached_paths import forget_path
from gradient_server.db.queries.claims import Claim, claim_assignment
from gradient_server.domain.events import ClusterQueued, JobQueued
from gradient_server.graph.aborts import abort_evaluation
from gradient_server.graph.cluster_submit import ClusterSpec, ClusterSubmission, MemberSpec, submit_cluster
from gradient_server.graph.known import known_derivations

from tests.fixtures.graph import make_project, store_path
from tests.fixtures.kill import dump
from tests.integration.clusters.group import ClusterPool, cluster, members, race
from tests.integration.graph.pool import derivation, output_path

DAY = 86_400.0


async def submit(
    pool: ClusterPool, *specs: MemberSpec, project: str = "demo", **fields: object
) -> ClusterSubmission:
    spec = ClusterSpec(name="group", members=specs, **fields)  # type: ignore[arg-type]  # fields of a spec
    submission = await pool.run(
        lambda c: submit_cluster(
            c, project=make_project(c, project), spec=spec, now=pool.clock.now(), ids=pool.ids
        )
    )
    pool.publish(submission.events)
    return submission


async def seats(pool: ClusterPool, names: Sequence[str], primary: str | None = None) -> list[MemberSpec]:
    return [MemberSpec(job_key=await pool.key(name), role="node", primary=name == primary) for name in names]


# Recipes


async def test_a_cluster_is_announced_with_its_members(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", primary="a"), prioritized=True)
    [info] = await pool.infos()
    # Announced as it is, whatever the order of the events.
    evaluation = await pool.submit()
    assignment = await pool.claim(f"eval:{evaluation}")
    assert assignment is not None
    outcome = await pool.batch(assignment, *members("c", "d"), clusters=[cluster("c", "d", name="second")])
    announced = [event.cluster for event in outcome.events if isinstance(event, ClusterQueued)]
    [second] = await pool.infos([await pool.cluster_id()])
    assert announced == [second]
    assert info.prioritized
    assert not second.prioritized
    assert [(m.role, m.index, m.primary) for m in info.members] == [("server", 0, True), ("client", 0, False)]
    assert [(m.role, m.index) for m in second.members] == [("client", 0), ("client", 1)]


async def test_a_completed_cluster_is_not_run_again_and_its_aborted_helper_is_none_to_wait_for(
    pool: ClusterPool,
) -> None:
    graph, group = members("a", "b"), cluster("a", "b", primary="a")
    await pool.with_cluster(*graph, cluster=group)
    started = await pool.start_group()
    await pool.succeeds(started, "a")
    assert await pool.verdict(started) == "Complete"
    again = await pool.with_cluster(*graph, cluster=group)
    assert await pool.evaluation_status(again) == "Completed"
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_job") == 1
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_build") == 2
    assert not pool.queued


async def test_a_completed_cluster_whose_output_is_lost_runs_again_as_a_whole(pool: ClusterPool) -> None:
    graph, group = members("a", "b"), cluster("a", "b", primary="a")
    await pool.with_cluster(*graph, cluster=group)
    started = await pool.start_group()
    await pool.succeeds(started, "a")
    await pool.settle(started)
    await pool.run(lambda c: forget_path(c, output_path("a")))
    again = await pool.with_cluster(*graph, cluster=group)
    assert await pool.evaluation_status(again) == "Building"
    assert await pool.cluster_status() == "Queued"
    assert await pool.statuses() == {"a": "Queued", "b": "Queued"}
    assert pool.queued[await pool.key("b")].cluster == await pool.cluster_id()
    # The new helper is wanted by whoever wants the primary.
    assert pool.queued[await pool.key("b")].projects
    second = await pool.start_group()
    await pool.succeeds(second, "a")
    assert await pool.verdict(second) == "Complete"
    assert await pool.evaluation_status(again) == "Completed"


async def test_an_input_that_is_lost_later_brings_the_whole_cluster_back(pool: ClusterPool) -> None:
    graph, group = members("a", "b"), cluster("a", "b", primary="a")
    await pool.with_cluster(*graph, derivation("top", "a"), cluster=group)
    started = await pool.start_group()
    await pool.succeeds(started, "a")
    await pool.settle(started)
    top = await pool.claim(await pool.key("top"))
    assert top is not None
    await pool.fail(top, FailureKind.INPUTS_UNAVAILABLE, missing=[output_path("a")])
    assert await pool.statuses() == {"a": "Queued", "b": "Queued", "top": "Created"}
    assert await pool.claim(await pool.key("a")) is None
    second = await pool.start_group()
    await pool.succeeds(second, "a")
    await pool.settle(second)
    assert (await pool.statuses())["top"] == "Queued"


async def test_a_completed_cluster_whose_helper_failed_by_itself_is_tried_again_when_asked(
    pool: ClusterPool,
) -> None:
    graph, group = members("a", "b", "c"), cluster("a", "b", "c", primary="a")
    first = await pool.with_cluster(*graph, cluster=group)
    started = await pool.start_group()
    await pool.succeeds(started, "a")
    await pool.fails(started, "b")
    assert await pool.verdict(started) == "Complete"
    assert await pool.evaluation_status(first) == "Failed"
    again = await pool.with_cluster(*graph, cluster=group)
    assert await pool.statuses() == {"a": "Queued", "b": "Queued", "c": "Queued"}
    assert {job.cluster for job in pool.queued.values()} == {await pool.cluster_id()}
    second = await pool.start_group()
    await pool.succeeds(second, "a")
    assert await pool.verdict(second) == "Complete"
    assert await pool.evaluation_status(again) == "Completed"


async def test_a_failed_cluster_runs_anew_with_the_member_that_had_succeeded(pool: ClusterPool) -> None:
    graph, group = members("a", "b"), cluster("a", "b", retry_budget=0)
    await pool.with_cluster(*graph, cluster=group)
    started = await pool.start_group()
    await pool.succeeds(started, "a")
    await pool.fails(started, "b")
    assert await pool.verdict(started) == "Fail"
    again = await pool.with_cluster(*graph, cluster=group)
    assert await pool.statuses() == {"a": "Queued", "b": "Queued"}
    assert await pool.scalar("SELECT COUNT(*) FROM cluster_job WHERE status = 'Queued'") == 1
    second = await pool.start_group()
    for name in "ab":
        await pool.succeeds(second, name)
    assert await pool.verdict(second) == "Complete"
    assert await pool.evaluation_status(again) == "Completed"


async def refused_batch(pool: ClusterPool, *derivations: object, clusters: Sequence[object] = ()) -> str:
    evaluation = await pool.submit()
    assignment = await pool.claim(f"eval:{evaluation}")
    assert assignment is not None
    before = await pool.database.read(dump)
    outcome = await pool.batch(assignment, *derivations, clusters=clusters)  # type: ignore[arg-type]  # shapes
    assert outcome.refused is not None
    assert not outcome.events
    after = await pool.database.read(dump)
    changed = {table for table in before if before[table] != after[table]}
    assert changed == {"dispatched_job"}
    return outcome.refused


async def test_a_circle_through_a_cluster_is_refused(pool: ClusterPool) -> None:
    graph = [derivation("a"), derivation("between", "a"), derivation("b", "between")]
    reason = await refused_batch(pool, *graph, clusters=[cluster("a", "b")])
    assert reason == (
        "cluster 'group': its member 'a' would have to end before another member could start,"
        " and they start together"
    )


async def test_two_clusters_that_need_each_other_are_refused(pool: ClusterPool) -> None:
    await pool.with_cluster(
        *members("a1"), *members("b2"), derivation("b1", "a1"), cluster=cluster("b1", "b2", name="first")
    )
    # The first waits for a1; the second would hold a1 back until b2 is there.
    later = derivation("a2", "b2")
    reason = await refused_batch(pool, *members("a1"), later, clusters=[cluster("a1", "a2", name="second")])
    assert "start together" in reason


async def test_what_needs_a_helper_is_refused(pool: ClusterPool) -> None:
    reason = await refused_batch(
        pool, *members("a", "b"), derivation("top", "b"), clusters=[cluster("a", "b", primary="a")]
    )
    assert reason == "'top' needs 'b', which is a helper of the primary of cluster 'group'"
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b", primary="a"))
    assert "'late' needs 'b'" in await refused_batch(pool, derivation("late", "b"))


async def test_a_member_of_another_cluster_is_refused(pool: ClusterPool) -> None:
    await pool.with_cluster(*members("a", "b"), cluster=cluster("a", "b"))
    reason = await refused_batch(pool, *members("a", "c"), clusters=[cluster("a", "c", name="other")])
    assert reason == "cluster 'other': its member 'a' is in a cluster already"


async def test_two_members_on_one_worker_are_refused_by_id_and_by_name(pool: ClusterPool) -> None:
    worker = await pool.worker("host")
    name = worker.removeprefix("worker-")
    reason = await refused_batch(
        pool, *members("a", "b"), clusters=[cluster("a", "b", pins={"a": worker, "b": name})]
    )
    assert reason == f"cluster 'group': two members are pinned to {name!r}"


async def test_members_and_what_needs_them_are_never_left_out_of_a_walk(pool: ClusterPool) -> None:
    graph = [derivation("base"), derivation("a", "base"), *members("b"), derivation("top", "a")]
    await pool.with_cluster(*graph, cluster=cluster("a", "b"))
    paths = [store_path(f"{name}.drv") for name in ("base", "a", "b", "top")]
    known = await pool.database.read(lambda c: known_derivations(c, paths))
    assert known == [store_path("base.drv")]
    # So does what comes later, by the stored mark.
    await pool.evaluate(await pool.submit(), [derivation("later", "top")])
    assert await pool.database.read(lambda c: known_derivations(c, [store_path("later.drv")])) == []


# By HTTP


async def test_builds_and_evaluations_that_wait_become_a_cluster(pool: ClusterPool) -> None:
    await pool.evaluate(await pool.submit(), members("a", "b"))
    evaluation = await pool.submit()
    specs = [
        *await seats(pool, "ab", primary="a"),
        MemberSpec(job_key=f"eval:{evaluation}", role="walk", pin="host"),
    ]
    submitted = await submit(pool, *specs, same_zone=True, retry_budget=3)
    assert submitted.refused is None
    [info] = await pool.infos()
    assert info.id == submitted.cluster_id
    assert (info.same_zone, info.retry_budget, info.name) == (True, 3, "group")
    assert [(m.job_key, m.role, m.index, m.primary, m.pin) for m in info.members] == [
        (specs[0].job_key, "node", 0, True, None),
        (specs[1].job_key, "node", 1, False, None),
        (specs[2].job_key, "walk", 0, False, "host"),
    ]
    assert [event.cluster for event in submitted.events if isinstance(event, ClusterQueued)] == [info]
    told = [event.job for event in submitted.events if isinstance(event, JobQueued)]
    assert {job.cluster for job in told} == {info.id}
    assert len(told) == 3
    for spec in specs:
        assert await pool.claim(spec.job_key) is None
    await pool.start_group()


async def test_refusals_are_one_line_each_and_store_nothing(pool: ClusterPool) -> None:
    await pool.evaluate(
        await pool.submit(), [*members("a", "b", "run"), derivation("mid", "a"), derivation("top", "mid")]
    )
    await pool.evaluate(await pool.submit(project="other"), members("theirs"))
    running = await pool.submit()
    await pool.claim(f"eval:{running}")
    await pool.claim(await pool.key("run"))
    a, b, run, mid, top, theirs = await seats(pool, ("a", "b", "run", "mid", "top", "theirs"))
    before = await pool.database.read(dump)

    async def refused(*specs: MemberSpec, **fields: object) -> str:
        submission = await submit(pool, *specs, **fields)
        assert submission.cluster_id is None
        assert not submission.events
        assert submission.refused is not None
        assert "\n" not in submission.refused
        return submission.refused

    def node(job_key: str, **fields: object) -> MemberSpec:
        return MemberSpec(job_key=job_key, role="node", **fields)  # type: ignore[arg-type]  # fields of a spec

    assert await refused(a, node("build:none")) == "there is no build none"
    assert await refused(a, node("eval:none")) == "there is no evaluation none"
    assert "write eval:ID or build:ID" in await refused(a, node("nonsense"))
    assert "has started already" in await refused(a, run)
    assert "has started already" in await refused(a, node(f"eval:{running}"))
    assert "is not of this project" in await refused(a, theirs)
    assert "is named twice" in await refused(a, a)
    assert "1 to 1000 members" in await refused()
    assert (
        await refused(node(a.job_key, primary=True), node(b.job_key, primary=True))
        == "it has more than one primary"
    )
    assert "two members are pinned" in await refused(node(a.job_key, pin="x"), node(b.job_key, pin="x"))
    assert "start together" in await refused(a, mid)
    assert "start together" in await refused(a, top)
    helper = await refused(node(b.job_key, primary=True), a)
    assert helper == "'mid' needs 'a', which is to be a helper of the cluster's primary"
    assert "is no role" in await refused(a, MemberSpec(job_key=b.job_key, role="two words"))
    assert await pool.database.read(dump) == before
    assert (await submit(pool, b, top)).refused is None
    assert "already" in await refused(a, b)


async def test_a_claim_and_a_submission_that_meet_leave_no_member_alone(pool: ClusterPool) -> None:
    for turn in range(5):
        names = (f"a{turn}", f"b{turn}")
        await pool.evaluate(await pool.submit(), members(*names))
        specs = await seats(pool, names)
        claim = Claim(
            assignment_id=f"single-{turn}",
            job_key=specs[0].job_key,
            worker_id=await pool.worker("single"),
            instance_id="i",
        )
        asked = partial(
            submit_cluster,
            project=await pool.run(make_project),
            spec=ClusterSpec(name="group", members=specs),
            now=pool.clock.now(),
            ids=pool.ids,
        )
        claimed, submission = await race(
            pool, partial(claim_assignment, claim=claim, now=pool.clock.now()), asked
        )
        assert isinstance(submission, ClusterSubmission)
        assert bool(claimed) != (submission.refused is None)


# Members that are evaluations


async def walks(pool: ClusterPool, *, retry_budget: int = 1, primary: bool = False) -> list[str]:
    first, second = await pool.submit(), await pool.submit()
    submitted = await submit(
        pool,
        MemberSpec(job_key=f"eval:{first}", role="walk", primary=primary),
        MemberSpec(job_key=f"eval:{second}", role="walk"),
        retry_budget=retry_budget,
    )
    assert submitted.refused is None
    return [first, second]


async def test_evaluations_complete_together(pool: ClusterPool) -> None:
    first, second = await walks(pool)
    group = await pool.start_group()
    for evaluation in (first, second):
        key = f"eval:{evaluation}"
        await pool.batch(group.assignments[key], *members(f"of-{evaluation[-4:]}"), worker=f"on-{key}")
        await pool.complete(group.assignments[key], f"on-{key}")
    assert await pool.evaluation_status(first) == "Assigned"
    assert await pool.verdict(group) == "Complete"
    assert await pool.evaluation_status(first) == "Building"
    assert await pool.evaluation_status(second) == "Building"


@pytest.mark.parametrize("budget", [0, 1])
async def test_a_failed_evaluation_is_retried_with_the_others_or_fails_them(
    pool: ClusterPool, budget: int
) -> None:
    first, second = await walks(pool, retry_budget=budget)
    group = await pool.start_group()
    key = f"eval:{first}"
    await pool.fail(group.assignments[key], FailureKind.TRANSIENT, worker=f"on-{key}")
    assert await pool.verdict(group) == ("Retry" if budget else "Fail")
    wanted = ("Queued", "Queued") if budget else ("Failed", "Aborted")
    assert (await pool.evaluation_status(first), await pool.evaluation_status(second)) == wanted
    if budget:
        assert await pool.scalar("SELECT MAX(attempts) FROM evaluation") == 0
        assert {job.cluster for job in pool.queued.values()} == {await pool.cluster_id()}
        await pool.start_group()


async def test_a_canceled_evaluation_holds_its_waiting_cluster_back(pool: ClusterPool) -> None:
    first, second = await walks(pool)
    await pool.run(lambda c: abort_evaluation(c, first, now=pool.clock.now(), ids=pool.ids))
    assert await pool.cluster_status() == "Queued"
    assert await pool.evaluation_status(second) == "Queued"


async def test_a_canceled_evaluation_ends_a_running_attempt(pool: ClusterPool) -> None:
    first, second = await walks(pool)
    await pool.start_group()
    await pool.run(lambda c: abort_evaluation(c, first, now=pool.clock.now(), ids=pool.ids))
    assert await pool.attempts() == [("Aborted", True)]
    assert await pool.evaluation_status(second) == "Aborted"
    assert await pool.open_rows() == 0
