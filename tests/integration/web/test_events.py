from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa
import trio
from gradient_protocol.kinds import EvalStage, JobKind, JobStage
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.shapes import EvalResult, EvalStageUpdate, Stage
from gradient_server.db.queries.registry import SERVER_PEER
from gradient_server.db.tables import evaluation as evaluation_table
from gradient_server.domain.events import BuildChanged, EvaluationChanged, LogGrew, NoteAdded
from gradient_server.domain.status import BuildStatus, EvaluationStatus
from gradient_server.web import events
from gradient_server.web.evaluation_views import EvaluationSnapshot
from gradient_server.web.hub import MAX_QUEUED

from tests.fakes.worker import connected_worker
from tests.fixtures.derivations import derivation
from tests.fixtures.graph import make_build, make_evaluation, want
from tests.integration.web.conftest import Json, Site

# The client's own generators, where a reader leaves before the end.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning")

Events = AsyncIterator[tuple[str, Json]]


async def building(site: Site) -> tuple[str, str]:
    """An evaluation with one build that waits."""

    def graph(connection: sa.Connection) -> tuple[str, str]:
        evaluation = make_evaluation(connection, status=EvaluationStatus.BUILDING)
        build = make_build(connection, status=BuildStatus.QUEUED)
        want(connection, evaluation, build)
        return evaluation, build

    return await site.services.database.run(graph)


async def complete(site: Site, evaluation: str) -> None:
    """As its last build's report does."""

    def end(connection: sa.Connection) -> tuple[None, list[Any]]:
        wanted = evaluation_table.c.id == evaluation
        connection.execute(
            evaluation_table.update().where(wanted).values(status="Completed", finished_at=1.0)
        )
        return None, [EvaluationChanged(evaluation, "Completed")]

    await site.services.transact(end)


async def next_event(stream: Events) -> tuple[str, Json]:
    with trio.fail_after(10):
        return await anext(stream)


async def rest(stream: Events) -> list[tuple[str, Json]]:
    with trio.fail_after(10):
        return [event async for event in stream]


async def until_nobody_watches(site: Site) -> None:
    with trio.fail_after(10):
        while site.web.hub.count:
            await trio.sleep(0.02)


async def test_a_snapshot_then_what_happens_then_the_end(site: Site) -> None:
    evaluation, build = await building(site)
    async with site.events(evaluation) as stream:
        name, snapshot = await next_event(stream)
        assert (name, snapshot["id"], snapshot["status"]) == ("snapshot", evaluation, "Building")
        assert EvaluationSnapshot.model_validate(snapshot, strict=True).model_dump() == snapshot
        assert [one["id"] for one in snapshot["builds"]] == [build]
        site.services.bus.publish(
            [
                BuildChanged(build, (evaluation,), "b-1", "Failed", "host", "exit status 1", "b"),
                BuildChanged("other", ("other",), "b-1", "Failed"),
                NoteAdded(evaluation, "warning", "look", "gradient.toml:1", stored=False),
                NoteAdded(evaluation, "warning", "look", "gradient.toml:1"),
            ]
        )
        assert await next_event(stream) == (
            "build",
            {"id": build, "name": "b-1", "attr": "b", "status": "Failed", "worker": "host",
             "error": "exit status 1"},
        )  # fmt: skip
        assert await next_event(stream) == (
            "note",
            {"level": "warning", "source": "gradient.toml:1", "message": "look"},
        )
        await complete(site, evaluation)
        assert await rest(stream) == [("evaluation", {"status": "Completed", "error": None})]
    await until_nobody_watches(site)


async def next_named(stream: Events, wanted: str) -> Json:
    """The next event of this name."""
    with trio.fail_after(10):
        while True:
            name, data = await anext(stream)
            if name == wanted:
                return data


async def test_progress_that_a_worker_tells_is_seen_wherever_its_jobs_are_shown(site: Site) -> None:
    evaluation = await site.pool.submit()
    registered = await site.pool.register("anvil")
    known = {"worker_id": registered.worker_id, "tokens": {SERVER_PEER: registered.token}}
    async with (
        connected_worker(await site.pool.stream(), **known) as worker,
        site.events(evaluation) as stream,
    ):
        await next_named(stream, "snapshot")  # what it says is not said again by an event
        job = await worker.accept(JobKind.EVAL)
        eval_id = job.assignment_id
        walking = EvalStageUpdate(stage=EvalStage.EVALUATING_DERIVATIONS)
        worker.send(w.JobUpdate(assignment_id=eval_id, update=walking))
        worker.send(w.EvalProgress(assignment_id=eval_id, done=1, total=2))
        told = {"worker": "anvil", "stage": "EvaluatingDerivations", "done": 1, "total": 2}
        while await next_named(stream, "evaluating") != told:
            pass
        shown = (await site.reader.get(f"/evaluations/{evaluation}")).json()
        assert shown["evaluating"] == told
        only = derivation("only-1", attr="only")
        worker.report(eval_id, 1, EvalResult(derivations=[only], clusters=[], warnings=[], errors=[]))
        worker.complete(eval_id, 2)

        build = await worker.accept(JobKind.BUILD)
        build_id = build.assignment_id
        while (told := await next_named(stream, "build"))["status"] != "Assigned":
            pass
        # Another evaluation that joins it does not know by whom it is built.
        site.services.bus.publish([BuildChanged(told["id"], (evaluation,), "only-1", "Assigned")])
        assert await next_named(stream, "build") == told
        worker.send(w.JobUpdate(assignment_id=build_id, update=Stage(stage=JobStage.PREFETCH)))
        worker.send(w.BuildProgress(assignment_id=build_id, done=3, total=12))
        while (stage := await next_named(stream, "stage"))["total"] is None:
            pass
        assert (stage["stage"], stage["done"], stage["total"]) == ("Prefetch", 3, 12)
        job_key = f"build:{stage['id']}"
        (status,) = (await site.reader.get("/status")).json()["workers"]
        assert status["jobs"] == [
            {"job": job_key, "name": "only-1", "kind": "Build", "stage": "Prefetch", "done": 3, "total": 12}
        ]
        assert "Prefetch 3 of 12" in (await site.reader.get(f"{site.url}/board")).text
        # What the next stage counts is not known yet.
        worker.send(w.JobUpdate(assignment_id=build_id, update=Stage(stage=JobStage.BUILD)))
        stage = await next_named(stream, "stage")
        assert (stage["stage"], stage["done"], stage["total"]) == ("Build", None, None)
        shown = (await site.reader.get(f"/jobs/{job_key}")).json()
        assert (shown["stage"], shown["done"]) == ("Build", None)


async def test_one_that_has_ended_says_so_and_ends(site: Site) -> None:
    evaluation = await site.pool.submit()
    await site.client.post(f"/evaluations/{evaluation}/abort")
    async with site.events(evaluation) as stream:
        (first, snapshot), last = await rest(stream)
    assert (first, snapshot["status"]) == ("snapshot", "Aborted")
    assert last == ("evaluation", {"status": "Aborted", "error": "aborted on request"})


async def test_the_last_line_of_a_log_that_grew(site: Site) -> None:
    evaluation, build = await building(site)
    async with site.events(evaluation) as stream:
        await next_event(stream)
        size = site.services.logs.append("a1", 0, b"one\ntwo\nthr", compressed=False)
        site.services.bus.publish([LogGrew("a1", f"build:{build}", size)])
        name, data = await next_event(stream)
        assert (name, data["job"], data["line"]) == ("log", f"build:{build}", "two")


async def test_a_reader_that_does_not_read_gets_a_snapshot_instead_of_what_it_missed(site: Site) -> None:
    evaluation, build = await building(site)
    async with site.events(evaluation) as stream:
        await next_event(stream)
        # All at once, so that no reader could keep up.
        flood = [NoteAdded(evaluation, "warning", str(number)) for number in range(MAX_QUEUED + 1)]
        site.services.bus.publish(flood)
        assert (await next_event(stream))[0] == "snapshot"
        site.services.bus.publish([BuildChanged(build, (evaluation,), "b-1", "Completed")])
        assert (await next_event(stream))[0] == "build"


async def test_whoever_leaves_is_forgotten(site: Site) -> None:
    evaluation, _ = await building(site)
    async with site.events(evaluation) as stream:
        await next_event(stream)
        assert site.web.hub.count == 1
    await until_nobody_watches(site)


async def test_the_servers_stop_ends_the_stream(site: Site) -> None:
    evaluation, _ = await building(site)
    async with site.events(evaluation) as stream:
        await next_event(stream)
        site.services.draining.set()
        assert await rest(stream) == []


async def test_an_end_that_was_not_heard_of_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_SECS", 0.2)
    evaluation, _ = await building(site)
    async with site.events(evaluation) as stream:
        await next_event(stream)
        wanted = evaluation_table.c.id == evaluation
        ended = evaluation_table.update().where(wanted).values(status="Failed", finished_at=1.0, error="lost")
        await site.services.database.run(lambda connection: connection.execute(ended))
        (name, snapshot), last = await rest(stream)
    assert (name, snapshot["status"]) == ("snapshot", "Failed")
    assert last == ("evaluation", {"status": "Failed", "error": "lost"})


async def test_there_is_an_end_to_how_many_may_watch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation, _ = await building(site)
    monkeypatch.setattr("gradient_server.web.hub.MAX_WATCHERS", 0)
    answer = await site.reader.get(f"/evaluations/{evaluation}/events")
    assert answer.status_code == 503
    assert "error" in answer.json()
