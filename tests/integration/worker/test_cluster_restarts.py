"""Members at a real agent across broken connections, restarts and hand-overs of the agent."""

import json
from functools import partial
from pathlib import Path

import pytest
import trio
from gradient_protocol.kinds import FailureKind, ResumeState
from gradient_protocol.messages import server
from gradient_protocol.messages import worker as w
from gradient_worker.agent import Agent
from gradient_worker.cluster_client import Signal, TimedOut
from gradient_worker.cluster_socket import cluster_socket_path
from gradient_worker.executor.job import Stop, StopCause

from tests.fakes.agent import Rig
from tests.fakes.server import FakeSession
from tests.integration.worker.members import (
    ATTEMPT,
    UNTIL_TOLD,
    Assign,
    Background,
    Program,
    barrier_signal,
    begun,
    end,
    in_thread,
    seat,
    signal,
    start,
)


async def test_a_lost_connection_loses_and_doubles_no_signal(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.automatic.discard("reports")
        job = assign(UNTIL_TOLD, cluster=seat())
        await start(session, job)
        await begun(rig, job)
        send = Background(nursery, partial(Program(rig, job).send, "t", "x"))
        assert (await session.expect(w.ClusterSignalReport)).seq == 1
        session.send(signal(1, "one"))
        taken = await in_thread(Program(rig, job).recv)
        assert taken.n == 1
        session.send(signal(4, "two"))
        await trio.sleep(0.1)
        session.scope.cancel()
        second = Background(nursery, partial(Program(rig, job).send, "t", "y"))
        session = await rig.server.session(nursery, resume=False)
        listed = await session.resume()
        assert [(one.state, one.seq, one.signal_n) for one in listed.running] == [(ResumeState.RUNNING, 0, 4)]
        assert not send.is_done
        reports = [await session.expect(w.ClusterSignalReport) for _ in range(2)]
        assert [(one.seq, one.payload) for one in reports] == [(1, b"x"), (2, b"y")]
        assert [await send.outcome(), await second.outcome()] == [None, None]
        session.send(signal(4, "two"))
        session.send(signal(5, "three"))
        heard = [await in_thread(Program(rig, job).recv) for _ in range(2)]
        assert [one.text for one in heard] == ["two", "three"]
        with pytest.raises(TimedOut):
            await in_thread(partial(Program(rig, job).recv, timeout_secs=0.1))
        end(rig, job)
        await session.expect(w.JobCompleted)


async def test_a_restarted_agent_goes_on_with_a_members_signals(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    job = assign(UNTIL_TOLD, cluster=seat())
    async with rig.agent():
        session = await rig.server.session(nursery)
        await start(session, job)
        await begun(rig, job)
        session.send(signal(1, "taken"))
        session.send(signal(2, "kept"))
        session.send(barrier_signal(3, "b", 0))
        first = Program(rig, job)
        assert (await in_thread(first.recv)).text == "taken"
        session.automatic.discard("reports")
        send = Background(nursery, partial(Program(rig, job).send, "t", "x"))
        assert (await session.expect(w.ClusterSignalReport)).seq == 1
        waits = Background(nursery, partial(Program(rig, job).barrier, "b", timeout_secs=20))
        assert (await session.expect(w.ClusterSignalReport)).seq == 2
        hears = Background(nursery, partial(Program(rig, job).recv, "late", timeout_secs=20))
        await trio.sleep(0.2)
    assert cluster_socket_path(rig.base_dir, job.assignment_id).exists()
    async with rig.agent() as agent:
        session = await rig.server.session(nursery, resume=False)
        session.automatic.discard("reports")
        listed = await session.resume()
        assert [(one.state, one.seq, one.signal_n) for one in listed.running] == [(ResumeState.RUNNING, 0, 3)]
        again = [await session.expect(w.ClusterSignalReport) for _ in range(2)]
        assert [(one.seq, one.topic) for one in again] == [(1, "t"), (2, "gradient.barrier")]
        session.send(server.ReportAck(assignment_id=job.assignment_id, seq=2))
        assert await send.outcome() is None
        assert (await in_thread(first.recv)).text == "kept"
        session.send(signal(4, "late", topic="late"))
        heard = await hears.outcome()
        assert isinstance(heard, Signal)
        assert heard.text == "late"
        assert not waits.is_done
        session.send(barrier_signal(5, "b", 1))
        assert await waits.outcome() is None
        await session.expect_none(w.ClusterSignalReport, for_secs=0.1)
        await rejects_a_second_member(session, assign)
        assert running_members(agent) == 1
        end(rig, job)
        rig.server.reports[job.assignment_id] = list(again)
        session.automatic.add("reports")
        await session.expect(w.JobCompleted)


async def rejects_a_second_member(session: FakeSession, assign: Assign) -> None:
    session.send(assign("true", cluster=seat()))
    assert not (await session.expect(w.AssignJobResponse)).accepted


def running_members(agent: Agent) -> int:
    return sum(1 for job in agent.jobs if job.member is not None)


async def test_an_agent_that_hands_over_leaves_the_socket_to_the_next(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    job = assign(UNTIL_TOLD, cluster=seat())
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        await start(session, job)
        await begun(rig, job)
        waits = Background(nursery, Program(rig, job).recv)
        agent.stop_taking_jobs("worker restarting")
        agent.stop_all(Stop(StopCause.HANDED_OVER, "the agent goes"))
        await trio.sleep(0.2)
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(signal(1, "one"))
        heard = await waits.outcome()
        assert isinstance(heard, Signal)
        assert heard.text == "one"
        end(rig, job)
        await session.expect(w.JobCompleted)


async def test_what_was_passed_and_refused_is_known_to_the_next_agent(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    job = assign(UNTIL_TOLD, cluster=seat())
    async with rig.agent():
        session = await rig.server.session(nursery)
        await start(session, job)
        await begun(rig, job)
        session.send(barrier_signal(1, "b", 0))
        session.send(barrier_signal(2, "b", 1))
        await in_thread(partial(Program(rig, job).barrier, "b"))
        rig.server.refuse_signals = "too many"
        path = cluster_socket_path(rig.base_dir, job.assignment_id)
        assert "too many" in await ask(path, {"op": "send", "id": "mine", "topic": "t"})
        rig.server.refuse_signals = None
    async with rig.agent():
        session = await rig.server.session(nursery)
        await begun(rig, job)
        assert "too many" in await ask(path, {"op": "send", "id": "mine", "topic": "t"})
        with pytest.raises(TimedOut, match="client:0, client:1 did not come"):
            await in_thread(partial(Program(rig, job).barrier, "b", timeout_secs=0.2))
        # It was entered, so that the next call goes on waiting for the same one.
        session.send(barrier_signal(3, "b", 0))
        session.send(barrier_signal(4, "b", 1))
        await in_thread(partial(Program(rig, job).barrier, "b"))
        sent = rig.server.reports[job.assignment_id]
        assert [one.topic for one in sent if isinstance(one, w.ClusterSignalReport)] == [
            "gradient.barrier",
            "t",
            "gradient.barrier",
        ]
        end(rig, job)
        await session.expect(w.JobCompleted)


async def ask(path: Path, request: dict[str, object]) -> str:
    with trio.fail_after(10):
        while True:
            try:
                stream = await trio.open_unix_socket(path)
                break
            except ConnectionRefusedError:  # until the next agent has it
                await trio.sleep(0.02)
        async with stream:
            await stream.send_all(json.dumps(request).encode() + b"\n")
            return bytes(await stream.receive_some(10_000)).decode()


async def test_abort_cluster_reaches_a_member_that_an_earlier_agent_started(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    job = assign(UNTIL_TOLD, cluster=seat())
    async with rig.agent():
        session = await rig.server.session(nursery)
        await start(session, job)
        await begun(rig, job)
        await in_thread(partial(Program(rig, job).send, "t", "x"))
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(server.AbortCluster(attempt=ATTEMPT, reason="a member failed"))
        failed = await session.expect(w.JobFailed)
        assert (failed.seq, failed.kind, failed.error) == (2, FailureKind.ABORTED, "a member failed")
        assert not cluster_socket_path(rig.base_dir, job.assignment_id).exists()


async def test_a_member_that_only_sent_signals_is_not_taken_for_built(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    job = assign(f"gradient-cluster send t x; {UNTIL_TOLD}", cluster=seat())
    async with rig.agent():
        session = await rig.server.session(nursery)
        await start(session, job)
        await session.expect(w.ClusterSignalReport)
    await trio.sleep(0.1)
    end(rig, job)
    async with rig.agent():
        session = await rig.server.session(nursery)
        await session.expect(w.JobCompleted)
    kinds = [type(one).__name__ for one in rig.server.reports[job.assignment_id]]
    assert kinds == ["ClusterSignalReport", "JobUpdate", "JobCompleted"]
