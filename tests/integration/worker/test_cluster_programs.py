"""What the programs of a member find and do, at a real agent: environment, socket, command."""

import json
import os
import socket
import tempfile
from functools import partial
from pathlib import Path

import pytest
import trio
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_worker.cluster_client import Refused, TimedOut
from gradient_worker.cluster_socket import cluster_socket_path

from tests.fakes.agent import Rig
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


async def test_a_member_finds_itself_and_the_others_in_its_environment(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    script = """
        gradient-cluster roster --json > roster.json
        gradient-cluster roster
        printf '%s' "$GRADIENT_CLUSTER_ROSTER" > variable.json
        echo "$GRADIENT_CLUSTER_ROLE $GRADIENT_CLUSTER_INDEX"
        test -S "$GRADIENT_CLUSTER_SOCKET" && echo socket
        mkdir $out && cp *.json $out
    """
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        job = assign(script, cluster=seat())
        await start(session, job)
        await session.expect(w.JobCompleted)
        assert rig.server.logs[job.assignment_id].decode().splitlines() == [
            "server:0\tw0\t10.0.0.1\tme",
            "client:0\tw1\t-\tprimary",
            "client:1\tw2\t-\t-",
            "server 0",
            "socket",
        ]
        assert isinstance(job.job, shapes.BuildJob)
        out = agent.shop.store.real_path(job.job.outputs[0].path)
        roster = json.loads((out / "roster.json").read_text())
        assert roster == json.loads((out / "variable.json").read_text())
        assert roster[0] == {
            "role": "server",
            "index": 0,
            "worker": "w0",
            "endpoint": "10.0.0.1",
            "primary": False,
        }
        assert not cluster_socket_path(rig.base_dir, job.assignment_id).exists()


async def test_signals_go_out_and_come_in_through_the_command(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    script = """
        gradient-cluster send address --to client 10.0.0.1:5000 || exit 10
        printf 'from stdin' | gradient-cluster send note || exit 11
        test "$(gradient-cluster recv --from client:1 --timeout 10 answer)" = second || exit 12
        test "$(gradient-cluster recv --timeout 10)" = first || exit 13
        gradient-cluster recv --timeout 0.1; test $? = 1 || exit 14
        gradient-cluster send gradient.barrier x; test $? = 1 || exit 15
        gradient-cluster send t x --to nobody; test $? = 1 || exit 16
        gradient-cluster recv --timeout never; test $? = 2 || exit 17
        head -c 1048576 /dev/zero | gradient-cluster send t; test $? = 1 || exit 20
        gradient-cluster send t x --to "client:²"; test $? = 1 || exit 21
        GRADIENT_CLUSTER_ROSTER=? PYTHONIOENCODING=ascii gradient-cluster roster || exit 22
        gradient-cluster barrier done --timeout 10 || exit 18
        echo > $out
    """
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign(script, cluster=seat())
        await start(session, job)
        sent = await session.expect(w.ClusterSignalReport)
        assert (sent.seq, sent.attempt, sent.topic, sent.payload) == (1, ATTEMPT, "address", b"10.0.0.1:5000")
        assert sent.to == shapes.SignalTarget(role="client")
        sent = await session.expect(w.ClusterSignalReport)
        assert (sent.seq, sent.to, sent.payload) == (2, None, b"from stdin")
        session.send(signal(1, "first"))
        session.send(signal(2, "second", topic="answer", index=1))
        entered = await session.expect(w.ClusterSignalReport)
        assert (entered.seq, entered.to, entered.topic) == (3, None, "gradient.barrier")
        assert entered.payload == b"done"
        session.send(barrier_signal(3, "done", 0))
        session.send(barrier_signal(4, "done", 1))
        ended = await session.expect_any(w.JobCompleted, w.JobFailed)
        assert isinstance(ended, w.JobCompleted), ended


async def test_a_base_directory_may_be_too_deep_for_the_address_of_a_socket(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    rig.base_dir = tmp_path / ("deep" * 30) / "worker"
    rig.base_dir.parent.mkdir()
    async with rig.agent():
        session = await rig.server.session(nursery)
        await start(session, assign("gradient-cluster send t x && echo > $out", cluster=seat()))
        assert (await session.expect(w.ClusterSignalReport)).payload == b"x"
        await session.expect(w.JobCompleted)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
async def test_only_the_builds_own_user_is_answered(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o711)
        rig.base_dir = Path(directory) / "worker"
        async with rig.agent():
            session = await rig.server.session(nursery)
            job = assign(UNTIL_TOLD, cluster=seat())
            await start(session, job)
            await begun(rig, job)
            path = cluster_socket_path(rig.base_dir, job.assignment_id)
            assert await ask_as(65534, path) == b""
            os.chown(rig.base_dir / "builds" / job.assignment_id / "build", 65533, -1)
            assert await ask_as(65534, path) == b""
            assert json.loads(await ask_as(65533, path))["role"] == "server"
            end(rig, job)
            await session.expect(w.JobCompleted)
        rig.end_runner()


async def ask_as(uid: int, path: Path) -> bytes:
    """What another user gets to hear."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.seteuid(uid)
    try:
        connection.connect(str(path))
    finally:
        os.seteuid(0)
    async with trio.SocketStream(trio.socket.from_stdlib_socket(connection)) as stream:
        try:
            await stream.send_all(b'{"op":"roster"}\n')
            return bytes(await stream.receive_some(10_000))
        except trio.BrokenResourceError:
            return b""


async def test_a_send_fails_when_the_server_refuses_the_signal(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign(UNTIL_TOLD, cluster=seat())
        await start(session, job)
        await begun(rig, job)
        rig.server.refuse_signals = "the attempt has 10000 signals"
        program = Program(rig, job)
        with pytest.raises(Refused, match="10000 signals"):
            await in_thread(partial(program.send, "t", "x"))
        with pytest.raises(Refused, match="10000 signals"):
            await in_thread(partial(program.barrier, "b"))
        rig.server.refuse_signals = None
        await in_thread(partial(program.send, "t", "x"))
        end(rig, job)
        await session.expect(w.JobCompleted)


async def test_many_sends_at_once_keep_within_the_window(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.automatic.discard("reports")
        job = assign(UNTIL_TOLD, cluster=seat())
        await start(session, job)
        await begun(rig, job)
        sends = [Background(nursery, partial(Program(rig, job).send, "t", str(n))) for n in range(12)]
        first = [await session.expect(w.ClusterSignalReport) for _ in range(8)]
        assert [report.seq for report in first] == list(range(1, 9))
        await session.expect_none(w.ClusterSignalReport)
        session.send(server.ReportAck(assignment_id=job.assignment_id, seq=8))
        rest = [await session.expect(w.ClusterSignalReport) for _ in range(4)]
        session.send(server.ReportAck(assignment_id=job.assignment_id, seq=12))
        assert [await send.outcome() for send in sends] == [None] * 12
        assert sorted(int(report.payload) for report in [*first, *rest]) == list(range(12))
        end(rig, job)


async def test_a_program_that_dies_leaves_its_signal_to_the_next(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign(UNTIL_TOLD, cluster=seat())
        await start(session, job)
        await begun(rig, job)
        path = cluster_socket_path(rig.base_dir, job.assignment_id)
        for _ in range(70):  # more than may be connected at a time
            stream = await trio.open_unix_socket(path)
            await stream.send_all(b'{"op":"recv"}\n')
            await stream.aclose()
        stream = await trio.open_unix_socket(path)
        await stream.send_all(b'{"op":"recv"}\n')
        session.send(signal(1, "once"))
        with trio.fail_after(5):
            assert json.loads(await stream.receive_some(10_000))["payload"] == "once"
        await stream.aclose()
        taken = await in_thread(Program(rig, job).recv)
        assert (taken.n, taken.text) == (1, "once")
        with pytest.raises(TimedOut):
            await in_thread(partial(Program(rig, job).recv, timeout_secs=0.1))
        end(rig, job)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"nonsense", "malformed"),
        (b'{"op":"shout"}', "shout"),
        (b'{"op":"recv","timeout":1}', "timeout"),
        (b'{"op":"recv","timeout_secs":-1}', "timeout_secs"),
        (b'{"op":"send","id":"1","topic":"t","payload":"a","payload_base64":"YQ=="}', "exclude"),
        (b'{"op":"send","id":"1","topic":"t","payload_base64":"%"}', "payload_base64"),
        (b'{"op":"send","id":"","topic":"t"}', "id"),
        (b'{"op":"take","id":"1","n":7}', "signal 7"),
        (b'{"op":"wait","barrier":"b","k":1}', "not entered"),
        (b'{"op":"send","id":"1","topic":"t","payload":"' + b"x" * 600_000, "at most"),
    ],
)
async def test_a_bad_line_is_answered(
    rig: Rig, assign: Assign, nursery: trio.Nursery, line: bytes, says: str
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign(UNTIL_TOLD, cluster=seat())
        await start(session, job)
        await begun(rig, job)
        stream = await trio.open_unix_socket(cluster_socket_path(rig.base_dir, job.assignment_id))
        with trio.fail_after(5):
            await stream.send_all(line + b"\n")
            answer = json.loads(await stream.receive_some(10_000))
        assert not answer["ok"]
        assert says in answer["error"]
        await stream.aclose()
        end(rig, job)
