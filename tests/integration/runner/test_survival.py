"""Who outlives whom: agents come and go, runners die, and no build is lost or left behind unnoticed."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from gradient_worker.runner.client import connect, connect_or_spawn
from gradient_worker.runner.layout import ExitReason
from gradient_worker.runner.options import RunnerOptions
from gradient_worker.runner.values import RunnerGone

from .conftest import Pool, end_process, gone
from .test_builds import read_pid


async def test_a_build_outlives_its_agent_and_the_next_one_finds_it(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "while [ ! -e go ]; do sleep 0.02; done; echo done"))
        await client.start(pool.spec("a2", "exit 9"))
        first_pid = (await client.info()).pid
    async with pool.client() as client:
        assert (await client.info()).pid == first_pid
        states = {build.assignment_id: build.is_running for build in await client.list()}
        assert states["a1"]
        (pool.base_dir / "builds/a1/build/go").touch()
        assert (await client.wait("a1")).code == 0
        assert (await client.wait("a2")).code == 9
    assert pool.log("a1") == b"done\n"


async def test_several_agents_that_start_at_once_share_one_runner(pool: Pool) -> None:
    pids: list[int] = []

    async def one() -> None:
        async with pool.client() as client:
            pids.append((await client.info()).pid)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(one)
    assert len(pids) == 4
    assert len(set(pids)) == 1


async def test_a_dead_runner_is_noticed_and_the_next_one_clears_up_after_it(pool: Pool) -> None:
    script = "(setsid sh -c 'echo $$ > pid; exec sleep 60' &) ; sleep 60"
    async with pool.client() as client:
        await client.start(pool.spec("ended", "echo whole"))
        await client.wait("ended")
        main = await client.start(pool.spec("a1", script))
        stray = await read_pid(pool.base_dir / "builds/a1/build/pid")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_kill_soon, (await client.info()).pid)
            with pytest.raises(RunnerGone):
                await client.wait("a1")
        with pytest.raises(RunnerGone):
            await client.list()
    async with pool.client() as client:
        with trio.fail_after(5):
            await gone(stray)
        by_id = {build.assignment_id: build for build in await client.list()}
        assert by_id["ended"].exit is not None
        assert by_id["ended"].exit.code == 0
        lost = await client.wait("a1")
        assert (lost.reason, lost.code, lost.signal) == (ExitReason.RUNNER_DIED, None, None)
        assert lost.started_at == main.started_at
        assert lost.duration_secs is None
        await client.forget("a1")


async def _kill_soon(pid: int) -> None:
    await trio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


async def test_without_an_agent_for_long_the_runner_ends_its_builds_and_itself(pool: Pool) -> None:
    options = RunnerOptions(base_dir=pool.base_dir, cgroup="off", orphan_kill_secs=0.5, grace_secs=0.3)
    async with pool.client(options) as client:
        runner = (await client.info()).pid
        await client.start(pool.spec("a1", "echo $$ > pid; trap '' TERM; while :; do sleep 0.1; done"))
        build = await read_pid(pool.base_dir / "builds/a1/build/pid")
        await trio.sleep(1)  # an agent that says nothing is an agent all the same
        assert (await client.list())[0].is_running
    with trio.fail_after(10):
        await gone(build)
        await gone(runner)
    assert await connect(pool.base_dir) is None
    async with pool.client() as client:
        assert (await client.wait("a1")).reason is ExitReason.RUNNER_DIED


async def test_told_to_stop_the_runner_ends_its_builds_and_refuses_new_ones(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "exec sleep 60"))
        os.kill((await client.info()).pid, signal.SIGTERM)
        ended = await client.wait("a1")
        assert (ended.reason, ended.signal) == (ExitReason.RUNNER_DIED, signal.SIGTERM)
    assert (pool.base_dir / "builds/a1/result").exists()


async def test_a_second_runner_on_the_directory_is_refused_with_one_line(pool: Pool) -> None:
    async with pool.client():
        second = await trio.run_process(
            [sys.executable, "-m", "gradient_worker.runner", "--base-dir", str(pool.base_dir)],
            check=False,
            capture_stderr=True,
        )
    assert second.returncode == 4
    assert second.stderr.decode().count("\n") == 1
    assert b"another runner serves" in second.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--base-dir"], "--base-dir DIR is needed"),
        (["--bas-dir", "x"], "unknown argument --bas-dir"),
        (["--base-dir", "x", "--grace-secs", "soon"], "--grace-secs needs a number of seconds"),
        (["--base-dir", "/proc/x"], "cannot be used"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradient_worker.runner", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


async def test_a_base_directory_with_a_long_name_works(tmp_path: Path) -> None:
    base = tmp_path / ("long-" * 20) / ("name-" * 20)
    client = await connect_or_spawn(RunnerOptions(base_dir=base, cgroup="off"))
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run)
        pid = (await client.info()).pid
        nursery.cancel_scope.cancel()
    await end_process(pid)
    with trio.fail_after(5):
        await gone(pid)


async def test_no_runner_is_said_in_the_runners_own_words(tmp_path: Path) -> None:
    (tmp_path / "base").write_text("a file")
    with pytest.raises(RunnerGone, match="cannot be used"):
        await connect_or_spawn(RunnerOptions(base_dir=tmp_path / "base"))


async def test_garbage_on_the_socket_ends_that_connection_alone(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "exec sleep 60"))
        for garbage in (b"\xc1" * 10, b"\x93\x01\x02\x03", b"\xdd\xff\xff\xff\xff" * 100):
            stream = await trio.open_unix_socket(str(pool.base_dir / "runner" / "socket"))
            await stream.send_all(garbage)
            await stream.send_eof()
            with trio.fail_after(5):
                while await stream.receive_some():
                    pass
            await stream.aclose()
        assert (await client.list())[0].is_running


async def test_the_idle_runner_is_small(pool: Pool) -> None:
    async with pool.client() as client:
        for number in range(20):
            await client.start(pool.spec(f"a{number}", "true"))
            await client.wait(f"a{number}")
            await client.forget(f"a{number}")
        pid = (await client.info()).pid
        used_before = _cpu_secs(pid)
        await trio.sleep(1)
        assert _cpu_secs(pid) - used_before < 0.02
        status = Path(f"/proc/{pid}/status").read_text()
    rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert rss_kib < 14 * 1024


def _cpu_secs(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_runner_loads_nothing_of_the_agents() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", "import gradient_worker.runner.main, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {
        "hashlib",
        "subprocess",
        "trio",
        "msgspec",
        "structlog",
        "typing",
        "dataclasses",
        "pathlib",
    }
    loaded = set(listed.stdout.split())
    assert not heavy & loaded
    shared = {name for name in loaded if name.startswith("gradient_protocol.")}
    assert shared == {"gradient_protocol.notify"}, "on the standard library alone"


async def test_a_full_disk_truncates_the_log_and_does_not_stop_the_build(pool: Pool) -> None:
    # A limit on file size stands for the full disk: the write fails the same way.
    async with pool.client() as client:
        pid = (await client.info()).pid
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        await client.start(pool.spec("a1", "head -c 1000000 /dev/zero; exit 3"))
        ended = await client.wait("a1")
    assert (ended.code, ended.log_truncated) == (3, True)
    assert ended.log_bytes + ended.log_discarded_bytes == 1_000_000
