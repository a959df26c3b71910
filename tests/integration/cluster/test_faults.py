"""Faults between plan and verdict, over TCP: whoever dies, stops or loses a message, the cluster completes,
nobody holds anything in between, and no member ran without the others.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from gradient_protocol.kinds import ResumeState
from gradient_protocol.messages import server
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import Draining, Message
from gradient_server.db.runner import Database
from gradient_server.graph.settle import abort_cluster

from tests.fakes.worker import FakeWorker, resumed
from tests.integration.cluster.scene import Scene, running_scene

PAIR = [("x", False), ("y", False)]
STEPS = ("asked", "assigned", "held", "started", "signalled", "reported")


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed prepare is tried again at once: the 30 s are tested where the clock is the test's."""
    monkeypatch.setattr("gradient_server.cluster.book.AFTER_FAILED_PREPARE_SECS", 0.0)


@asynccontextmanager
async def pair_of(
    database: Database, base_dir: Path, *, prepare_secs: float = 30.0, grace_secs: float = 60.0
) -> AsyncIterator[tuple[Scene, str]]:
    """A server, worker `a`, and a cluster of two that waits. `b` is the test's to connect and to lose."""
    flags = {
        "scheduler_cluster_prepare_timeout_secs": prepare_secs,
        "proto_reconnect_grace_secs": grace_secs,
    }
    async with running_scene(database, base_dir, **flags) as scene:
        await scene.connect("a")
        yield scene, await scene.submit("pair", PAIR)


async def open_rows(scene: Scene) -> object:
    return await scene.pool.scalar("SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL")


async def finish(scene: Scene, cluster: str, *names: str, ask: bool = True) -> None:
    """All goes well from here: these workers have the next try, and its members succeed."""
    if ask:
        scene.ask(*names)
    assigned = await scene.assigned(*names)
    scene.accept(assigned)
    await scene.started(*names)
    for name in names:
        await scene.succeed(name, assigned[name])
    await scene.until_cluster(cluster, "Completed")
    await scene.pool.until("SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL", 0)
    services = scene.pool.services
    assert len(services.clusters.attempts) == 0
    for worker in services.scheduler.pool:
        assert all(slots.open == 0 for slots in worker.slots.values())


async def go_to(scene: Scene, step: str) -> dict[str, server.AssignJob]:
    """Both workers are at this step; `b` leaves after it."""
    scene.ask("a", "b")
    if step == "asked":
        return {}
    assigned = await scene.assigned("a", "b")
    scene.accept({"a": assigned["a"]})
    if step == "assigned":
        return assigned
    scene.accept({"b": assigned["b"]})
    await scene.started("a", "b")
    if step == "started":
        return assigned
    scene.signal("b", assigned["b"], seq=1)
    await scene.workers["a"].expect(server.ClusterSignal)
    if step == "reported":
        scene.fail("b", assigned["b"], seq=2, kind="Transient")
        await scene.workers["b"].expect_where(server.ReportAck, lambda ack: ack.seq == 2)
    return assigned


@pytest.mark.parametrize("step", [step for step in STEPS if step != "held"])
async def test_a_worker_killed_at_each_step_between_plan_and_verdict(
    database: Database, tmp_path: Path, step: str
) -> None:
    async with pair_of(database, tmp_path, grace_secs=0.05) as (scene, cluster):
        async with scene.session("b"):
            assigned = await go_to(scene, step)
        if assigned:
            # Before the start a hold is dropped, after it the survivor confirms.
            await scene.workers["a"].expect(server.AbortCluster)
            if step != "assigned":
                scene.fail("a", assigned["a"], kind="Aborted")
        await scene.pool.until("SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL", 0)
        await scene.connect("c")
        await finish(scene, cluster, "a", "c")
        tries = await scene.pool.scalar("SELECT attempts FROM cluster_job WHERE id = :id", id=cluster)
        assert tries == (1 if step in ("asked", "assigned") else 2), "what never started is free of charge"


async def test_a_worker_killed_while_it_holds(sqlite_database: Database, tmp_path: Path) -> None:
    async with pair_of(sqlite_database, tmp_path) as (scene, cluster):
        async with scene.session("b"):
            scene.ask("a", "b")
            assigned = await scene.assigned("a", "b")
            scene.accept({"b": assigned["b"]})
            held = "SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL"
            await scene.pool.until(held, 2)
        await scene.workers["a"].expect(server.AbortCluster)
        assert await open_rows(scene) == 0
        await scene.connect("c")
        await finish(scene, cluster, "a", "c")


@pytest.mark.parametrize("step", ["assigned", "held"])
async def test_a_worker_stopped_before_the_start_is_told_and_the_others_are_free(
    sqlite_database: Database, tmp_path: Path, step: str
) -> None:
    async with pair_of(sqlite_database, tmp_path, prepare_secs=1) as (scene, cluster):
        await scene.connect("b")
        scene.ask("a", "b")
        assigned = await scene.assigned("a", "b")
        # Whoever is stopped says nothing; whoever holds is not started without it.
        if step == "held":
            scene.accept({"b": assigned["b"]})
        for name in ("a", "b"):
            await scene.workers[name].expect(server.AbortCluster)
        assert await open_rows(scene) == 0
        assert not any(isinstance(m, server.StartCluster) for m in scene.workers["b"].unread)
        # It goes on: what it answers now is of an attempt that is over.
        scene.accept({"a": assigned["a"], "b": assigned["b"]})
        await finish(scene, cluster, "a", "b")


async def test_a_worker_stopped_while_it_ran_comes_back_after_the_verdict_and_is_dropped(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with pair_of(sqlite_database, tmp_path, grace_secs=0.05) as (scene, cluster):
        async with scene.session("b"):
            assigned = await scene.run("a", "b")
        await scene.workers["a"].expect(server.AbortCluster)
        scene.fail("a", assigned["a"], kind="Aborted")
        b = await scene.connect("b", running=[resumed(assigned["b"], 0)], expect_resume=False)
        assert (await b.expect(server.ResumeAck)).dropped == [assigned["b"].assignment_id]
        await finish(scene, cluster, "a", "b")


def losing(worker: FakeWorker, *kinds: type[Message]) -> None:
    """Messages of these classes are lost on their way to the worker."""
    worker.divert = lambda message: isinstance(message, kinds)


async def test_startcluster_lost_to_one_member_comes_again_with_its_resume(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with pair_of(sqlite_database, tmp_path) as (scene, cluster):
        async with scene.session("b") as b:
            losing(b, server.StartCluster)
            scene.ask("a", "b")
            assigned = await scene.assigned("a", "b")
            scene.accept(assigned)
            await scene.started("a")
            await scene.until_cluster(cluster, "Running")
        b = await scene.connect("b", running=[resumed(assigned["b"], 0, ResumeState.HELD)])
        start = await b.expect(server.StartCluster)
        assert {entry.worker for entry in start.roster} == {"a", "b"}
        for name in ("a", "b"):
            await scene.succeed(name, assigned[name])
        await scene.until_cluster(cluster, "Completed")
        assert await scene.pool.scalar("SELECT count(*) FROM cluster_attempt") == 1


async def test_startcluster_lost_to_a_member_whose_hold_ends_is_a_failure_of_the_try(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with pair_of(sqlite_database, tmp_path) as (scene, cluster):
        b = await scene.connect("b")
        losing(b, server.StartCluster)
        scene.ask("a", "b")
        assigned = await scene.assigned("a", "b")
        scene.accept(assigned)
        await scene.started("a")
        scene.fail("b", assigned["b"], kind="Aborted")
        await scene.workers["a"].expect(server.AbortCluster)
        scene.fail("a", assigned["a"], kind="Aborted")
        losing(b)
        await finish(scene, cluster, "a", "b")
        assert await scene.pool.scalar("SELECT attempts FROM cluster_job WHERE id = :id", id=cluster) == 2


async def test_every_reply_to_a_running_member_is_lost(sqlite_database: Database, tmp_path: Path) -> None:
    """Its signal and its final report are stored, and sent again after each cut, and count once."""
    async with pair_of(sqlite_database, tmp_path) as (scene, cluster):
        async with scene.session("b") as b:
            assigned = await scene.run("a", "b")
            losing(b, server.ReportAck)
            scene.signal("b", assigned["b"], seq=1)
            await scene.workers["a"].expect(server.ClusterSignal)
        b_job = assigned["b"]
        async with scene.session("b", running=[resumed(b_job, 0)]) as b:
            scene.signal("b", b_job, seq=1)
            await b.expect(server.ReportAck)
            losing(b, server.ReportAck)
            scene.fail("b", b_job, seq=2, kind="Transient")
            await scene.workers["a"].expect(server.AbortCluster)
        async with scene.session(
            "b", running=[resumed(b_job, 1, ResumeState.DONE)], expect_resume=False
        ) as b:
            ack = await b.expect(server.ResumeAck)
            assert ack.dropped == [b_job.assignment_id], "its report is stored, and the try is over"
            scene.fail("a", assigned["a"], kind="Aborted")
            await finish(scene, cluster, "a", "b")
        assert await scene.pool.scalar("SELECT count(*) FROM cluster_signal") == 1
        assert await scene.pool.scalar("SELECT attempts FROM cluster_job WHERE id = :id", id=cluster) == 2


async def test_an_acceptance_that_is_lost_with_its_connection_fails_the_prepare(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with pair_of(sqlite_database, tmp_path) as (scene, cluster):
        async with scene.session("b"):
            scene.ask("a", "b")
            assigned = await scene.assigned("a", "b")
            scene.accept({"a": assigned["a"]})
        await scene.workers["a"].expect(server.AbortCluster)
        # It holds the job and says so; the attempt is over.
        b = await scene.connect(
            "b", running=[resumed(assigned["b"], 0, ResumeState.HELD)], expect_resume=False
        )
        assert (await b.expect(server.ResumeAck)).dropped == [assigned["b"].assignment_id]
        await finish(scene, cluster, "a", "b")


async def test_a_link_cut_in_the_middle_of_a_barrier_lets_everybody_pass_it_once(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with pair_of(sqlite_database, tmp_path) as (scene, cluster):
        async with scene.session("b") as b:
            assigned = await scene.run("a", "b")
            scene.signal("a", assigned["a"], seq=1, topic="gradient.barrier", payload=b"met")
            await scene.workers["a"].expect(server.ReportAck)
            losing(b, server.ReportAck, server.ClusterSignal)
            scene.signal("b", assigned["b"], seq=1, topic="gradient.barrier", payload=b"met")
            heard = [await scene.workers["a"].expect(server.ClusterSignal)]
        b = await scene.connect("b", running=[resumed(assigned["b"], 0)])
        scene.signal("b", assigned["b"], seq=1, topic="gradient.barrier", payload=b"met")
        heard_at_b = await b.expect(server.ClusterSignal)
        assert (heard_at_b.n, heard_at_b.sender.role) == (1, assigned["a"].cluster.role)
        await b.expect(server.ReportAck)
        for name in ("a", "b"):
            await scene.succeed(name, assigned[name], seq=2)
        await scene.until_cluster(cluster, "Completed")
        heard += [m for m in scene.workers["a"].unread if isinstance(m, server.ClusterSignal)]
        assert [one.n for one in heard] == [2], "entered once"


async def test_a_member_that_dies_before_the_cluster_ever_starts_holds_it_back_without_a_seat(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with pair_of(sqlite_database, tmp_path) as (scene, cluster):
        async with scene.session("b"):
            scene.ask("b")
        scene.ask("a")

        def seats() -> tuple[int, int] | None:
            zone = scene.pool.services.clusters.explain(cluster).best_zone
            return None if zone is None else (zone.seats_idle, zone.seats_able)

        with trio.fail_after(5):
            while seats() != (1, 1):
                await trio.sleep(0.01)
        scene.pool.services.clusters.passes.run_one()
        assert await scene.pool.scalar("SELECT count(*) FROM cluster_attempt") == 0
        await scene.connect("c")
        await finish(scene, cluster, "a", "c")


async def test_a_draining_worker_rejects_its_member_and_has_no_seat_in_the_next_try(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with pair_of(sqlite_database, tmp_path) as (scene, cluster):
        b = await scene.connect("b")
        scene.ask("a", "b")
        assigned = await scene.assigned("a", "b")
        scene.accept({"a": assigned["a"]})
        b.send(Draining(reason="worker draining"))
        b.send(
            w.AssignJobResponse(
                assignment_id=assigned["b"].assignment_id, accepted=False, reason="worker draining"
            )
        )
        await scene.workers["a"].expect(server.AbortCluster)
        scene.ask("a", "b")
        await scene.connect("c")
        await finish(scene, cluster, "a", "c")
        assert not any(isinstance(message, server.AssignJob) for message in b.unread)


async def test_an_abort_during_a_prepare_frees_every_hold_without_a_reply(
    sqlite_database: Database, tmp_path: Path
) -> None:
    async with pair_of(sqlite_database, tmp_path) as (scene, cluster):
        await scene.connect("b")
        scene.ask("a", "b")
        assigned = await scene.assigned("a", "b")
        scene.accept({"a": assigned["a"]})
        services = scene.pool.services

        await services.transact(
            lambda c: (None, abort_cluster(c, cluster, now=services.clock.now(), ids=services.ids) or [])
        )
        for name in ("a", "b"):
            await scene.workers[name].expect(server.AbortCluster)
        assert await open_rows(scene) == 0
        assert len(services.clusters.attempts) == 0
        assert all(not slots.open for one in services.scheduler.pool for slots in one.slots.values())
