"""A real runner process in a directory of its own, ended after the test whatever happened."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio
from gradient_worker.runner.client import RunnerClient, connect_or_spawn
from gradient_worker.runner.options import RunnerOptions
from gradient_worker.runner.values import BuildSpec

from tests.fixtures.cgroups import made_memory_cgroup

PATH = "/usr/local/bin:/usr/bin:/bin"


class Pool:
    """One base directory and the runner that serves it."""

    def __init__(self, base_dir: Path, cgroup: str) -> None:
        self.base_dir = base_dir
        self.options = RunnerOptions(base_dir=base_dir, cgroup=cgroup, orphan_kill_secs=30, grace_secs=0.3)

    @asynccontextmanager
    async def client(self, options: RunnerOptions | None = None) -> AsyncIterator[RunnerClient]:
        """A connected client; leaving the block is the agent's death, and the runner goes on."""
        client = await connect_or_spawn(options or self.options)
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            yield client
            nursery.cancel_scope.cancel()

    def spec(self, assignment_id: str, script: str, **changes: object) -> BuildSpec:
        """A build that runs a shell script."""
        root = self.base_dir / "builds" / assignment_id
        fields: dict[str, object] = {
            "assignment_id": assignment_id,
            "derivation_hash": f"hash-of-{assignment_id}",
            "argv": ("/bin/sh", "-c", script),
            "env": {"PATH": PATH, "HOME": str(root / "home"), "out": str(root / "outputs" / "out")},
            "timeout_secs": 60.0,
            "max_silent_secs": 60.0,
            "log_limit_bytes": None,
        }
        return BuildSpec(**{**fields, **changes})  # type: ignore[arg-type]  # keywords of a test

    def log(self, assignment_id: str) -> bytes:
        """The output of a build."""
        return (self.base_dir / "builds" / assignment_id / "log").read_bytes()

    def runner_pid(self) -> int | None:
        """The runner that has the lock, None if there is none."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.base_dir / "runner" / "lock").read_text())
        return None


@pytest.fixture
def start_pool(tmp_path: Path) -> Callable[[str], AbstractAsyncContextManager[Pool]]:
    @asynccontextmanager
    async def start(cgroup: str) -> AsyncIterator[Pool]:
        pool = Pool(tmp_path / "base", cgroup)
        try:
            yield pool
        finally:
            with trio.CancelScope(shield=True):
                await end_process(pool.runner_pid())

    return start


@pytest.fixture
async def pool(start_pool: Callable[[str], AbstractAsyncContextManager[Pool]]) -> AsyncIterator[Pool]:
    """Without cgroups, as an ordinary user would run it."""
    async with start_pool("off") as started:
        yield started


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A cgroup of our own with the memory controller, on v1 or v2."""
    with made_memory_cgroup("test") as path:
        yield path


async def end_process(pid: int | None) -> None:
    """Ends a runner and waits until it is gone."""
    if pid is None or not Path(f"/proc/{pid}").exists():
        return
    os.kill(pid, signal.SIGTERM)
    with trio.move_on_after(10):
        await gone(pid)
        return
    os.kill(pid, signal.SIGKILL)


async def gone(pid: int) -> None:
    """Returns once a process has ended (it may be a zombie that its parent has not read)."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        await trio.sleep(0.01)
