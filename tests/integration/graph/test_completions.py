"""Builds that end together: the same rows as one by one, and whatever is not ordinary left alone."""

from typing import Any

import pytest
import sqlalchemy as sa
from gradient_protocol.kinds import SpanKind
from gradient_protocol.messages.shapes import BuildOutput, BuildProduct, BuiltOutput, Span
from gradient_protocol.messages.worker import JobCompleted, JobUpdate
from gradient_server.domain.events import AssignmentClosed, BuildChanged, JobQueued
from gradient_server.graph.completions import Completion, complete_together

from tests.integration.graph.pool import INSTANCE, Pool, derivation, hash_of, metrics, output_path

SPANS = [Span(kind=SpanKind.BUILD, start=1.0, end=2.0)]
TABLES = {
    "dispatched_job": "derivation_build",
    "build_attempt": "build",
    "derivation_build": "id",
    "build_job": "build",
}
# Ids, and what is a different row's by its nature.
NOT_COMPARED = {
    "id",
    "job_key",
    "derivation_build",
    "derivation",
    "assignment",
    "build",
    "worker",
    "created_at",
}


def reports_of(name: str, assignment: str) -> tuple[JobUpdate, JobCompleted]:
    built = BuiltOutput(
        name="out",
        path=output_path(name),
        nar_hash=hash_of(f"as {name} was built"),
        nar_size=7,
        references=[],
        contains_store_dir=True,
    )
    product = BuildProduct(output="out", path="x.txt", type="file", name="x", size=1)
    update = BuildOutput(
        outputs=[built], products=[product], substituted=False, metrics=metrics(peak_ram_mb=5)
    )
    return (
        JobUpdate(assignment_id=assignment, seq=1, update=update),
        JobCompleted(assignment_id=assignment, seq=2, spans=SPANS, spans_dropped=1),
    )


async def claimed(pool: Pool, name: str, worker: str, *, accept: bool = True) -> str:
    assignment = await pool.claim(await pool.key(name), worker, accept=accept)
    assert assignment is not None
    return assignment


async def together(pool: Pool, *completions: Completion) -> list[Any]:
    return await pool.run(
        lambda c: complete_together(
            c, completions, instance_id=INSTANCE, now=pool.clock.now(), ids=pool.ids, settings=pool.settings
        )
    )


async def completion(pool: Pool, name: str, worker: str, *, accepted: bool = False) -> Completion:
    assignment = await claimed(pool, name, worker, accept=not accepted)
    return Completion(assignment, await pool.worker(worker), accepted, *reports_of(name, assignment))


async def rows_of(pool: Pool, name: str) -> dict[str, dict[str, Any]]:
    """What is stored of the end of a build, without ids and links."""
    build = await pool.build_id(name)

    def read(connection: sa.Connection) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for table, column in TABLES.items():
            row = connection.execute(sa.text(f"SELECT * FROM {table} WHERE {column} = :id"), {"id": build})
            found[table] = dict(row.mappings().one())
        of_derivation = {"id": found["derivation_build"]["derivation"]}
        output = sa.text(
            "SELECT nar_hash, nar_size, contains_store_dir FROM derivation_output WHERE derivation = :id"
        )
        found["output"] = dict(connection.execute(output, of_derivation).mappings().one())
        metric = sa.text("SELECT peak_ram_mb, output_nar_size FROM derivation_metric WHERE derivation = :id")
        found["metric"] = dict(connection.execute(metric, of_derivation).mappings().one())
        of_assignment = {"id": found["dispatched_job"]["id"]}
        span = sa.text("SELECT kind, start FROM span WHERE assignment = :id")
        found["span"] = dict(connection.execute(span, of_assignment).mappings().one())
        return {
            table: {column: value for column, value in row.items() if column not in NOT_COMPARED}
            for table, row in found.items()
        }

    return await pool.run(read)


@pytest.fixture
async def graph(pool: Pool) -> Pool:
    """Four builds that can start, their outputs held under one hash, and one that needs two of them."""
    evaluation = await pool.submit()
    await pool.evaluate(
        evaluation,
        [derivation("a"), derivation("b"), derivation("c"), derivation("d"), derivation("needs", "a", "b")],
    )
    for name in "abcd":
        await pool.hold(output_path(name), nar_hash=hash_of("as it is held"))
    return pool


async def test_the_rows_are_those_of_reports_applied_one_by_one(graph: Pool) -> None:
    alone = await claimed(graph, "a", "w1")
    for report in reports_of("a", alone):
        await graph.report(report, "w1")
    done = await together(graph, await completion(graph, "b", "w2"), await completion(graph, "c", "w3"))
    assert None not in done
    expected = await rows_of(graph, "a")
    assert expected["dispatched_job"]["status"] == "Completed"
    assert expected["output"]["nar_hash"] == hash_of("as it is held")
    assert await rows_of(graph, "b") == expected
    assert await rows_of(graph, "c") == expected


async def test_what_follows_is_told_once_and_each_assignment_is_closed_by_its_own(graph: Pool) -> None:
    first = await completion(graph, "a", "w1", accepted=True)
    second = await completion(graph, "b", "w2")
    done = await together(graph, first, second)
    [closed] = done[1]
    assert isinstance(closed, AssignmentClosed)
    assert closed.assignment_id == second.assignment_id
    changed = [event for event in done[0] if isinstance(event, BuildChanged) and event.status == "Completed"]
    assert [event.name for event in changed] == ["a", "b"]
    assert len({event.worker for event in changed}) == 2
    assert [event.job.name for event in done[0] if isinstance(event, JobQueued)] == ["needs"]
    accepted = "SELECT accepted_at IS NOT NULL FROM dispatched_job WHERE id = :id"
    assert await graph.scalar(accepted, id=first.assignment_id)


async def test_what_is_not_ordinary_is_left_alone_and_changes_nothing(graph: Pool) -> None:
    ordinary = await completion(graph, "a", "w1")
    lacking = await completion(graph, "b", "w2")
    await graph.run(
        lambda c: c.execute(sa.text("DELETE FROM cached_path WHERE path = :p"), {"p": output_path("b")})
    )
    gap = await completion(graph, "c", "w3")
    gap = Completion(gap.assignment_id, gap.worker_id, accepted=False, output=None, final=gap.final)
    foreign = await completion(graph, "d", "w4")
    foreign = Completion(foreign.assignment_id, ordinary.worker_id, False, foreign.output, foreign.final)
    wrong = JobUpdate(
        assignment_id=lacking.assignment_id,
        seq=1,
        update=BuildOutput(outputs=[], products=[], substituted=False),
    )
    refused = Completion(lacking.assignment_id, lacking.worker_id, False, wrong, lacking.final)
    done = await together(graph, lacking, ordinary, gap, foreign)
    assert [events is not None for events in done] == [False, True, False, False]
    assert await together(graph, refused) == [None]
    # Nor is one that has ended already.
    assert await together(graph, ordinary) == [None]
    statuses = await graph.statuses()
    assert {name: statuses[name] for name in "abcd"} == {
        "a": "Completed",
        "b": "Assigned",
        "c": "Assigned",
        "d": "Assigned",
    }
    assert (
        await graph.scalar("SELECT COUNT(*) FROM dispatched_job WHERE last_seq > 0 AND finished_at IS NULL")
        == 0
    )
    assert await graph.scalar("SELECT COUNT(*) FROM derivation_output WHERE nar_hash IS NOT NULL") == 1
