"""Real memory, and builds that wait for it: a large one beside a stream of small ones, and one that is larger
than every worker (scoring.md, Contexts; policies.md, ResourceSaturationRule).

Small builds last until the test lets them end, so that nothing depends on how fast this host is. The control
and the test of the reservation differ in one thing: a prioritised build may wait at once, another only after
60 s.
"""

import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.acceptance.alter import altered
from tests.acceptance.pool import Pool, by_name
from tests.acceptance.processes import wait_until
from tests.acceptance.trees import Build

TOTAL_MB = 512
# More slots than small builds fit, of which four do. With one of them beside it the large build does not, and
# the huge one never does.
SLOTS, FIT = 6, 4
SMALL_MB, LARGE_MB, HUGE_MB = 110, 420, 560
# Whatever else this host does is not what these tests are about.
NEVER_SATURATED = {
    "gradient_server.scoring.rules.saturation:CPU_SATURATED_PCT": 1000.0,
    "gradient_server.scoring.rules.saturation:CPU_SATURATED_PCT_BUILTIN": 1000.0,
}
# What is free is told by heartbeats, and every step of the tests waits for one.
QUICK_HEARTBEATS = {"gradient_worker.heartbeat:HEARTBEAT_SECS": 1.0}


def eater(name: str, mb: int, last: str = "time.sleep(0.1)") -> Build:
    """A build that touches so much memory, and does something with it in hand."""
    code = f'import pathlib, time\neaten = b"x" * ({mb} << 20)\n{last}'
    return Build(name, f"{sys.executable} -c '{code}'; echo {name} > $out")


class Stream:
    """Small builds of one evaluation, each of which lasts until it is let go."""

    def __init__(self, pool: Pool, round_number: int, count: int) -> None:
        self.pool = pool
        self.names = [f"small-{round_number}.{number}" for number in range(count)]
        builds = [
            eater(name, SMALL_MB, f'while not pathlib.Path("{self._gate(name)}").exists(): time.sleep(0.05)')
            for name in self.names
        ]
        self.evaluation = pool.submit(pool.tree(*builds))

    def _gate(self, name: str) -> Path:
        return self.pool.directory / f"{name}.ends"

    def running(self) -> set[str]:
        view = self.pool.evaluation(self.evaluation)
        return {build["name"] for build in view["builds"] if build["stage"] == "Build"}

    def wait_running(self, count: int, *, without: str = "") -> set[str]:
        def enough() -> set[str] | None:
            found = self.running()
            return found if len(found) == count and without not in found else None

        return wait_until(f"{count} builds of the stream", enough)

    def let_go(self, *names: str) -> None:
        for name in names:
            self._gate(name).touch()


@dataclass(frozen=True, slots=True)
class Ran:
    """Where and when a build ran, in wall seconds of the server."""

    worker: str
    assigned_at: float
    finished_at: float


def ran(pool: Pool) -> dict[str, Ran]:
    """Every assignment of a build that has ended, by the build's name."""
    database = sqlite3.connect(f"file:{pool.server_dir / 'gradient.db'}?mode=ro", uri=True)
    try:
        rows = database.execute(
            "SELECT d.name, w.name, a.assigned_at, a.finished_at FROM dispatched_job a"
            " JOIN derivation_build b ON b.id = a.derivation_build JOIN derivation d ON d.id = b.derivation"
            " JOIN worker w ON w.id = a.worker WHERE a.finished_at IS NOT NULL"
        ).fetchall()
    finally:
        database.close()
    return {name: Ran(*rest) for name, *rest in rows}


def completed(pool: Pool, *evaluations: str) -> None:
    for evaluation in evaluations:
        view = pool.ended(evaluation)
        assert view["status"] == "Completed", view


@pytest.fixture(scope="module")
def measured(memory_cgroup: Path) -> Iterator[Pool]:
    """A pool that knows what each of the three takes."""
    if psutil.virtual_memory().available < 2 * TOTAL_MB * 2**20:
        pytest.skip("this machine has too little free memory")
    with Pool() as pool:
        pool.start_server(environment=altered(constants=NEVER_SATURATED))
        pool.start_worker(
            "host-m", "--build-max-concurrent", str(SLOTS), "--build-cgroup", str(memory_cgroup),
            "--system-ram-total-mb", str(TOTAL_MB), environment=altered(constants=QUICK_HEARTBEATS),
        )  # fmt: skip
        sizes = {"small": SMALL_MB, "large": LARGE_MB, "huge": HUGE_MB}
        completed(pool, pool.submit(pool.tree(*(eater(f"{name}-0", mb) for name, mb in sizes.items()))))
        yield pool


def why(pool: Pool, evaluation: str, name: str, ending: str) -> dict[str, str]:
    """Each worker's reasons why the build waits, once those of host-m end so."""

    def told() -> dict[str, str] | None:
        build = by_name(pool.evaluation(evaluation)).get(name)
        answer = {} if build is None else pool.get(f"/jobs/build:{build['id']}/why")
        reasons = {one["name"]: " ".join(one["reasons"]) for one in answer.get("workers", [])}
        return reasons if reasons.get("host-m", "").endswith(ending) else None

    return wait_until(f"why {name} waits: {ending}", told)


def begun_after(pool: Pool, name: str, stream: Stream) -> int:
    """How many builds of the stream began after this one."""
    runs = ran(pool)
    return sum(runs[small].assigned_at > runs[name].assigned_at for small in stream.names)


def test_without_a_reservation_a_stream_of_small_builds_passes_a_large_one_by(measured: Pool) -> None:
    stream = Stream(measured, 1, FIT + 2)
    running = stream.wait_running(FIT)
    large = measured.submit(measured.tree(eater("large-1", LARGE_MB)))
    why(measured, large, "large-1", "are released there")
    for _ in range(2):
        ended = running.pop()
        stream.let_go(ended)
        running = stream.wait_running(FIT, without=ended)
    stream.let_go(*stream.names)
    completed(measured, stream.evaluation, large)
    assert begun_after(measured, "large-1", stream) == 0


def test_a_large_build_starts_amid_the_stream_by_its_reservation(measured: Pool) -> None:
    stream = Stream(measured, 2, FIT + 2)
    running = stream.wait_running(FIT)
    large = measured.submit(measured.tree(eater("large-2", LARGE_MB)), "--prioritize")
    why(measured, large, "large-2", "are released there, and what is released is kept for it")
    stream.let_go(*running)
    completed(measured, large)
    stream.let_go(*stream.names)
    completed(measured, stream.evaluation)
    assert begun_after(measured, "large-2", stream) == 2


def test_a_build_larger_than_every_worker_runs_alone_on_the_largest(measured: Pool) -> None:
    measured.start_worker(
        "host-s", "--build-cgroup", "off", "--system-ram-total-mb", str(TOTAL_MB // 2),
        "--build-max-concurrent", str(SLOTS), environment=altered(constants=QUICK_HEARTBEATS),
    )  # fmt: skip
    # The smaller host has room for two of them.
    stream = Stream(measured, 3, FIT)
    stream.wait_running(FIT)
    huge = measured.submit(measured.tree(eater("huge-3", HUGE_MB)))
    told = why(
        measured, huge, "huge-3", "; no worker has more, and it starts alone there once what runs has ended"
    )
    assert "it needs 0.6 GiB of 0.5 GiB, so it may not fit" in told["host-m"]
    assert told["host-s"].endswith("it needs 0.6 GiB of 0.2 GiB, so it may not fit")
    stream.let_go(*stream.names)
    completed(measured, stream.evaluation, huge)
    runs = ran(measured)
    alone = runs.pop("huge-3")
    assert alone.worker == "host-m"
    on_the_same = [run for run in runs.values() if run.worker == "host-m"]
    assert on_the_same
    assert all(
        run.finished_at <= alone.assigned_at or run.assigned_at >= alone.finished_at for run in on_the_same
    )
