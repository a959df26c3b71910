"""What the API shows."""

from gradient_protocol.kinds import FailureKind, JobKind
from gradient_protocol.messages.shapes import BuildProduct
from gradient_server.domain.job import build_key, eval_key
from gradient_server.graph.job_views import find_jobs, job_view
from gradient_server.graph.views import (
    evaluation_counts,
    evaluation_view,
    find_evaluations,
    list_evaluations,
)

from tests.integration.graph.pool import Pool, derivation, output_path


async def test_an_evaluation_is_shown_with_what_it_wants(pool: Pool) -> None:
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    await pool.batch(assignment, derivation("a"), derivation("b", "a", attr="b"), derivation("c", attr="c"))
    await pool.batch(assignment, errors=["careful"])
    await pool.build(await pool.key("a"), "w2")
    failing = await pool.claim(await pool.key("c"), "w3")
    assert failing is not None
    view = await pool.database.read(lambda c: evaluation_view(c, evaluation))
    assert view is not None
    summary = view.summary
    assert (summary.project, summary.task, summary.status) == ("demo", "main", "Assigned")
    assert summary.counts == {"Assigned": 1, "Completed": 1, "Queued": 1}
    shown = {build.name: build for build in view.builds}
    assert [build.status for build in view.builds] == ["Completed", "Queued", "Assigned"]
    assert shown["a"].worker is not None
    assert shown["a"].worker.startswith("w2")
    assert shown["b"].worker is None
    assert shown["c"].assignment == failing
    assert [(note.level, note.message) for note in view.notes] == [("error", "careful")]
    outputs = [(output.attr, output.path, output.nar_size) for output in view.outputs]
    assert outputs == [("b", output_path("b"), None), ("c", output_path("c"), None)]
    assert not view.truncated
    await pool.fail(failing, FailureKind.PERMANENT, worker="w3")
    await pool.complete(assignment)
    listed = await pool.database.read(lambda c: list_evaluations(c, None, 10))
    assert [(each.id, each.status, each.error) for each in listed] == [(evaluation, "Failed", "careful")]
    # What it no longer waits for is shown as it ended for it.
    assert listed[0].counts == {"Aborted": 1, "Completed": 1, "Failed": 1}
    assert await pool.database.read(lambda c: list_evaluations(c, "nobody", 10)) == []
    assert await pool.database.read(lambda c: find_evaluations(c, evaluation[:20])) == [evaluation]
    assert await pool.database.read(evaluation_counts) == {"Failed": 1}
    assert await pool.database.read(lambda c: evaluation_view(c, "nobody")) is None


async def test_a_job_is_shown_with_its_assignments(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a-1.0", pname="a"), derivation("b", "a-1.0")])
    key = await pool.key("a-1.0")
    first = await pool.claim(key)
    assert first is not None
    await pool.fail(first, FailureKind.CANCELED)
    pool.clock.advance(1)
    second = await pool.claim(key, "w2")
    assert second is not None
    product = BuildProduct(output="out", path="a.txt", type="file", name="a.txt")
    await pool.output(second, await pool.job(key), "w2", products=[product])
    view = await pool.database.read(lambda c: job_view(c, key))
    assert view is not None
    assert (view.kind, view.name, view.status) == (JobKind.BUILD, "a-1.0", "Assigned")
    assert (view.projects, view.evaluations) == (["demo"], [evaluation])
    assert [(attempt.assignment, attempt.outcome) for attempt in view.attempts] == [
        (second, None),
        (first, "Canceled"),
    ]
    assert view.products[0]["name"] == "a.txt"
    waiting = await pool.database.read(lambda c: job_view(c, build_key("nobody")))
    assert waiting is None
    b = await pool.key("b")
    waiting = await pool.database.read(lambda c: job_view(c, b))
    assert waiting is not None
    assert waiting.waits_for == ["a-1.0"]
    walked = await pool.database.read(lambda c: job_view(c, eval_key(evaluation)))
    assert walked is not None
    assert (walked.kind, walked.name, len(walked.attempts)) == (JobKind.EVAL, "demo/main", 1)


async def test_people_name_jobs_by_key_id_prefix_or_name(pool: Pool) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a-1.0", pname="a")])
    build = await pool.build_id("a-1.0")

    async def find(text: str) -> list[str]:
        return await pool.database.read(lambda c: find_jobs(c, text))

    for text in (build, f"build:{build}", f"build:{build[:20]}", "a", "a-1.0"):
        assert await find(text) == [build_key(build)]
    assert await find(f"eval:{evaluation}") == [eval_key(evaluation)]
    # Both were made in one second.
    assert set(await find(build[:8])) == {build_key(build), eval_key(evaluation)}
    for text in ("nobody", "build:", "eval:a", "b%", ""):
        assert await find(text) == []
