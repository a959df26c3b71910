"""The real worker, with its real runner, against the suite, over memory streams and over TCP."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from gradient_protocol.address import Address
from gradient_worker.agent import Agent
from gradient_worker.app import run_worker
from gradient_worker.config import load
from trio.testing import memory_stream_pair

from tests.conformance.raw import Fields
from tests.conformance.worker_side import CHECKS, MakeWorker, check_heartbeats

HASHES = "0123456789abcdfghijklmnpqrsvwxyz"
PEER, TOKEN = "peer", "token"


class RealWorker:
    """An agent whose dialled connections end up at the check."""

    def __init__(self, base_dir: Path) -> None:
        self.worker_id = ""
        self.tokens = {PEER: TOKEN}
        self._base_dir = base_dir
        self._builds = 0
        self._deliver, self._arrivals = trio.open_memory_channel[trio.abc.Stream](8)
        self._port: int | None = None

    async def accept(self) -> trio.abc.Stream:
        return await self._arrivals.receive()

    def build(self, script: str) -> Fields:
        self._builds += 1
        letter = HASHES[self._builds]
        return {
            "type": "Build",
            "project": "p",
            "drv_path": letter * 32 + "-noop-1.0.drv",
            "name": "noop-1.0",
            "system": "any",
            "features": [],
            "command": ["/bin/sh", "-c", script],
            "env": {},
            "inputs": [],
            "outputs": [{"name": "out", "path": letter * 32 + "-noop-1.0"}],
            "timeout_secs": 60.0,
            "max_silent_secs": 60.0,
        }

    async def dial(self, _address: Address) -> trio.abc.Stream:
        if self._port is not None:
            return await trio.open_tcp_stream("127.0.0.1", self._port)
        ours, theirs = memory_stream_pair()
        await self._deliver.send(ours)
        return theirs

    async def listen(self, *, task_status: trio.TaskStatus[None]) -> None:
        """From now on connections come over TCP."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener:
            self._port = listener.socket.getsockname()[1]
            task_status.started()
            while True:
                await self._deliver.send(await listener.accept())

    @asynccontextmanager
    async def running(self, *, tcp: bool) -> AsyncIterator["RealWorker"]:
        """Starts the agent, and ends it and its runner."""
        self._base_dir.mkdir()
        peers = self._base_dir / "peers"
        peers.write_text(f"{PEER}:{TOKEN}\n")
        peers.chmod(0o600)
        flags = {
            "base_dir": str(self._base_dir),
            "system_cpu_core_score": "1000",
            "build_max_concurrent": "4",
            "build_cgroup": "off",
            "orphan_kill_secs": "20",
        }
        config = load(file=None, environment={}, flags=flags, hostname="host", cpu_count=2).config

        async def never(_agent: Agent) -> None:
            await trio.sleep_forever()

        try:
            async with trio.open_nursery() as nursery:
                if tcp:
                    await nursery.start(self.listen)
                nursery.start_soon(lambda: run_worker(config, dial=self.dial, leave=never))
                with trio.fail_after(20):
                    while not (self._base_dir / "worker_id").exists():
                        await trio.sleep(0.02)
                self.worker_id = (self._base_dir / "worker_id").read_text().strip()
                yield self
                nursery.cancel_scope.cancel()
        finally:
            lock = self._base_dir / "runner" / "lock"
            if lock.exists() and lock.read_text().strip():
                os.kill(int(lock.read_text()), signal.SIGTERM)


@pytest.fixture(params=["memory", "tcp"])
def make_worker(request: pytest.FixtureRequest, tmp_path: Path) -> MakeWorker:
    """A worker with an empty store."""
    return lambda: RealWorker(tmp_path / "worker").running(tcp=request.param == "tcp")


def _cases() -> list[object]:
    """The heartbeat's ten seconds are real."""
    slow = pytest.mark.slow
    return [pytest.param(check, marks=slow) if check is check_heartbeats else check for check in CHECKS]


@pytest.mark.parametrize("check", _cases(), ids=lambda check: check.__name__.removeprefix("check_"))
async def test_worker(check: Callable[[MakeWorker], Awaitable[None]], make_worker: MakeWorker) -> None:
    await check(make_worker)
