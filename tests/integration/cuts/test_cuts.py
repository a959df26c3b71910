"""The connection is cut at every step of a job's life, and the outcome is always the same.

Real agents with their runners, a real server, and a network in memory that breaks at a named frame: before
it, within it, or after it. One worker evaluates and uploads the source, another downloads it, builds and
uploads. A run without cuts names the steps; then each is cut in turn. `GRADIENT_ALL_CUTS=1` tries all of
them (two minutes), else a sample is tried.
"""

import os
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import gradient_worker.reconnect
import pytest
import structlog
from gradient_server.db.runner import Database

from tests.fakes.agent import Rig
from tests.fakes.cuts import Cut, Network, When
from tests.fakes.pool import Pool, running_pool

log = structlog.get_logger(__name__)

ALL_CUTS = os.environ.get("GRADIENT_ALL_CUTS") == "1"
SAMPLE = 12
RECIPE = """
[[build]]
name = "first-{number}"
inputs = ["source"]
command = ["/bin/sh", "-c", "echo first >> {starts}; echo a line; cat $SOURCE/data > $out"]

[[build]]
name = "second-{number}"
inputs = ["first-{number}"]
command = ["/bin/sh", "-c", "echo second >> {starts}; cat $FIRST $FIRST > $out"]
"""


@dataclass
class Life:
    """A pool of two workers, and one evaluation after the other."""

    pool: Pool
    network: Network
    directory: Path
    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    async def live(self, cut: Cut | None) -> bool:
        """One evaluation with two builds; whether the connection was cut. Asserts what must be."""
        self.tried += 1
        number = self.tried
        starts = self.directory / f"starts-{number}"
        tree = self._tree(number, starts)
        self.network.begin(cut)
        evaluation = await self.pool.submit(url=tree.as_uri())
        ended = "SELECT status FROM evaluation WHERE id = :id"
        await self.pool.until(ended, "Completed", within_secs=30, id=evaluation)
        # Nothing was started twice, nothing is left over, and every output is there.
        assert sorted(starts.read_text().split()) == ["first", "second"], cut
        await self.pool.until("SELECT count(*) FROM dispatched_job WHERE finished_at IS NULL", 0)
        await self.pool.until("SELECT count(*) FROM upload WHERE NOT committed", 0)
        stored = "SELECT count(*) FROM cached_path WHERE path LIKE :name"
        for name in (f"%-first-{number}", f"%-second-{number}"):
            assert await self.pool.scalar(stored, name=name) == 1, cut
        assert not self.pool.services.uploads.running, cut
        assert await self._log_of(f"first-{number}") == b"a line\n", cut
        return self.network.was_cut

    async def _log_of(self, name: str) -> bytes:
        """What the server keeps of the build's log."""
        query = (
            "SELECT dispatched_job.id FROM dispatched_job"
            " JOIN derivation_build ON derivation_build.id = dispatched_job.derivation_build"
            " JOIN derivation ON derivation.id = derivation_build.derivation"
            " WHERE derivation.name = :name AND dispatched_job.accepted_at IS NOT NULL"
            " ORDER BY dispatched_job.accepted_at DESC LIMIT 1"  # one may have been lost before
        )
        assignment = await self.pool.scalar(query, name=name)
        assert isinstance(assignment, str)
        return self.pool.services.logs.read(assignment, 0, 1000)

    def _tree(self, number: int, starts: Path) -> Path:
        tree = self.directory / f"tree-{number}"
        tree.mkdir()
        (tree / "gradient.toml").write_text(RECIPE.format(number=number, starts=starts))
        (tree / "data").write_bytes(random.Random(number).randbytes(40_000))
        git = ["git", "-C", str(tree), "-c", "user.name=T", "-c", "user.email=t@example.org"]
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "tree"]):
            subprocess.run([*git, *arguments], check=True)
        return tree


@asynccontextmanager
async def agent_of(
    pool: Pool, network: Network, name: str, base_dir: Path, **limits: str
) -> AsyncIterator[None]:
    registration = await pool.register(name)
    base_dir.mkdir()
    (base_dir / "worker_id").write_text(f"{registration.worker_id}\n")
    rig = Rig(base_dir, settings=limits, dial=network.dialler(name), peers_line=registration.peers_line)
    try:
        async with rig.agent():
            yield
    finally:
        rig.end_runner()


@pytest.fixture
async def life(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Life]:
    # How long an agent waits before it comes back is not what is tried here.
    monkeypatch.setattr(gradient_worker.reconnect, "BACKOFF_FIRST_SECS", 0.01)
    monkeypatch.setattr(gradient_worker.reconnect, "BACKOFF_LIMIT_SECS", 0.05)
    tmp_path.chmod(0o755)
    network = Network()
    async with running_pool(sqlite_database, tmp_path / "server", listener=network.listener()) as pool:
        evaluator = agent_of(pool, network, "e", tmp_path / "e", build_max_concurrent="0")
        builder = agent_of(pool, network, "b", tmp_path / "b", eval_max_concurrent="0")
        async with evaluator, builder:
            yield Life(pool, network, tmp_path)


@pytest.mark.timeout(3600 if ALL_CUTS else 120)
async def test_a_cut_anywhere_changes_nothing(life: Life) -> None:
    assert await life.live(None)
    steps = list(life.network.steps)
    messages = {step.split()[1] for step in steps}
    assert {"InitConnection", "AssignJob", "JobCompleted", "ReportAck", "UploadChunk"} <= messages
    cuts = [Cut(step, when) for step in steps for when in When]
    chosen = cuts if ALL_CUTS else random.Random(0).sample(cuts, SAMPLE)
    reached = 0
    for cut in chosen:
        reached += await life.live(cut)
    log.info("cuts", steps=len(steps), possible=len(cuts), tried=len(chosen), reached=reached)
    # Heartbeats, log chunks and what was said together come at other moments in another run.
    assert reached >= len(chosen) // 2
