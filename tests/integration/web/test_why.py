"""`gradient why` over real HTTP, the scheduler and its database behind it."""

from dataclasses import replace
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
import trio
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.server import AssignJob
from gradient_protocol.messages.worker import AssignJobResponse, CandidateScore, CandidateScores
from gradient_server.domain.events import JobQueued
from gradient_server.domain.job import PendingJob
from gradient_server.domain.status import EvaluationStatus
from gradient_server.graph.jobs import load_pending
from gradient_server.scheduler.model import AssignedJob

from tests.fakes.scheduler import RecordingOutbox, metrics, worker
from tests.fixtures.graph import make_build, make_derivation, make_evaluation, make_project, make_worker, want
from tests.integration.web.conftest import Site

Json = dict[str, Any]


async def pending(site: Site, name: str, *projects: str, **changes: object) -> str:
    """A build that waits, wanted by these projects; its job key."""

    def graph(connection: sa.Connection) -> list[PendingJob]:
        build = make_build(connection, make_derivation(connection, name))
        for project in projects:
            wanted_by = make_evaluation(
                connection, make_project(connection, project), status=EvaluationStatus.BUILDING
            )
            want(connection, wanted_by, build)
        return load_pending(connection, [f"build:{build}"], 1e10)

    [job] = await site.services.database.run(graph)
    site.services.bus.publish([JobQueued(replace(job, **changes))])
    with trio.fail_after(10):
        while site.services.scheduler.tracker.tables[JobKind.BUILD].unpredicted_jobs:
            await trio.sleep(0.01)
    return job.job_id


async def connected(site: Site, name: str, *running: AssignedJob, **changes: object) -> RecordingOutbox:
    """A worker of the pool, which the test speaks for."""
    outbox = RecordingOutbox()
    info = worker(name, **changes)
    worker_id = await site.services.database.run(lambda connection: make_worker(connection, name))
    site.services.scheduler.worker_connected(replace(info, id=worker_id, name=name), outbox, running)
    return outbox


def score(site: Site, name: str, *jobs: str) -> None:
    scores = [
        CandidateScore(job_id=one, missing_count=0, missing_nar_size=0, outputs_present=False) for one in jobs
    ]
    answer = CandidateScores(scores=scores, is_final=True)
    site.services.scheduler.candidate_scores(f"worker-{name}", answer)


def heavy(name: str) -> AssignedJob:
    """A build that a worker goes on with, and 3000 MB that it is counted with."""
    return AssignedJob(
        assignment_id=f"assignment-{name}",
        job_id=f"build:{name}",
        kind=JobKind.BUILD,
        name=name,
        ram_reserved_mb=3000.0,
    )


async def why(client: httpx2.AsyncClient, job: str) -> Json:
    answer = await client.get(f"/jobs/{job}/why")
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def reasons(answer: Json) -> dict[str, str]:
    return {one["name"]: f"{one['verdict']}: {' '.join(one['reasons'])}" for one in answer["workers"]}


async def test_each_worker_says_what_stands_in_the_way_with_its_figures(site: Site) -> None:
    await connected(site, "arm", architectures=["aarch64-linux"])
    await connected(site, "w1", heavy("one"), ram_total_mb=4096)
    await connected(site, "w2", heavy("two"), ram_total_mb=4600)
    await connected(site, "hot", replace(heavy("three"), ram_reserved_mb=0.0))
    await connected(site, "silent")
    site.services.scheduler.heartbeat("worker-hot", metrics(cpu_usage_pct=97.0, ram_free_mb=6144))
    job = await pending(site, "large-1", "mine", peak_ram_mb=2000, system="x86_64-linux")
    for name in ("w1", "w2", "hot"):
        score(site, name, job)
    answer = await why(site.reader, job)
    # 2200 are needed, and 1600 of w2's are left.
    assert answer["summary"].endswith("; it fits once 0.6 GiB are released on w2")
    told = reasons(answer)
    assert told["arm"] == "ineligible: is not x86_64-linux (has aarch64-linux)"
    assert told["w1"] == (
        "vetoed: is held by ResourceSaturationRule (it needs 2.1 GiB, 1.1 GiB of 4.0 GiB are left,"
        " 2.9 GiB are reserved by what runs there); it fits once 1.1 GiB are released there"
    )
    assert told["hot"].startswith("below-floor: scores -")
    assert told["hot"].endswith(
        "points below the floor: ResourceSaturationRule -8600"
        " (its CPU is at 97 %, 6.0 GiB of 7.8 GiB are free)"
    )
    assert told["silent"].startswith("vetoed: is held by RescoreWaitRule (")
    assert "considered unscored after 4 rounds, of which 0 passed" in told["silent"]
    assert all(one["rules"] for one in answer["workers"] if one["name"] != "arm")


async def test_memory_that_is_kept_for_another_build_is_told_without_its_name(site: Site) -> None:
    await connected(site, "w1", heavy("one"), ram_total_mb=4096, max_concurrent_builds=4)
    site.services.scheduler.request_job("worker-w1", JobKind.BUILD)
    large = await pending(site, "secret-large", "other", peak_ram_mb=3500, prioritized=True)
    small = await pending(site, "small-1", "mine", peak_ram_mb=300)
    score(site, "w1", large, small)
    answer = await why(site.bound, small)
    assert "3.8 GiB are kept for a build that waits longer" in reasons(answer)["w1"]
    assert "secret" not in str(answer)
    assert (await site.bound.get(f"/jobs/{large}/why")).status_code == 404


async def test_what_would_help_names_no_worker_that_the_key_may_not_see(site: Site) -> None:
    theirs = frozenset(
        [await site.services.database.run(lambda connection: make_project(connection, "other"))]
    )
    await connected(site, "w1", heavy("one"), ram_total_mb=4096)
    await connected(site, "theirs", heavy("two"), ram_total_mb=4600, projects=theirs)
    job = await pending(site, "shared-1", "mine", "other", peak_ram_mb=2000)
    score(site, "w1", job)
    score(site, "theirs", job)
    everyone, mine = await why(site.reader, job), await why(site.bound, job)
    assert everyone["summary"].endswith("released on theirs")
    assert mine["summary"].endswith("it fits once 1.1 GiB are released on w1")
    assert "theirs" not in str(mine)


@pytest.mark.parametrize("runner_up_project", ["other", "mine"])
async def test_an_assigned_job_is_set_against_the_runner_up(site: Site, runner_up_project: str) -> None:
    outbox = await connected(site, "w1", max_concurrent_builds=4)
    site.services.scheduler.request_job("worker-w1", JobKind.BUILD)
    first = await pending(site, "first-1", "mine", prioritized=True)
    second = await pending(site, "second-1", runner_up_project)
    score(site, "w1", first, second)
    with trio.fail_after(10):
        while not (sent := outbox.take(AssignJob)):
            await trio.sleep(0.01)
    answered = AssignJobResponse(assignment_id=sent[0].assignment_id, accepted=True)
    await site.services.scheduler.assignment_answered("worker-w1", answered)
    answer = await why(site.reader, first)
    decision = answer["decision"]
    assert (answer["summary"], decision["worker"]) == ("it is at w1", "w1")
    runner_up = decision["runner_up"]
    assert (runner_up["job"], runner_up["name"]) == (second, "second-1")
    gap = {rule: points - runner_up["rules"][rule] for rule, points in decision["rules"].items()}
    assert gap["QosRule"] == 5000.0
    assert sum(gap.values()) == pytest.approx(decision["total"] - runner_up["total"])
    seen = (await why(site.bound, first))["decision"]["runner_up"]
    assert (seen is None) == (runner_up_project == "other")
    board = (await site.reader.get(f"{site.url}/board")).text
    assert "second-1" in board, "the ring has the rejected candidate too"
