"""A server, workers that really move NARs, and a disk that is soon full."""

import os
import random
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from gradient_protocol.messages import server
from gradient_protocol.messages.worker import ResumedJob
from gradient_server.db.runner import Database

from tests.fakes.pool import Pool, running_pool
from tests.fakes.transfers import CutStream, Mover
from tests.fakes.worker import FakeWorker, resumed


class Scene:
    """A running pool and its movers; `job` is the assignment of each, by name, once it has one."""

    def __init__(self, pool: Pool, base_dir: Path) -> None:
        self.pool = pool
        self.base_dir = base_dir
        self.movers: dict[str, Mover] = {}
        self.jobs: dict[str, server.AssignJob] = {}

    async def mover(self, name: str) -> Mover:
        """A registered worker with a store of its own."""
        self.movers[name] = Mover.open(self.base_dir / name, await self.pool.register(name))
        return self.movers[name]

    @asynccontextmanager
    async def session(
        self, name: str, *, sent_bytes: int | None = None, received_bytes: int | None = None
    ) -> AsyncIterator[tuple[FakeWorker, str]]:
        """A session with an evaluation, taken in the first and resumed in every other; its id.

        The connection breaks after so many bytes.
        """
        stream: trio.abc.Stream = await self.pool.stream()
        if sent_bytes is not None or received_bytes is not None:
            stream = CutStream(stream, sent_bytes=sent_bytes, received_bytes=received_bytes)
        job = self.jobs.get(name)
        running: list[ResumedJob] = [] if job is None else [resumed(job, 0)]
        async with self.movers[name].session(stream, running=running) as worker:
            if job is None:
                await self.pool.submit()
                job = self.jobs[name] = await self.movers[name].take_job(worker)
                await self.pool.until(
                    "SELECT count(*) FROM dispatched_job WHERE id = :id AND status = 'Accepted'",
                    1,
                    id=job.assignment_id,
                )
            yield worker, job.assignment_id

    async def nothing_runs(self) -> None:
        """Returns once no slot of either kind is in use."""
        services = self.pool.services
        with trio.fail_after(10):
            while services.uploads.running or services.uploads.waiting or services.downloads.running:
                await trio.sleep(0.01)

    def stored_files(self) -> list[Path]:
        """Everything in the NAR store."""
        return [file for file in (self.base_dir / "server" / "nar").rglob("*") if file.is_file()]


@pytest.fixture
async def scene(sqlite_database: Database, tmp_path: Path) -> AsyncIterator[Scene]:
    async with running_pool(sqlite_database, tmp_path / "server") as pool, AsyncExitStack() as stack:
        made = Scene(pool, tmp_path)
        stack.callback(lambda: [mover.store.close() for mover in made.movers.values()])
        yield made


@pytest.fixture
def noise() -> Callable[[int], bytes]:
    """So many bytes that do not compress, the same for the same number."""
    return lambda size: random.Random(size).randbytes(size)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.getuid() != 0:
        pytest.skip("only root can mount a small file system")
    place = tmp_path / "small-disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
