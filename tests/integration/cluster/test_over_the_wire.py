"""Clusters over TCP, against the real database, scheduler and stores."""

from pathlib import Path

from gradient_protocol.kinds import ResumeState
from gradient_protocol.messages import server
from gradient_protocol.messages import worker as w
from gradient_server.db.runner import Database

from tests.integration.cluster.scene import nothing_more, running_scene

TRIO = [("server", False), ("client", True), ("client", False)]


async def test_members_are_held_until_all_accepted_and_the_primary_completes(
    database: Database, tmp_path: Path
) -> None:
    async with running_scene(database, tmp_path) as scene:
        for name in ("a", "b", "c"):
            await scene.connect(name)
        cluster = await scene.submit("net", TRIO)
        scene.ask("a", "b", "c")
        assigned = await scene.assigned("a", "b", "c")
        seats = [one.cluster for one in assigned.values()]
        assert {(seat.role, seat.index) for seat in seats if seat} == {
            ("server", 0),
            ("client", 0),
            ("client", 1),
        }
        assert {seat.hold_secs for seat in seats if seat} == {40.0}

        first = {"a": assigned["a"], "b": assigned["b"]}
        scene.accept(first)
        await nothing_more(scene.workers["a"], server.StartCluster)
        scene.accept({"c": assigned["c"]})
        started = await scene.started("a", "b", "c")
        assert {(entry.worker, entry.role) for entry in started["a"].roster} == {
            (name, one.cluster.role) for name, one in assigned.items() if one.cluster
        }
        await scene.until_cluster(cluster, "Running")

        (primary,) = (
            name
            for name, one in assigned.items()
            if one.cluster and (one.cluster.role, one.cluster.index) == ("client", 0)
        )
        await scene.succeed(primary, assigned[primary])
        await scene.until_cluster(cluster, "Completed")
        for name in {"a", "b", "c"} - {primary}:
            abort = await scene.workers[name].expect(server.AbortCluster)
            assert abort.attempt == started["a"].attempt
        assert len(scene.pool.services.clusters.attempts) == 1  # its survivors are stopping
        for name in {"a", "b", "c"} - {primary}:
            scene.fail(name, assigned[name], kind="Aborted")
            await scene.workers[name].expect(server.ReportAck)
        assert len(scene.pool.services.clusters.attempts) == 0


async def test_signals_reach_all_others_in_one_order(database: Database, tmp_path: Path) -> None:
    async with running_scene(database, tmp_path) as scene:
        for name in ("a", "b", "c"):
            await scene.connect(name)
        await scene.submit("net", TRIO)
        assigned = await scene.run("a", "b", "c")
        scene.signal("a", assigned["a"], seq=1, payload=b"1")
        await scene.workers["a"].expect(server.ReportAck)
        scene.signal("b", assigned["b"], seq=1, payload=b"2")
        heard = [await scene.workers["c"].expect(server.ClusterSignal) for _ in range(2)]
        assert [(one.n, one.payload) for one in heard] == [(1, b"1"), (2, b"2")]
        assert (await scene.workers["b"].expect(server.ClusterSignal)).n == 1
        assert (await scene.workers["a"].expect(server.ClusterSignal)).n == 2
        await nothing_more(scene.workers["a"], server.ClusterSignal)


async def test_a_failure_is_retried_once_all_survivors_have_ended(database: Database, tmp_path: Path) -> None:
    async with running_scene(database, tmp_path) as scene:
        for name in ("a", "b"):
            await scene.connect(name)
        cluster = await scene.submit("pair", [("x", False), ("y", False)])
        assigned = await scene.run("a", "b")
        scene.fail("a", assigned["a"])
        await scene.workers["b"].expect(server.AbortCluster)
        scene.ask("a", "b")
        await nothing_more(scene.workers["a"], server.AssignJob)
        scene.fail("b", assigned["b"], kind="Aborted")
        again = await scene.assigned("a", "b")
        assert again["a"].cluster.attempt != assigned["a"].cluster.attempt
        scene.accept(again)
        await scene.started("a", "b")
        await scene.succeed("a", again["a"])
        await scene.succeed("b", again["b"])
        await scene.until_cluster(cluster, "Completed")
        assert await scene.pool.scalar("SELECT attempts FROM cluster_job WHERE id = :id", id=cluster) == 2


async def test_a_rejected_member_fails_the_prepare_free_of_charge(database: Database, tmp_path: Path) -> None:
    async with running_scene(database, tmp_path) as scene:
        for name in ("a", "b"):
            await scene.connect(name)
        cluster = await scene.submit("pair", [("x", False), ("y", False)])
        scene.ask("a", "b")
        assigned = await scene.assigned("a", "b")
        scene.accept({"a": assigned["a"]})
        scene.workers["b"].send(
            w.AssignJobResponse(assignment_id=assigned["b"].assignment_id, accepted=False, reason="draining")
        )
        for name in ("a", "b"):
            await scene.workers[name].expect(server.AbortCluster)
        outcome = "SELECT outcome FROM cluster_attempt WHERE cluster_job = :id"
        await scene.pool.until(outcome, "PrepareFailed", id=cluster)
        assert await scene.pool.scalar("SELECT attempts FROM cluster_job WHERE id = :id", id=cluster) == 0
        open_rows = "SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL"
        assert await scene.pool.scalar(open_rows) == 0
        entry = scene.pool.services.clusters.book.get(cluster)
        assert entry is not None
        assert entry.is_complete


async def test_a_broken_connection_before_the_start_fails_the_prepare(
    database: Database, tmp_path: Path
) -> None:
    async with running_scene(database, tmp_path) as scene:
        await scene.connect("a")
        async with scene.session("b"):
            cluster = await scene.submit("pair", [("x", False), ("y", False)])
            scene.ask("a", "b")
            scene.accept({"a": (await scene.assigned("a"))["a"]})
        await scene.workers["a"].expect(server.AbortCluster)
        await scene.pool.until(
            "SELECT outcome FROM cluster_attempt WHERE cluster_job = :id", "PrepareFailed", id=cluster
        )


async def test_a_started_member_survives_a_broken_connection_and_hears_what_it_missed(
    database: Database, tmp_path: Path
) -> None:
    async with running_scene(database, tmp_path) as scene:
        await scene.connect("a")
        async with scene.session("b"):
            cluster = await scene.submit("pair", [("x", False), ("y", False)])
            assigned = await scene.run("a", "b")
        attempt = assigned["a"].cluster.attempt
        scene.signal("a", assigned["a"], seq=1, payload=b"1")
        await scene.workers["a"].expect(server.ReportAck)
        held = w.ResumedJob(
            assignment_id=assigned["b"].assignment_id,
            job_id=assigned["b"].job_id,
            state=ResumeState.HELD,
            seq=0,
            signal_n=0,
        )
        b = await scene.connect("b", running=[held])
        assert (await b.expect(server.StartCluster)).attempt == attempt
        assert (await b.expect(server.ClusterSignal)).n == 1
        await scene.succeed("b", assigned["b"])
        await scene.pool.until("SELECT status FROM cluster_job WHERE id = :id", "Running", id=cluster)
