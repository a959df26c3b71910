"""What an agent that starts finds of the one before, and what the one that goes leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from gradient_protocol.kinds import ResumeState
from gradient_protocol.messages import server
from gradient_protocol.messages import worker as w
from gradient_worker.runner.client import RunnerClient
from gradient_worker.runner.values import BuildExit, RunnerGone

from tests.fakes.agent import Rig

Assign = Callable[..., server.AssignJob]


async def appears(file: Path) -> None:
    with trio.fail_after(30):
        while not file.exists():
            await trio.sleep(0.01)


@pytest.mark.parametrize("ended_meanwhile", [False, True])
async def test_a_build_outlives_its_agent(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path, ended_meanwhile: bool
) -> None:
    go, begun = tmp_path / "go", tmp_path / "begun"
    job = assign(
        f"echo before; touch {begun}; while ! test -e {go}; do sleep 0.05; done; echo after; echo > $out"
    )
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(job)
        await appears(begun)
    if ended_meanwhile:
        go.touch()
        await appears(rig.base_dir / "builds" / job.assignment_id / "result")
    async with rig.agent():
        session = await rig.server.session(nursery, resume=False)
        listed = await session.resume()
        assert [(one.assignment_id, one.state) for one in listed.running] == [
            (job.assignment_id, ResumeState.RUNNING)
        ]
        go.touch()
        await session.expect(w.JobCompleted)
        assert bytes(rig.server.logs[job.assignment_id]) == b"before\nafter\n"


async def test_an_agent_that_goes_takes_the_end_of_its_connection_for_no_end_of_a_build(
    rig: Rig, assign: Assign, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = trio.Event()

    async def wait(_client: RunnerClient, _assignment_id: str) -> BuildExit:
        """As it ends where the connection to the runner is cancelled first."""
        waits.set()
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise RunnerGone("the runner is gone") from None

    job = assign("sleep 0.2; echo > $out")
    async with rig.agent():
        session = await rig.server.session(nursery)
        with monkeypatch.context() as patched:
            patched.setattr(RunnerClient, "wait", wait)
            session.send(job)
            with trio.fail_after(30):
                await waits.wait()
    async with rig.agent():
        session = await rig.server.session(nursery, resume=False)
        listed = await session.resume()
        assert [one.state for one in listed.running] == [ResumeState.RUNNING]
        await session.expect(w.JobCompleted)


async def test_reports_outlive_the_agent(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    job = assign("echo > $out")
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.automatic.discard("reports")
        session.send(job)
        await session.expect(w.JobCompleted)
    async with rig.agent() as agent:
        session = await rig.server.session(nursery, resume=False)
        listed = await session.resume()
        assert [(one.state, one.seq) for one in listed.running] == [(ResumeState.DONE, 0)]
        await session.expect(w.JobUpdate, lambda m: m.seq == 1)
        assert (await session.expect(w.JobCompleted)).seq == 2
        with trio.fail_after(5):
            while len(agent.jobs):
                await trio.sleep(0.01)
    async with rig.agent():
        session = await rig.server.session(nursery, resume=False)
        assert not (await session.resume()).running


async def test_builds_that_no_journal_names_are_ended(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign(f"touch {begun}; sleep 60"))
        await appears(begun)
    (rig.base_dir / "journal").unlink()
    async with rig.agent() as agent:
        assert not (await (await agent.shop.runner.client()).list())
