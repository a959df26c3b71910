"""Clusters over HTTP: a real server, and workers that speak the protocol."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
import trio
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages import server
from gradient_server.domain.events import JobQueued
from gradient_server.domain.status import BuildStatus, EvaluationStatus
from gradient_server.graph.jobs import load_pending
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.graph import make_build, make_derivation, make_evaluation, make_project, want
from tests.integration.cluster.scene import Scene
from tests.integration.web.conftest import Json, Site

# The client's own generators, where a reader leaves before the end.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning")

THREE = [("server", False), ("client", True), ("client", False)]


@asynccontextmanager
async def workers_of(site: Site) -> AsyncIterator[Scene]:
    """Workers for the site; their sessions belong to the task of the test."""
    async with AsyncExitStack() as stack:
        yield Scene(site.pool, stack)


@asynccontextmanager
async def events(site: Site, path: str) -> AsyncIterator[AsyncIterator[tuple[str, Json]]]:
    """The stream at `path`, as (name, data)."""
    async with site.reader.stream("GET", path) as answer:
        assert answer.status_code == 200

        async def read() -> AsyncIterator[tuple[str, Json]]:
            async for event in httpx2.EventSource(answer):
                yield event.event, event.json()

        async with aclosing(read()) as stream:
            yield stream


async def get(site: Site, path: str, **query: str) -> Json:
    answer = await site.reader.get(path, params=query)
    assert answer.status_code == 200, answer.text
    content: Json = answer.json()
    return content


async def two_builds(site: Site, *, features: tuple[str, ...] = (), project: str | None = None) -> list[str]:
    """Job keys of two builds that wait, `one-1` and `two-1`, wanted by an evaluation."""

    def graph(connection: sa.Connection) -> tuple[list[str], list[JobQueued]]:
        owner = make_project(connection) if project is None else project
        evaluation = make_evaluation(connection, owner, status=EvaluationStatus.BUILDING)
        keys = []
        for name in ("one-1", "two-1"):
            build = make_build(connection, make_derivation(connection, name, features=features))
            want(connection, evaluation, build)
            keys.append(f"build:{build}")
        return keys, [JobQueued(job) for job in load_pending(connection, keys, 1e10)]

    return await site.services.transact(graph)


def spec(jobs: list[str], **more: Any) -> Json:  # noqa: ANN401 - fields of the body
    return {
        "project": "demo",
        "name": "pair",
        "members": [{"job": job, "role": "peer"} for job in jobs],
        **more,
    }


async def test_a_cluster_is_shown_from_its_submission_to_its_verdict(site: Site) -> None:
    async with workers_of(site) as scene:
        for worker in ("a", "b", "c"):
            await scene.connect(worker)
        cluster = await scene.submit("net", THREE)
        (listed,) = (await get(site, "/clusters"))["clusters"]
        assert (listed["id"], listed["name"], listed["size"], listed["status"]) == (
            cluster,
            "net",
            3,
            "Queued",
        )
        waiting = await get(site, f"/clusters/{cluster}")
        assert [(one["role"], one["index"], one["primary"]) for one in waiting["members"]] == [
            ("server", 0, False),
            ("client", 0, True),
            ("client", 1, False),
        ]
        assert (waiting["tries"], waiting["path"]) == ([], [])
        with trio.fail_after(20):
            async with events(site, f"/clusters/{cluster}/events") as stream:
                name, standing = await anext(stream)
                assert (name, standing["stage"]) == ("cluster", "seats")
                assigned = await scene.run("a", "b", "c")
                while standing["stage"] != "running":
                    _, standing = await anext(stream)
                assert {one["worker"] for one in standing["members"]} == {"a", "b", "c"}
                (primary,) = (
                    name
                    for name, one in assigned.items()
                    if one.cluster and (one.cluster.role, one.cluster.index) == ("client", 0)
                )
                await scene.succeed(primary, assigned[primary])
                last = [standing async for _, standing in stream][-1]
        assert (last["status"], last["reason"]) == ("Completed", "client 0 succeeded")
        shown = await get(site, "/clusters/net")
        (run,) = shown["tries"]
        assert (run["outcome"], shown["path"]) == ("Succeeded", ["client 0 succeeded"])
        assert [member["worker"] for member in run["members"]] == [
            next(
                name
                for name, one in assigned.items()
                if one.cluster and (one.cluster.role, one.cluster.index) == (member["role"], member["index"])
            )
            for member in shown["members"]
        ]
        for member in run["members"]:
            assert run["created_at"] <= member["assigned_at"] <= member["accepted_at"] <= run["started_at"]
        assert await get(site, f"/clusters/{cluster[:13]}") == shown, "by the beginning of its id"


async def test_the_clusters_of_an_evaluation_are_listed_and_watched(site: Site) -> None:
    async with workers_of(site) as scene:
        await scene.submit("net", THREE)
        evaluation = str(await site.pool.scalar("SELECT id FROM evaluation"))
        other = await site.pool.submit()
        assert [one["name"] for one in (await get(site, "/clusters", evaluation=evaluation))["clusters"]] == [
            "net"
        ]
        assert (await get(site, "/clusters", evaluation=other))["clusters"] == []
        assert (await get(site, "/clusters", project="mine"))["clusters"] == []
        with trio.fail_after(20):
            async with events(site, f"/evaluations/{evaluation}/clusters/events") as stream:
                told = {name: data async for name, data in _take(stream, 2)}
                assert (told["cluster"]["name"], told["evaluation"]["status"]) == ("net", "Building")
                assert (await site.client.post(f"/evaluations/{evaluation}/abort")).status_code == 200
                rest = [(name, data["status"]) async for name, data in stream]
        assert rest[-2:] == [("cluster", "Aborted"), ("evaluation", "Aborted")]


async def _take(stream: AsyncIterator[tuple[str, Json]], number: int) -> AsyncIterator[tuple[str, Json]]:
    for _ in range(number):
        yield await anext(stream)


async def test_builds_that_have_not_started_become_a_cluster(site: Site) -> None:
    jobs = await two_builds(site)
    answer = await site.client.post(
        "/clusters", json=spec([jobs[0], "two-1"], retry_budget=3, same_zone=True)
    )
    assert answer.status_code == 201, answer.text
    shown = await get(site, f"/clusters/{answer.json()['cluster']}")
    assert (shown["name"], shown["retry_budget"], shown["same_zone"]) == ("pair", 3, True)
    assert [(one["job"], one["index"]) for one in shown["members"]] == [(jobs[0], 0), (jobs[1], 1)]
    again = await site.client.post("/clusters", json=spec(jobs))
    assert (again.status_code, "is in the cluster" in again.json()["error"]) == (409, True)


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"members": []}, 422, "members"),
        ({"retry_budget": -1}, 422, "retry_budget"),
        ({"members": [{"job": "build:absent-build", "role": "x"}]}, 404, "there is no job"),
        ({"project": "absent"}, 404, "there is no project"),
        ({"project": "mine"}, 409, "is not of this project"),
        (
            {"members": [{"job": name, "role": "x", "primary": True} for name in ("one-1", "two-1")]},
            409,
            "primar",
        ),
        ({"members": [{"job": name, "role": "x"} for name in ("one-1", "one-1")]}, 409, "named twice"),
        ({"members": [{"job": "build:01a235a7-f553-712d-9eb4-f6c51d304d5d", "role": "x"}]}, 409, "no build"),
    ],
)
async def test_a_cluster_that_cannot_be_is_refused_in_one_line(
    site: Site, change: Json, status: int, told: str
) -> None:
    jobs = await two_builds(site)
    answer = await site.client.post("/clusters", json=spec(jobs) | change)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert told in error
    assert "\n" not in error
    assert (await get(site, "/clusters"))["clusters"] == []


async def test_a_job_that_has_started_is_no_member(site: Site) -> None:
    jobs = await two_builds(site)
    started = sa.text("UPDATE derivation_build SET status = 'Assigned' WHERE id = :id")
    await site.services.database.run(
        lambda connection: connection.execute(started, {"id": jobs[0].removeprefix("build:")})
    )
    answer = await site.client.post("/clusters", json=spec(jobs))
    assert (answer.status_code, "has started already" in answer.json()["error"]) == (409, True)


async def test_why_names_what_no_worker_has(site: Site) -> None:
    async with workers_of(site) as scene:
        await scene.connect("a")
        scene.ask("a")
        jobs = await two_builds(site, features=("kvm",))
        cluster = (await site.client.post("/clusters", json=spec(jobs))).json()["cluster"]
        why = await get(site, f"/clusters/{cluster}/why")
        assert (why["status"], why["stage"]) == ("Queued", "seats")
        assert why["best_zone"] == {"zone": None, "seats_idle": 0, "seats_able": 0, "size": 2}
        assert all("kvm" in one["lacking"] for one in why["members"])
        assert "kvm" in why["summary"]
        assert why["expected_start_secs"] is None, "nobody knows when such a worker comes"


async def test_why_names_what_a_member_waits_for(site: Site) -> None:
    def graph(connection: sa.Connection) -> tuple[list[str], list[JobQueued]]:
        evaluation = make_evaluation(connection, status=EvaluationStatus.BUILDING)
        needed = make_derivation(connection, "needed-1")
        late = make_derivation(connection, "late-1", depends_on=[needed])
        builds = [
            make_build(connection, needed),
            make_build(connection, late, status=BuildStatus.CREATED),
            make_build(connection, make_derivation(connection, "ready-1")),
        ]
        for build in builds:
            want(connection, evaluation, build)
        keys = [f"build:{build}" for build in builds]
        return keys[1:], [JobQueued(job) for job in load_pending(connection, keys, 1e10)]

    members = await site.services.transact(graph)
    cluster = (await site.client.post("/clusters", json=spec(members))).json()["cluster"]
    why = await get(site, f"/clusters/{cluster}/why")
    assert (why["stage"], why["summary"]) == ("members", "waits for peer 0, which waits for needed-1")
    assert [one["arrived"] for one in why["members"]] == [False, True]
    shown = await get(site, f"/clusters/{cluster}")
    assert [one["waits_for"] for one in shown["members"]] == [["needed-1"], []]


async def test_why_tells_seats_of_a_reservation_and_what_runs_on_them(site: Site) -> None:
    async with workers_of(site) as scene:
        for name in ("a", "b"):
            await scene.connect(name)
        site.services.clusters.desk.after_secs = 0.0
        jobs = await two_builds(site)
        singles = [await scene.workers[name].accept(JobKind.BUILD) for name in ("a", "b")]
        assert {one.job_id for one in singles} == set(jobs)
        waiting = await scene.submit("pair", [("peer", False), ("peer", False)])
        site.services.clusters.passes.run_one()
        why = await get(site, f"/clusters/{waiting}/why")
        assert (why["stage"], why["best_zone"]["seats_able"]) == ("reserved", 2)
        seats = {seat["worker"]: seat for seat in why["reservation"]["seats"]}
        assert {name: seat["is_idle"] for name, seat in seats.items()} == {"a": False, "b": False}
        assert sorted(seats["a"]["running"] + seats["b"]["running"]) == ["one-1", "two-1"]
        assert why["expected_start_secs"] is None, "nothing of these names has run before"

        metric = sa.text(
            "INSERT INTO derivation_metric (derivation, assignment, history_name, architecture, created_at,"
            " build_time_ms, oom_killed, concurrent_builds) SELECT d.id, d.name, d.history_name,"
            " 'x86_64-linux', 0, 60000, FALSE, 0 FROM derivation d WHERE d.name IN ('one-1', 'two-1')"
        )
        await site.services.database.run(lambda connection: connection.execute(metric))
        why = await get(site, f"/clusters/{waiting}/why")
        assert 30 < why["expected_start_secs"] <= 60


async def test_an_abort_ends_it_at_once_and_tells_whoever_runs_it(site: Site) -> None:
    async with workers_of(site) as scene:
        for name in ("a", "b", "c"):
            await scene.connect(name)
        cluster = await scene.submit("net", THREE)
        await scene.run("a", "b", "c")
        answer = await site.client.post(f"/clusters/{cluster}/abort")
        assert answer.json() == {"cluster": cluster, "aborted": True}
        shown = await get(site, f"/clusters/{cluster}")
        assert (shown["status"], shown["tries"][0]["outcome"]) == ("Aborted", "Aborted")
        for name in ("a", "b", "c"):
            await scene.workers[name].expect(server.AbortCluster)
        assert (await site.client.post(f"/clusters/{cluster}/abort")).json()["aborted"] is False
        why = await get(site, f"/clusters/{cluster}/why")
        assert why["status"] == "Aborted"


async def test_a_key_of_another_project_neither_sees_nor_touches_it(site: Site) -> None:
    jobs = await two_builds(site)
    cluster = (await site.client.post("/clusters", json=spec(jobs))).json()["cluster"]
    assert (await site.bound.get("/clusters")).json()["clusters"] == []
    for path in (f"/clusters/{cluster}", "/clusters/pair", f"/clusters/{cluster}/why"):
        assert (await site.bound.get(path)).status_code == 404
    assert (await site.bound.post(f"/clusters/{cluster}/abort")).status_code == 404
    assert (await site.bound.post("/clusters", json=spec(jobs))).status_code == 403
    assert (await site.reader.post(f"/clusters/{cluster}/abort")).status_code == 401
    assert (await get(site, f"/clusters/{cluster}"))["status"] == "Queued"


async def test_an_unknown_cluster_says_where_to_look(site: Site) -> None:
    answer = await site.reader.get("/clusters/nothing")
    assert answer.status_code == 404
    assert "gradient cluster list" in answer.json()["error"]


async def test_a_waiting_cluster_is_seen_wherever_one_looks(site: Site) -> None:
    async with workers_of(site) as scene:
        await scene.connect("a")
        scene.ask("a")
        jobs = await two_builds(site, features=("kvm",))
        await site.client.post("/clusters", json=spec(jobs))
        (standing,) = (await get(site, "/status"))["clusters"]
        assert (standing["name"], standing["status"], standing["stage"]) == ("pair", "Queued", "seats")
        assert "kvm" in standing["summary"]
        why = await get(site, f"/jobs/{jobs[0]}/why")
        assert why["cluster"]["cluster"] == standing["cluster"]
        assert why["cluster"]["best_zone"]["size"] == 2
        assert [one["lacking"] is None for one in why["cluster"]["members"]] == [False, False]
        board = (await site.reader.get(f"{site.url}/board")).text
        assert standing["cluster"] in board
        assert "no worker can take it" in board
        found = await metrics_of(site)
        assert found["gradient_clusters", "Queued"] == 1
        assert found["gradient_waiting_clusters", "seats"] == 1
        assert found["gradient_waiting_clusters", "members"] == 0
        assert ("gradient_reservation_age_seconds",) not in found, "there is none: unknown is not 0"


async def test_starts_failed_prepares_and_dropped_signals_are_counted(site: Site) -> None:
    async with workers_of(site) as scene:
        for name in ("a", "b"):
            await scene.connect(name)
        cluster = await scene.submit("pair", [("peer", False), ("peer", False)])
        assigned = await scene.run("a", "b")
        scene.signal("a", assigned["a"], seq=1)
        await scene.workers["b"].expect(server.ClusterSignal)
        scene.signal("a", assigned["a"], seq=2, attempt="another")
        await scene.workers["a"].expect_where(server.ReportAck, lambda ack: ack.seq == 2)
        found = await metrics_of(site)
        assert found["gradient_open_cluster_attempts", "Running"] == 1
        assert found["gradient_cluster_starts_total",] == 1
        assert found["gradient_cluster_failed_prepares_total",] == 0
        assert found["gradient_cluster_signals_forwarded_total",] == 1
        assert found["gradient_cluster_signals_dropped_total",] == 1
        await site.client.post(f"/clusters/{cluster}/abort")
        assert (await get(site, "/status"))["clusters"] == []


async def metrics_of(site: Site) -> dict[tuple[str, ...], float]:
    answer = await site.reader.get(f"{site.url}/metrics")
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
