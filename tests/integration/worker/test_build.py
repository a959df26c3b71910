"""A real agent and its real runner build what a scripted server assigns."""

from collections.abc import Callable

import trio
from gradient_protocol.kinds import FailureKind, JobKind, JobStage
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w

from tests.fakes.agent import Rig

Assign = Callable[..., server.AssignJob]


async def test_a_build_goes_all_the_way(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        asked = await session.expect(w.RequestJob, lambda m: m.kind is JobKind.BUILD)
        assert asked
        job = assign(
            'echo building; echo "$GREETING $GRADIENT_CORES" > $out', env={"GREETING": "hi"}, cores=3
        )
        session.send(job)
        answer = await session.expect(w.AssignJobResponse)
        assert answer.accepted
        stages = [(await session.expect(w.JobUpdate, lambda m: m.seq is None)).update.stage for _ in range(3)]
        assert stages == [JobStage.PREFETCH, JobStage.BUILD, JobStage.UPLOAD]
        output = (await session.expect(w.JobUpdate, lambda m: m.seq == 1)).update
        assert isinstance(output, shapes.BuildOutput)
        completed = await session.expect(w.JobCompleted)
        assert completed.seq == 2
        path = job.job.outputs[0].path
        assert b"hi 3\n" in rig.server.paths[path].nar
        assert output.outputs[0].nar_hash == rig.server.paths[path].nar_hash
        assert bytes(rig.server.logs[job.assignment_id]) == b"building\n"
        with trio.fail_after(5):
            while len(agent.jobs):
                await trio.sleep(0.01)
        assert not (rig.base_dir / "builds" / job.assignment_id).exists()


async def test_a_command_that_fails_is_permanent(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign("echo oh no; exit 3"))
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.error) == (
            FailureKind.PERMANENT,
            "the command ended with exit status 3",
        )
        assert failed.metrics is not None
