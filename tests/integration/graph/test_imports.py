"""Imports: an evaluation that reads what a build made."""

from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.worker import ImportRequest
from gradient_server.domain.events import ImportSettled
from gradient_server.domain.job import eval_key
from gradient_server.graph.imports import request_import

from tests.fixtures.graph import store_path
from tests.integration.graph.pool import Pool, derivation, output_path


async def ask(pool: Pool, assignment: str, *paths: str, query: str = "q1", worker: str = "w1") -> None:
    worker_id = await pool.worker(worker)
    request = ImportRequest(query_id=query, assignment_id=assignment, paths=list(paths))
    pool.publish(
        await pool.run(
            lambda c: request_import(c, request, worker_id=worker_id, now=pool.clock.now(), ids=pool.ids)
        )
    )


async def walking(pool: Pool) -> str:
    """An assignment whose evaluation has reported b on a, and c."""
    evaluation = await pool.submit()
    assignment = await pool.claim(eval_key(evaluation))
    assert assignment is not None
    await pool.batch(assignment, derivation("a"), derivation("b", "a"), derivation("c"))
    return assignment


async def test_an_import_is_answered_once_every_path_is_built(pool: Pool) -> None:
    assignment = await walking(pool)
    await ask(pool, assignment, output_path("b"), output_path("c"))
    assert not pool.seen(ImportSettled)
    assert {pool.queued[key].ifd for key in (await pool.key("a"), await pool.key("c"))} == {True}
    await pool.build(await pool.key("c"), "w2")
    await pool.build(await pool.key("a"), "w2")
    assert pool.queued[await pool.key("b")].ifd
    await pool.build(await pool.key("b"), "w2")
    worker_id = await pool.worker("w1")
    paths = tuple(sorted((output_path("b"), output_path("c"))))
    assert pool.seen(ImportSettled) == [ImportSettled("q1", assignment, worker_id, paths, ())]
    await pool.complete(assignment)
    assert await pool.scalar("SELECT COUNT(*) FROM import_request") == 0


async def test_an_import_of_what_is_there_is_answered_at_once(pool: Pool) -> None:
    assignment = await walking(pool)
    await pool.build(await pool.key("c"), "w2")
    await ask(pool, assignment, output_path("c"))
    assert [event.ready for event in pool.seen(ImportSettled)] == [(output_path("c"),)]


async def test_an_import_that_fails_says_why(pool: Pool) -> None:
    assignment = await walking(pool)
    await ask(pool, assignment, output_path("b"), store_path("nobody"))
    failing = await pool.claim(await pool.key("a"), "w2")
    assert failing is not None
    await pool.fail(failing, FailureKind.PERMANENT, worker="w2")
    answer = pool.seen(ImportSettled)[0]
    assert answer.ready == ()
    assert dict(answer.failed) == {
        output_path("b"): "it needs a, which failed",
        store_path("nobody"): f"no build of this evaluation makes {store_path('nobody')}",
    }
    await ask(pool, assignment, output_path("b"), query="q2")
    assert dict(pool.seen(ImportSettled)[1].failed) == {output_path("b"): "it needs a, which failed"}


async def test_an_import_whose_output_was_lost_has_it_made_again(pool: Pool) -> None:
    assignment = await walking(pool)
    await pool.build(await pool.key("c"), "w2")
    await pool.scalar("DELETE FROM cached_path WHERE path = :path RETURNING path", path=output_path("c"))
    await ask(pool, assignment, output_path("c"))
    assert not pool.seen(ImportSettled)
    await pool.build(await pool.key("c"), "w2")
    assert [event.ready for event in pool.seen(ImportSettled)] == [(output_path("c"),)]


async def test_only_the_holder_is_answered(pool: Pool) -> None:
    assignment = await walking(pool)
    await ask(pool, assignment, output_path("c"), worker="w2")
    await pool.build(await pool.key("c"), "w2")
    assert not pool.seen(ImportSettled)


async def test_a_session_that_asks_again_is_answered_under_its_new_query(pool: Pool) -> None:
    assignment = await walking(pool)
    await ask(pool, assignment, output_path("c"))
    await ask(pool, assignment, output_path("c"), query="q2")
    await pool.build(await pool.key("c"), "w2")
    assert [event.query_id for event in pool.seen(ImportSettled)] == ["q1", "q2"]
