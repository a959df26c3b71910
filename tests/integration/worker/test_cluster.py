"""Members of clusters at a real agent: holds, aborts, and what they run."""

from pathlib import Path

import pytest
import trio
from gradient_protocol.kinds import FailureKind, JobKind
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_worker.cluster_client import AttemptOver

from tests.fakes.agent import Rig
from tests.integration.worker.members import (
    ATTEMPT,
    ROSTER,
    UNTIL_TOLD,
    Assign,
    Program,
    begun,
    end,
    in_thread,
    seat,
    signal,
    start,
)


async def test_abort_job_releases_a_held_job_and_its_slot(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    rig.settings["build_max_concurrent"] = "1"
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("true", cluster=seat())
        session.send(job)
        assert (await session.expect(w.AssignJobResponse)).accepted
        session.send(assign("true"))
        refused = await session.expect(w.AssignJobResponse)
        assert not refused.accepted, "a held job counts against the slots"
        session.messages.clear()
        session.send(server.AbortJob(assignment_id=job.assignment_id, reason="by the user"))
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.error) == (FailureKind.ABORTED, "by the user")
        await session.expect(w.RequestJob, lambda m: m.kind is JobKind.BUILD)
        session.send(server.StartCluster(attempt=ATTEMPT, roster=ROSTER))
        await session.expect_none(w.JobUpdate)


async def test_an_assignment_sent_again_is_accepted_again_and_starts_once(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign(f"echo x >> {count}; {UNTIL_TOLD}", cluster=seat())
        await start(session, job)
        await begun(rig, job)
        session.send(job)
        assert (await session.expect(w.AssignJobResponse)).accepted
        session.send(server.StartCluster(attempt=ATTEMPT, roster=ROSTER))
        await trio.sleep(0.1)
        assert not [
            one for one in session.messages if isinstance(getattr(one, "update", None), shapes.Started)
        ]
        end(rig, job)
        await session.expect(w.JobCompleted)
    assert count.read_text() == "x\n"


async def test_abort_cluster_ends_a_running_member(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign(UNTIL_TOLD, cluster=seat())
        await start(session, job)
        await begun(rig, job)
        session.send(server.AbortCluster(attempt=ATTEMPT, reason="the primary succeeded"))
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.error) == (FailureKind.ABORTED, "the primary succeeded")
        with pytest.raises(AttemptOver):
            await in_thread(Program(rig, job).recv)


async def test_a_signal_to_who_is_held_or_not_here_is_dropped_and_counted(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        session.send(signal(1))
        job = assign(UNTIL_TOLD, cluster=seat())
        session.send(job)
        assert (await session.expect(w.AssignJobResponse)).accepted
        session.send(signal(1))
        session.send(server.StartCluster(attempt=ATTEMPT, roster=ROSTER))
        session.send(signal(1, "heard"))
        await begun(rig, job)
        assert (await in_thread(Program(rig, job).recv)).text == "heard"
        assert agent.signals_dropped == 2
        end(rig, job)
        await session.expect(w.JobCompleted)


async def test_a_hold_expires_while_the_session_lives(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        session.send(assign("true", cluster=seat(hold_secs=0.2)))
        assert (await session.expect(w.AssignJobResponse)).accepted
        failed = await session.expect(w.JobFailed, within_secs=2)
        assert (failed.kind, failed.error) == (FailureKind.ABORTED, "cluster start timed out")
        assert agent.slots.taken(JobKind.BUILD) == 0
        # A start that raced the deadline changes nothing any more.
        session.send(server.StartCluster(attempt=ATTEMPT, roster=ROSTER))
        await session.expect_none(w.JobUpdate)


async def test_a_draining_worker_rejects_a_member_and_an_aborted_attempt_is_remembered(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        # It overtook its assignment: nothing is held that nobody would end.
        session.send(server.AbortCluster(attempt=ATTEMPT, reason="a member rejected"))
        session.send(assign("true", cluster=seat()))
        answer = await session.expect(w.AssignJobResponse)
        assert (answer.accepted, answer.reason) == (False, "this cluster attempt was aborted")
        other = shapes.ClusterSeat(attempt="another", role="server", index=0, hold_secs=40)
        agent.stop_taking_jobs("worker draining")
        session.send(assign("true", cluster=other))
        answer = await session.expect(w.AssignJobResponse)
        assert (answer.accepted, answer.reason) == (False, "worker draining")
        assert agent.slots.taken(JobKind.BUILD) == 0


async def test_a_member_runs_its_command_though_its_outputs_are_held(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        first = assign("echo one > $out", name="joint")
        session.send(first)
        await session.expect(w.JobCompleted)
        rig.server.paths.clear()  # the server answers Skip to no member
        build = first.job
        assert isinstance(build, shapes.BuildJob)
        again = assign("echo two > $out", name="joint", outputs=build.outputs, cluster=seat())
        await start(session, again)
        await session.expect(w.JobCompleted, lambda m: m.assignment_id == again.assignment_id)
        report = rig.server.reports[again.assignment_id][0]
        assert isinstance(report, w.JobUpdate)
        assert isinstance(report.update, shapes.BuildOutput)
        assert not report.update.substituted
        stored = rig.server.paths[build.outputs[0].path]
        assert stored.nar_hash == report.update.outputs[0].nar_hash
        assert b"two" in stored.nar


async def test_an_output_of_an_earlier_attempt_stands_in_for_none(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        first = assign("echo one > $out", name="joint")
        session.send(first)
        await session.expect(w.JobCompleted)
        build = first.job
        assert isinstance(build, shapes.BuildJob)
        await start(session, assign("true", name="joint", outputs=build.outputs, cluster=seat()))
        failed = await session.expect(w.JobFailed)
        assert failed.kind is FailureKind.PERMANENT
        assert "out" in failed.error
