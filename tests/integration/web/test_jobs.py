import pytest
import sqlalchemy as sa
import trio
from gradient_server.db.tables import dispatched_job
from gradient_server.domain.events import JobQueued
from gradient_server.domain.status import AssignmentStatus, BuildStatus, EvaluationStatus
from gradient_server.graph.jobs import load_pending

from tests.fixtures.graph import assigned, make_build, make_derivation, make_evaluation, make_worker, want
from tests.integration.web.conftest import Site

# The client's own generators, where a reader leaves before the end.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning")


async def running(site: Site) -> tuple[str, str]:
    """A build that a worker has; its assignment."""

    def graph(connection: sa.Connection) -> tuple[str, str]:
        evaluation = make_evaluation(connection, status=EvaluationStatus.BUILDING)
        build = make_build(connection)
        want(connection, evaluation, build)
        return build, assigned(connection, worker=make_worker(connection, "host"), build=build)

    return await site.services.database.run(graph)


async def close(site: Site, assignment: str) -> None:
    ended = (
        dispatched_job.update()
        .where(dispatched_job.c.id == assignment)
        .values(status=AssignmentStatus.COMPLETED, finished_at=2.0)
    )
    await site.services.database.run(lambda connection: connection.execute(ended))


async def test_a_job_with_its_attempts(site: Site) -> None:
    build, assignment = await running(site)
    job = (await site.reader.get(f"/jobs/build:{build}")).json()
    assert (job["job"], job["kind"], job["status"], job["worker"]) == (
        f"build:{build}",
        "Build",
        "Assigned",
        "host",
    )
    (attempt,) = job["attempts"]
    assert (attempt["assignment"], attempt["worker"], attempt["outcome"]) == (assignment, "host", None)
    assert (await site.reader.get(f"/jobs/{job['name']}")).json() == job, "by its name"
    assert (await site.reader.get(f"/jobs/{build}")).json() == job, "by its id"


async def test_an_unknown_job_says_what_may_be_written(site: Site) -> None:
    for path in ("nothing", "nothing/why", "build:", "build:unknown/log", "x:y"):
        answer = await site.reader.get(f"/jobs/{path}")
        assert answer.status_code == 404
        assert "write build:ID, eval:ID" in answer.json()["error"]


async def test_why_names_what_no_worker_has_and_what_is_waited_for(site: Site) -> None:
    def graph(connection: sa.Connection) -> tuple[str, str, list[JobQueued]]:
        evaluation = make_evaluation(connection, status=EvaluationStatus.BUILDING)
        first = make_derivation(connection, "first-1", features=["gpu"])
        second = make_derivation(connection, "second-1", depends_on=[first])
        builds = [
            make_build(connection, first),
            make_build(connection, second, status=BuildStatus.CREATED),
        ]
        for build in builds:
            want(connection, evaluation, build)
        queued = load_pending(connection, [f"build:{builds[0]}"], 1e10)
        return (*builds, [JobQueued(job) for job in queued])

    first, second, queued = await site.services.database.run(graph)
    site.services.bus.publish(queued)
    waits = (await site.reader.get(f"/jobs/build:{first}/why")).json()
    assert (waits["status"], waits["summary"], waits["workers"]) == ("Queued", "no worker is connected", [])
    assert waits["decision"] is None
    later = (await site.reader.get(f"/jobs/build:{second}/why")).json()
    assert later["summary"] == "it waits for first-1"


async def test_why_gives_the_recorded_decision(site: Site) -> None:
    build, assignment = await running(site)
    recorded = {"rules": {"WaitTimeRule": 60.0}, "total": 60.0, "vetoes": []}
    row = dispatched_job.update().where(dispatched_job.c.id == assignment).values(score_breakdown=recorded)
    await site.services.database.run(lambda connection: connection.execute(row))
    why = (await site.reader.get(f"/jobs/build:{build}/why")).json()
    assert why["summary"] == "it is at host, which is not connected now"
    assert why["decision"]["rules"] == {"WaitTimeRule": 60.0}
    assert (why["decision"]["worker"], why["decision"]["total"]) == ("host", 60.0)


async def test_the_log_comes_as_its_bytes(site: Site) -> None:
    build, assignment = await running(site)
    content = bytes(range(256)) * 900
    site.services.logs.append(assignment, 0, content, compressed=False)
    answer = await site.reader.get(f"/jobs/build:{build}/log")
    assert answer.content == content
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    named = await site.reader.get(f"/jobs/build:{build}/log", params={"attempt": assignment})
    assert named.content == content
    other = await site.reader.get(f"/jobs/build:{build}/log", params={"attempt": "../../secret"})
    assert other.status_code == 404


async def test_a_followed_log_ends_with_its_attempt(site: Site) -> None:
    build, assignment = await running(site)
    size = site.services.logs.append(assignment, 0, b"one\n", compressed=False)
    with trio.fail_after(15):
        async with site.reader.stream("GET", f"/jobs/build:{build}/log", params={"follow": 1}) as answer:
            chunks = answer.aiter_bytes()
            assert await anext(chunks) == b"one\n"
            size = site.services.logs.append(assignment, size, b"two\n", compressed=False)
            assert await anext(chunks) == b"two\n"
            site.services.logs.append(assignment, size, b"last\n", compressed=False)
            await close(site, assignment)
            assert b"".join([chunk async for chunk in chunks]) == b"last\n"


async def test_a_job_without_an_attempt_has_no_log_but_one_may_wait_for_it(site: Site) -> None:
    evaluation = await site.pool.submit()
    answer = await site.reader.get(f"/jobs/eval:{evaluation}/log")
    assert answer.status_code == 404
    assert f"gradient why eval:{evaluation}" in answer.json()["error"]
    with trio.fail_after(15):
        async with site.reader.stream(
            "GET", f"/jobs/eval:{evaluation}/log", params={"follow": 1}
        ) as followed:
            await site.client.post(f"/jobs/eval:{evaluation}/abort")
            assert [chunk async for chunk in followed.aiter_bytes()] == []


async def test_a_build_that_others_want_is_not_one_projects_to_abort(site: Site) -> None:
    def graph(connection: sa.Connection) -> str:
        mine = connection.scalar(sa.text("SELECT id FROM project WHERE name = 'mine'"))
        build = make_build(connection)
        for project in (mine, None):
            want(connection, make_evaluation(connection, project, status=EvaluationStatus.BUILDING), build)
        return build

    build = await site.services.database.run(graph)
    seen = (await site.bound.get(f"/jobs/build:{build}")).json()
    assert (seen["projects"], len(seen["evaluations"])) == (["mine"], 1)
    assert (await site.bound.post(f"/jobs/build:{build}/abort")).status_code == 403
    assert (await site.client.post(f"/jobs/build:{build}/abort")).json() == {
        "job": f"build:{build}",
        "aborted": True,
    }
    assert (await site.reader.get(f"/jobs/build:{build}")).json()["status"] == "Aborted"
