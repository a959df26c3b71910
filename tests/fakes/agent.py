"""A real agent with its real runner, on a server that a test scripts."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
from gradient_worker.agent import Agent
from gradient_worker.app import run_worker
from gradient_worker.config import WorkerConfig, load
from gradient_worker.connector import Dial

from tests.fakes.server import PEER, TOKEN, FakeServer


@dataclass
class Rig:
    """Starts agents on one base directory, one after the other."""

    base_dir: Path
    server: FakeServer = field(default_factory=FakeServer)
    settings: dict[str, str] = field(default_factory=dict)
    dial: Dial | None = None
    peers_line: str = f"{PEER}:{TOKEN}"

    def config(self) -> WorkerConfig:
        """The configuration of the next agent."""
        flags = {
            "base_dir": str(self.base_dir),
            "system_cpu_core_score": "1000",
            "build_max_concurrent": "4",
            "build_cgroup": "off",
            "orphan_kill_secs": "20",
            **self.settings,
        }
        return load(file=None, environment={}, flags=flags, hostname="host", cpu_count=2).config

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Agent]:
        """An agent that dies, as by SIGKILL, at the end of the block: nothing of it says goodbye."""
        self.base_dir.mkdir(exist_ok=True)
        peers = self.base_dir / "peers"
        peers.write_text(f"{self.peers_line}\n")
        peers.chmod(0o600)

        async def never(_agent: Agent) -> None:
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            agent = await nursery.start(
                lambda task_status: run_worker(
                    self.config(), dial=self.dial or self.server.dial, leave=never, task_status=task_status
                )
            )
            yield agent
            nursery.cancel_scope.cancel()

    def end_runner(self) -> None:
        """End the runner that the agents left."""
        lock = self.base_dir / "runner" / "lock"
        if lock.exists() and lock.read_text().strip():
            os.kill(int(lock.read_text()), signal.SIGTERM)


def store_path(letter: str, name: str) -> str:
    """A store path that is told from others by one letter."""
    return letter * 32 + "-" + name
