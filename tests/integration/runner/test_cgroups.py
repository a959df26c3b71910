"""Builds in real cgroups: measured, swept, and killed for want of memory without harm to the runner."""

import os
import pwd
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio
from gradient_protocol.kinds import PeakSource
from gradient_worker.meters.cgroup import BuildCgroup
from gradient_worker.runner.layout import ExitReason

from .conftest import Pool, gone
from .test_builds import read_pid

StartPool = Callable[[str], AbstractAsyncContextManager[Pool]]
TAKE_48_MIB = "exec python3 -c 'b = bytearray(48 << 20); b[::4096] = b[::4096]; print(len(b))'"


async def test_a_build_is_measured_after_its_end_until_it_is_forgotten(
    start_pool: StartPool, memory_cgroup: Path
) -> None:
    async with start_pool(str(memory_cgroup)) as pool, pool.client() as client:
        build = await client.start(pool.spec("a1", TAKE_48_MIB))
        assert build.cgroup is not None
        assert build.cgroup.is_relative_to(memory_cgroup)
        assert build.cgroup.name == f"nix-build@hash-of-a1-{pwd.getpwuid(os.getuid()).pw_name}"
        ended = await client.wait("a1")
        assert (ended.code, ended.oom_killed, ended.host_killed) == (0, False, False)
        meter = BuildCgroup(build.cgroups)
        peak = meter.peak_ram()
        assert peak is not None
        assert 48 <= peak.mb < 200
        assert peak.source is PeakSource.PEAK
        cpu_time_ms = meter.cpu_time_ms()
        assert cpu_time_ms is not None
        assert cpu_time_ms > 0
        assert meter.oom_kills() == 0
        await client.forget("a1")
        assert not build.cgroup.exists()
        assert meter.peak_ram() == peak  # the last value stays


async def test_out_of_memory_is_told_from_an_ordinary_kill(
    start_pool: StartPool, memory_cgroup: Path
) -> None:
    limit = memory_cgroup / "memory.limit_in_bytes"
    limit = limit if limit.exists() else memory_cgroup / "memory.max"
    limit.write_text(str(30 << 20))
    async with start_pool(str(memory_cgroup)) as pool, pool.client() as client:
        build = await client.start(pool.spec("a1", TAKE_48_MIB))
        ended = await client.wait("a1")
        assert (ended.signal, ended.oom_killed, ended.host_killed) == (9, True, False)
        peak = BuildCgroup(build.cgroups).peak_ram()
        assert peak is not None
        assert 25 <= peak.mb <= 31  # the kernel lets a few pages over
        await client.start(pool.spec("a2", "kill -9 $$"))
        ended = await client.wait("a2")
        assert (ended.signal, ended.oom_killed) == (9, False)


async def test_below_the_runners_own_cgroup_builds_are_born_into_theirs_and_the_runner_stays_out(
    start_pool: StartPool,
) -> None:
    async with start_pool("auto") as pool, pool.client() as client:
        info = await client.info()
        if not info.cgroups:
            pytest.skip(info.cgroup_reason)
        before = Path(f"/proc/{info.pid}/cgroup").read_text()
        build = await client.start(pool.spec("a1", "cat /proc/self/cgroup"))
        assert Path(f"/proc/{info.pid}/cgroup").read_text() == before
        assert build.cgroup is not None
        await client.wait("a1")
        entered = {line.rpartition("/")[2] for line in pool.log("a1").decode().splitlines()}
        assert build.cgroup.name in entered
        assert sum(build.cgroup.name in line for line in pool.log("a1").decode().splitlines()) == len(
            build.cgroups
        )
        await client.forget("a1")
        assert not any(path.exists() for path in build.cgroups.values())


async def test_strays_with_an_empty_environment_are_found_by_their_cgroup(
    start_pool: StartPool, memory_cgroup: Path
) -> None:
    script = "(setsid env -i /bin/sh -c 'echo $$ > pid; exec sleep 60' &) ; while [ ! -s pid ]; do :; done"
    async with start_pool(str(memory_cgroup)) as pool, pool.client() as client:
        await client.start(pool.spec("other", "exec sleep 60"))
        await client.start(pool.spec("a1", script))
        with trio.fail_after(5):
            assert (await client.wait("a1")).code == 0
            await gone(int((pool.base_dir / "builds/a1/build/pid").read_text()))
        assert (await client.list())[0].is_running


async def test_the_same_derivation_again_gets_a_cgroup_of_its_own(
    start_pool: StartPool, memory_cgroup: Path
) -> None:
    async with start_pool(str(memory_cgroup)) as pool, pool.client() as client:
        first = await client.start(pool.spec("a1", "true", derivation_hash="same"))
        await client.wait("a1")
        second = await client.start(pool.spec("a2", "true", derivation_hash="same"))
        assert first.cgroup is not None
        assert second.cgroup is not None
        name = f"nix-build@same-{pwd.getpwuid(os.getuid()).pw_name}"
        assert (first.cgroup.name, second.cgroup.name) == (name, f"{name}.2")


async def test_the_next_runner_kills_by_cgroup_what_a_dead_one_left(
    start_pool: StartPool, memory_cgroup: Path
) -> None:
    script = "(setsid env -i /bin/sh -c 'echo $$ > pid; exec sleep 60' &) ; exec sleep 60"
    async with start_pool(str(memory_cgroup)) as pool:
        async with pool.client() as client:
            await client.start(pool.spec("a1", script))
            stray = await read_pid(pool.base_dir / "builds/a1/build/pid")
            runner = (await client.info()).pid
        os.kill(runner, signal.SIGKILL)
        async with pool.client() as client:
            with trio.fail_after(5):
                await gone(stray)
            assert (await client.wait("a1")).reason is ExitReason.RUNNER_DIED
            await client.forget("a1")


@pytest.mark.parametrize("setting", ["/sys/fs/cgroup/no-such-place", "/tmp", "off"])
async def test_without_cgroups_builds_run_all_the_same(start_pool: StartPool, setting: str) -> None:
    async with start_pool(setting) as pool, pool.client() as client:
        info = await client.info()
        assert info.cgroups == {}
        assert info.cgroup_reason.startswith("no cgroups: ")
        build = await client.start(pool.spec("a1", "exit 4"))
        assert (build.cgroup, (await client.wait("a1")).code) == (None, 4)
