"""`gradient-worker` as processes of its own: signals, wrong starts, doctor, registration."""

import http.server
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest
import trio
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages import server
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import Draining
from gradient_worker.cli import run_command_line

from tests.fakes.agent import Rig
from tests.fakes.server import PEER, TOKEN

Assign = Callable[..., server.AssignJob]


def command(rig: Rig, name: str, *more: str) -> list[str]:
    flags = ["--base-dir", str(rig.base_dir), "--build-cgroup", "off", "--orphan-kill-secs", "20"]
    url = f"unix://{rig.base_dir.parent / 'server'}"
    return [sys.executable, "-m", "gradient_worker", name, *flags, "--server-url", url, *more]


def prepare(rig: Rig, mode: int = 0o600) -> None:
    rig.base_dir.mkdir(exist_ok=True)
    peers = rig.base_dir / "peers"
    peers.write_text(f"{PEER}:{TOKEN}\n")
    peers.chmod(mode)


@asynccontextmanager
async def started(rig: Rig, nursery: trio.Nursery) -> AsyncIterator[trio.Process]:
    prepare(rig)
    arguments = command(rig, "run", "--system-cpu-core-score", "1000")
    process = await trio.lowlevel.open_process(arguments, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.fixture
async def listening(rig: Rig, nursery: trio.Nursery) -> Rig:
    await nursery.start(rig.server.listen, rig.base_dir.parent / "server")
    return rig


async def test_sigterm_hands_builds_over_to_the_next_agent(
    listening: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    job = assign(f"echo begun; while ! test -e {go}; do sleep 0.05; done; echo > $out")
    async with started(listening, nursery) as process:
        session = await listening.server.session(nursery)
        session.send(job)
        with trio.fail_after(10):
            while not listening.server.logs:
                await trio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        await session.expect(Draining)
        with trio.fail_after(5):
            assert await process.wait() == 0
        assert not [message for message in session.messages if isinstance(message, w.JobFailed)]
    async with started(listening, nursery):
        session = await listening.server.session(nursery, resume=False)
        listed = await session.resume()
        assert [one.assignment_id for one in listed.running] == [job.assignment_id]
        go.touch()
        await session.expect(w.JobCompleted)


async def test_sigusr1_lets_jobs_end(listening: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    async with started(listening, nursery) as process:
        session = await listening.server.session(nursery)
        session.send(assign("sleep 0.5; echo > $out"))
        await session.expect(w.AssignJobResponse)
        process.send_signal(signal.SIGUSR1)
        await session.expect(w.JobCompleted)
        with trio.fail_after(5):
            assert await process.wait() == 0


async def test_a_second_sigint_ends_the_builds(listening: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    async with started(listening, nursery) as process:
        session = await listening.server.session(nursery)
        session.send(assign("sleep 60"))
        await session.expect(w.AssignJobResponse)
        process.send_signal(signal.SIGINT)
        await session.expect(Draining)
        process.send_signal(signal.SIGINT)
        assert (await session.expect(w.JobFailed)).kind is FailureKind.CANCELED
        with trio.fail_after(5):
            assert await process.wait() == 0


async def test_an_idle_agent_is_small_and_quiet(listening: Rig, nursery: trio.Nursery) -> None:
    async with started(listening, nursery) as process:
        await listening.server.session(nursery)
        await trio.sleep(0.5)
        watched = psutil.Process(process.pid)
        before = sum(watched.cpu_times()[:2])
        await trio.sleep(2)
        assert sum(watched.cpu_times()[:2]) - before < 0.1
        assert watched.memory_info().rss < 44 * 1024 * 1024


def refused(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, **environment},
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_a_peers_file_that_others_may_read_keeps_the_agent_from_starting(rig: Rig) -> None:
    prepare(rig, 0o644)
    done = refused(command(rig, "run"))
    assert done.returncode == 2
    assert last_line(done) == (
        f"gradient-worker: {rig.base_dir}/peers may be read by others; run: chmod 600 {rig.base_dir}/peers"
    )


async def test_a_second_agent_on_one_base_directory_is_refused(rig: Rig, nursery: trio.Nursery) -> None:
    async with rig.agent():
        done = await trio.to_thread.run_sync(refused, command(rig, "run"))
    assert done.returncode == 2
    assert "another worker uses the store" in last_line(done)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--server-ur", "x"], "--server-url"),
        (["run", "--store", "nix"], "the Nix store is not part of this version"),
        (["run", "--server-url", "ftp://x"], "ftp://x"),
        (["run", "--config", "/nowhere"], "cannot read /nowhere"),
        (["rum"], "Did you mean 'run'?"),
        (["run", "extra"], "extra"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ["--base-dir", str(tmp_path)] if arguments[0] == "run" else []
    assert run_command_line([*arguments, *where]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert says in error


async def test_doctor_is_content_with_a_good_host(listening: Rig, nursery: trio.Nursery) -> None:
    prepare(listening)

    async def sessions() -> None:
        while True:
            await listening.server.session(nursery, resume=False)

    nursery.start_soon(sessions)
    done = await trio.to_thread.run_sync(refused, command(listening, "doctor"))
    assert done.returncode == 0, done.stdout
    lines = {line.split()[1].rstrip(":"): line.split()[0] for line in done.stdout.splitlines()}
    assert lines["token"] == lines["server"] == lines["clock"] == lines["store"] == lines["disk"] == "ok"
    assert lines["cgroup"] == "warn"


def test_doctor_names_what_is_wrong(rig: Rig) -> None:
    prepare(rig, 0o640)
    done = refused(command(rig, "doctor"))
    assert done.returncode == 1
    assert "FAIL token" in done.stdout
    assert "chmod 600" in done.stdout


def test_the_benchmark_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["benchmark", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cpu_core_score"] > 0


GRADIENT_CLUSTER = [sys.executable, "-c", "from gradient_worker.cluster_cli import main; main()"]


def test_gradient_cluster_outside_of_an_attempt() -> None:
    done = refused([*GRADIENT_CLUSTER, "roster"])
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("send topic <&-", "standard input is closed, and there is no PAYLOAD"),
        ("recv >&-", "standard output is closed"),
        ("roster > /dev/full", "standard input or output: No space left on device"),
    ],
)
def test_gradient_cluster_without_a_place_to_read_or_write(call: str, told: str, tmp_path: Path) -> None:
    with member(tmp_path) as (_agent, environment):
        # Nobody answers: what cannot be done is not asked for.
        done = subprocess.run(
            ["/bin/sh", "-c", f"{shlex.join(GRADIENT_CLUSTER)} {call}"],
            env=environment, capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, f"gradient-cluster: {told}\n")


def test_gradient_cluster_waits_as_long_as_it_is_told_and_can_be_interrupted(tmp_path: Path) -> None:
    with member(tmp_path) as (agent, environment):
        waiting = subprocess.Popen(
            [*GRADIENT_CLUSTER, "recv", "--timeout", "1e300"], env=environment, stderr=subprocess.PIPE
        )
        connection, _ = agent.accept()
        with connection:
            assert json.loads(connection.recv(4096)) == {"op": "recv"}
            waiting.send_signal(signal.SIGINT)
            _, errors = waiting.communicate(timeout=30)
    assert (waiting.returncode, errors) == (130, b"")


@contextmanager
def member(directory: Path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """The socket of a member, at which this test is the agent, and the environment of its programs."""
    roster = [{"role": "a", "index": 0, "worker": "w", "endpoint": None, "primary": True}]
    path = str(directory / "socket")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(path)
        agent.listen()
        agent.settimeout(30)
        yield (
            agent,
            {
                **os.environ,
                "GRADIENT_CLUSTER_ROLE": "a",
                "GRADIENT_CLUSTER_INDEX": "0",
                "GRADIENT_CLUSTER_SOCKET": path,
                "GRADIENT_CLUSTER_ROSTER": json.dumps(roster),
            },
        )


@contextmanager
def http_server(status: int, body: object) -> Iterator[tuple[str, list[tuple[str, dict[str, object]]]]]:
    seen: list[tuple[str, dict[str, object]]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            seen.append((self.headers["Authorization"], json.loads(self.rfile.read(length))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}", seen
        finally:
            listener.shutdown()
            thread.join()


def registration(rig: Rig, url: str, tmp_path: Path) -> list[str]:
    key = tmp_path / "key"
    key.write_text("the-key\n")
    return command(rig, "run", "--register", "--server-http-url", url, "--server-api-key-file", str(key))


def test_registering_writes_the_peers_file(rig: Rig, tmp_path: Path) -> None:
    answer = {"worker_id": "w", "peer_id": "p", "peers_line": "p:a-token"}
    with http_server(201, answer) as (url, seen):
        process = subprocess.Popen(registration(rig, url, tmp_path), stderr=subprocess.PIPE, text=True)
        peers = rig.base_dir / "peers"
        with process:
            for _ in range(1000):
                if peers.exists():
                    break
                try:
                    process.wait(0.02)
                except subprocess.TimeoutExpired:
                    continue
                break
            process.terminate()
            _, errors = process.communicate(timeout=10)
    assert peers.read_text() == "p:a-token\n"
    assert peers.stat().st_mode & 0o777 == 0o600
    key, body = seen[0]
    assert key == "Bearer the-key"
    assert body["worker_id"] == (rig.base_dir / "worker_id").read_text().strip()
    assert body["project"] is None
    assert "a-token" not in errors
    assert "the-key" not in errors


@pytest.mark.parametrize(("status", "says"), [(401, "refused the API key"), (500, "answered 500")])
def test_a_refused_registration_is_one_line(rig: Rig, tmp_path: Path, status: int, says: str) -> None:
    with http_server(status, {}) as (url, _seen):
        done = refused(registration(rig, url, tmp_path))
    assert done.returncode == 3
    assert says in last_line(done)
