"""One evaluation from its submission to its end, and what two of them share."""

import pytest
from gradient_protocol.kinds import EvalStep, FailureKind
from gradient_protocol.messages.shapes import BuildJob, EvalJob, EvalStats, FetchResult, GitSource, PathSource
from gradient_server.domain.events import AssignmentClosed, BuildChanged, EvaluationChanged
from gradient_server.domain.job import eval_key
from gradient_server.graph.jobs import load_pending
from gradient_server.graph.known import known_derivations

from tests.fixtures.graph import store_path
from tests.integration.graph.pool import SOURCE, Pool, derivation, hash_of, output_path


async def test_a_graph_is_built_in_the_order_of_its_dependencies(pool: Pool) -> None:
    evaluation = await pool.submit()
    assert list(pool.queued) == [eval_key(evaluation)]
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    await pool.batch(assignment, derivation("a", sources=[SOURCE]), derivation("b", "a", attr="b"))
    # Streaming: what is ready starts before the walk is over.
    assert list(pool.queued) == [await pool.key("a")]
    await pool.batch(assignment, derivation("c", "a", "b", attr="c"))
    stats = EvalStats(derivations=3, known=0, wall_ms=5, cpu_ms=4)
    await pool.update(assignment, stats)
    await pool.complete(assignment)
    assert await pool.evaluation_status(evaluation) == "Building"
    await pool.build(await pool.key("a"))
    assert list(pool.queued) == [await pool.key("b")]
    await pool.build(await pool.key("b"), "w2")
    queued = pool.queued[await pool.key("c")]
    assert {required.path for required in queued.required_paths} == {output_path("a"), output_path("b")}
    assert queued.dependency_count == 2
    await pool.build(await pool.key("c"))
    assert await pool.evaluation_status(evaluation) == "Completed"
    assert pool.seen(EvaluationChanged)[-1] == EvaluationChanged(evaluation, "Completed")
    assert not pool.queued
    assert len(pool.seen(AssignmentClosed)) == 4
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_metric") == 3
    assert await pool.scalar("SELECT COUNT(*) FROM build_attempt WHERE outcome = 'Completed'") == 3
    assert await pool.scalar("SELECT derivations FROM evaluation_metric") == 3
    assert await pool.scalar("SELECT COUNT(*) FROM dispatched_job WHERE finished_at IS NULL") == 0
    done = [change for change in pool.seen(BuildChanged) if change.status == "Completed"]
    assert [(change.name, change.attr) for change in done] == [("a", None), ("b", "b"), ("c", "c")]
    assert all(change.evaluations == (evaluation,) and change.worker for change in done)


async def test_a_job_names_the_runtime_closure_of_its_inputs(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(
        evaluation, [derivation("a"), derivation("b", "a"), derivation("c", "b", sources=[SOURCE])]
    )
    await pool.build(await pool.key("a"))
    await pool.build(await pool.key("b"), references=[output_path("a"), output_path("b")])
    queued = pool.queued[await pool.key("c")]
    closure = {SOURCE, output_path("a"), output_path("b")}
    assert {required.path for required in queued.required_paths} == closure
    assert {required.nar_size for required in queued.required_paths} == {100}
    job = await pool.job(await pool.key("c"))
    assert isinstance(job, BuildJob)
    assert [(each.path, each.name, each.output) for each in job.inputs] == [
        (output_path("b"), "b", "out"),
        (SOURCE, "source", None),
        (output_path("a"), None, None),
    ]
    assert job.inputs[0].nar_hash == hash_of(output_path("b"))
    assert set(job.inputs[0].references) == {output_path("a"), output_path("b")}
    assert (job.project, job.timeout_secs, job.max_silent_secs) == ("demo", 14_400.0, 3_600.0)


async def test_a_build_is_made_once_for_two_evaluations(pool: Pool) -> None:
    first, second = await pool.submit(), await pool.submit(project="other")
    await pool.evaluate(first, [derivation("a"), derivation("b", "a")])
    await pool.evaluate(second, [derivation("a"), derivation("c", "a")])
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_build") == 3
    assert set(pool.queued[await pool.key("a")].projects) == {"project-demo", "project-other"}
    await pool.build(await pool.key("a"))
    await pool.build(await pool.key("b"))
    assert await pool.evaluation_status(first) == "Completed"
    assert await pool.evaluation_status(second) == "Building"
    await pool.build(await pool.key("c"))
    assert await pool.evaluation_status(second) == "Completed"


async def test_what_succeeded_is_not_built_again(pool: Pool) -> None:
    graph = [derivation("a"), derivation("b", "a", attr="b")]
    first = await pool.submit()
    await pool.evaluate(first, graph)
    await pool.build(await pool.key("a"))
    await pool.build(await pool.key("b"))
    second = await pool.submit()
    known = await pool.run(lambda c: known_derivations(c, [each.drv_path for each in graph] + ["nonsense"]))
    assert known == sorted(each.drv_path for each in graph)
    # The walk was pruned: only the root is reported, and the server adds what is below.
    await pool.evaluate(second, [graph[1]])
    assert await pool.evaluation_status(second) == "Completed"
    assert await pool.scalar("SELECT COUNT(*) FROM build_job WHERE evaluation = :id", id=second) == 2
    assert not pool.queued


async def test_what_failed_for_good_is_tried_again_when_asked_for_again(pool: Pool) -> None:
    graph = [derivation("a"), derivation("b", "a")]
    first = await pool.submit()
    await pool.evaluate(first, graph)
    failed = await pool.claim(await pool.key("a"))
    assert failed is not None
    await pool.fail(failed, FailureKind.PERMANENT)
    assert await pool.statuses() == {"a": "Failed", "b": "DependencyFailed"}
    assert await pool.evaluation_status(first) == "Failed"
    assert (
        await pool.scalar("SELECT error FROM evaluation WHERE id = :id", id=first) == "2 of 2 builds failed"
    )
    second = await pool.submit()
    await pool.evaluate(second, graph)
    await pool.build(await pool.key("a"))
    await pool.build(await pool.key("b"))
    assert await pool.evaluation_status(second) == "Completed"
    assert await pool.evaluation_status(first) == "Failed"
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_build") == 4


async def test_outputs_that_the_store_lost_are_made_again_on_request(pool: Pool) -> None:
    graph = [derivation("a"), derivation("b", "a")]
    await pool.evaluate(await pool.submit(), graph)
    await pool.build(await pool.key("a"))
    await pool.build(await pool.key("b"))
    await pool.scalar("DELETE FROM cached_path WHERE path = :path RETURNING path", path=output_path("a"))
    second = await pool.submit()
    await pool.evaluate(second, graph)
    assert await pool.statuses() == {"a": "Queued", "b": "Completed"}
    await pool.build(await pool.key("a"))
    assert await pool.evaluation_status(second) == "Completed"
    assert await pool.scalar("SELECT COUNT(*) FROM derivation_build") == 2


async def test_a_runtime_only_input_holds_the_evaluation_back_and_not_the_build(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("helper"), derivation("a", runtime_only=["helper"])])
    assert set(pool.queued) == {await pool.key("a"), await pool.key("helper")}
    await pool.build(await pool.key("a"))
    assert await pool.evaluation_status(evaluation) == "Building"
    helper = await pool.claim(await pool.key("helper"))
    assert helper is not None
    await pool.fail(helper, FailureKind.PERMANENT)
    assert await pool.statuses() == {"a": "Completed", "helper": "Failed"}
    assert await pool.evaluation_status(evaluation) == "Failed"


async def test_a_dependency_that_failed_while_the_walk_went_on(pool: Pool) -> None:
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    await pool.batch(assignment, derivation("a"))
    build = await pool.claim(await pool.key("a"), "w2")
    assert build is not None
    await pool.fail(build, FailureKind.PERMANENT, worker="w2")
    await pool.batch(assignment, derivation("b", "a"), derivation("c", "b"))
    assert await pool.statuses() == {"a": "Failed", "b": "DependencyFailed", "c": "DependencyFailed"}
    assert await pool.evaluation_status(evaluation) == "Assigned"
    await pool.complete(assignment)
    assert await pool.evaluation_status(evaluation) == "Failed"


async def test_an_evaluation_with_errors_fails_once_its_job_completed(pool: Pool) -> None:
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    await pool.batch(assignment, derivation("a"), errors=["gradient.toml:3: no"])
    assert await pool.evaluation_status(evaluation) == "Assigned"
    await pool.complete(assignment)
    assert await pool.evaluation_status(evaluation) == "Failed"
    assert await pool.scalar("SELECT error FROM evaluation") == "gradient.toml:3: no"
    assert await pool.statuses() == {"a": "Aborted"}
    assert not pool.queued


async def test_an_empty_graph_is_complete(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [])
    assert await pool.evaluation_status(evaluation) == "Completed"


@pytest.mark.parametrize("split", [True, False])
async def test_a_git_source_is_fetched_in_one_job_or_in_two(pool: Pool, split: bool) -> None:
    evaluation = await pool.submit(source=GitSource(url="https://example.org/x"))
    key = eval_key(evaluation)
    assert pool.queued[key].steps == (EvalStep.FETCH, EvalStep.EVALUATE)
    assignment = await pool.claim(key)
    assert assignment is not None
    job = await pool.job(key, [EvalStep.FETCH] if split else None)
    assert isinstance(job, EvalJob)
    assert job.source == GitSource(url="https://example.org/x")
    fetched = FetchResult(path=SOURCE, nar_hash=hash_of(SOURCE), nar_size=100, rev="abc")
    await pool.update(assignment, fetched)
    await pool.hold(SOURCE)
    if split:
        assert job.steps == [EvalStep.FETCH]
        await pool.complete(assignment)
        assert await pool.evaluation_status(evaluation) == "Queued"
        assert pool.queued[key].steps == (EvalStep.EVALUATE,)
        assignment = await pool.claim(key, "w2")
        assert assignment is not None
        followed = await pool.job(key)
        assert isinstance(followed, EvalJob)
        assert (followed.steps, followed.source) == ([EvalStep.EVALUATE], PathSource(path=SOURCE))
    worker = "w2" if split else "w1"
    await pool.batch(assignment, derivation("a", sources=[SOURCE]), worker=worker)
    await pool.complete(assignment, worker)
    await pool.build(await pool.key("a"))
    assert await pool.evaluation_status(evaluation) == "Completed"


async def test_a_split_fetch_whose_source_never_arrived_is_tried_again(pool: Pool) -> None:
    evaluation = await pool.submit(source=GitSource(url="https://example.org/x"))
    key = eval_key(evaluation)
    assignment = await pool.claim(key)
    assert assignment is not None
    await pool.job(key, [EvalStep.FETCH])
    await pool.complete(assignment)
    assert await pool.evaluation_status(evaluation) == "Queued"
    assert pool.queued[key].not_before == pool.clock.now() + 30


async def test_a_build_waits_for_its_source_and_fails_if_it_never_comes(pool: Pool) -> None:
    other = store_path("other-source")
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    await pool.batch(assignment, derivation("a", sources=[other]), derivation("b", sources=[SOURCE]))
    assert await pool.statuses() == {"a": "Created", "b": "Queued"}
    await pool.complete(assignment)
    assert await pool.statuses() == {"a": "Failed", "b": "Queued"}
    await pool.build(await pool.key("b"))
    assert await pool.evaluation_status(evaluation) == "Failed"


async def test_a_task_with_a_limit_lets_the_next_evaluation_in_when_one_ends(pool: Pool) -> None:
    first = await pool.submit()
    await pool.scalar("UPDATE task SET max_concurrent_evaluations = 1 RETURNING id")
    pool.clock.advance(1)
    second = await pool.submit()
    pool.clock.advance(1)
    third = await pool.submit()
    assert list(pool.queued) == [eval_key(first)]
    waiting = await pool.run(lambda c: load_pending(c, None, pool.clock.now()))
    assert [job.job_id for job in waiting] == [eval_key(first)]
    await pool.evaluate(first, [])
    assert list(pool.queued) == [eval_key(second)]
    failed = await pool.claim(eval_key(second))
    assert failed is not None
    await pool.fail(failed, FailureKind.PERMANENT)
    assert list(pool.queued) == [eval_key(third)]


async def test_load_pending_gives_all_that_waits_and_what_is_named(pool: Pool) -> None:
    first, second = await pool.submit(), await pool.submit(prioritized=True)
    await pool.evaluate(first, [derivation("a"), derivation("b", "a")])
    everything = await pool.run(lambda c: load_pending(c, None, pool.clock.now()))
    assert {job.job_id for job in everything} == {eval_key(second), await pool.key("a")}
    assert {job.job_id: job for job in everything} == pool.queued
    named = await pool.run(lambda c: load_pending(c, [eval_key(second), eval_key(first)], pool.clock.now()))
    assert [job.job_id for job in named] == [eval_key(second)]
    assert named[0].prioritized
