"""Real memory: builds that use a lot of it, on a worker that says it has little (scoring.md, Memory).

An outside sampler reads the resident memory of the builds' processes. The worker's `ramTotalMb` is far
below what the host has, so that only the scheduler keeps the builds apart.
"""

import sqlite3
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from gradient_protocol.limits import HEARTBEAT_SECS

from tests.acceptance.pool import Pool
from tests.acceptance.trees import Build

EATERS = 8
EATEN_MB = 600
TOTAL_MB = 2560
# Python itself, beside what it was told to take.
INTERPRETER_MB = 12
HOLD_SECS = 4.0
EAT = f"{sys.executable} -c 'import time; eaten = b\"x\" * ({EATEN_MB} << 20); time.sleep({HOLD_SECS})'"


class Sampler:
    """Looks at the builds below a runner until it is told to stop: how many at once, and MiB in all."""

    def __init__(self, runner: psutil.Process) -> None:
        self._runner = runner
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_builds = 0
        self.most_mb = 0.0

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            sizes = []
            for process in self._runner.children(recursive=True):
                try:
                    sizes.append(process.memory_info().rss / 2**20)
                except psutil.NoSuchProcess:
                    continue
            self.most_builds = max(self.most_builds, sum(size > EATEN_MB / 4 for size in sizes))
            self.most_mb = max(self.most_mb, sum(sizes))


def column(pool: Pool, query: str) -> list[float]:
    """What the server has recorded."""
    database = sqlite3.connect(f"file:{pool.server_dir / 'gradient.db'}?mode=ro", uri=True)
    try:
        return [row[0] for row in database.execute(query)]
    finally:
        database.close()


def build_all(pool: Pool, round_number: int) -> Sampler:
    """Eight builds of one package at once; what was seen from outside while they ran."""
    builds = [
        Build(f"eater-{round_number}.{number}", f"{EAT}; echo {number} > $out") for number in range(EATERS)
    ]
    runner = pool.workers["host-m"].runner()
    assert runner is not None
    with Sampler(runner) as sampler:
        # Prioritised, or the CPU of a busy machine alone would keep them one at a time.
        view = pool.ended(pool.submit(pool.tree(*builds), "--prioritize"), secs=180.0)
    assert view["status"] == "Completed", view
    assert all(build["status"] == "Completed" for build in view["builds"])
    return sampler


def test_eight_hungry_builds_are_never_more_at_once_than_fit(memory_cgroup: Path) -> None:
    if psutil.virtual_memory().available < 6 * EATEN_MB * 2**20:
        pytest.skip("this machine has too little free memory")
    with Pool() as pool:
        pool.start_server("--metrics-instance-interval-secs", "5")
        pool.start_worker(
            "host-m", "--build-max-concurrent", str(EATERS), "--build-cgroup", str(memory_cgroup),
            "--system-ram-total-mb", str(TOTAL_MB),
        )  # fmt: skip
        unmeasured = build_all(pool, 1)
        peaks = column(pool, "SELECT peak_ram_mb FROM derivation_metric ORDER BY id")
        assert len(peaks) == EATERS
        for peak in peaks:
            assert peak == pytest.approx(EATEN_MB + INTERPRETER_MB, rel=0.1)
        # Each is held at the 1024 MB of an instance that has measured nothing, then at the mean.
        assert 1 <= unmeasured.most_builds <= 4
        time.sleep(6)
        measured = build_all(pool, 2)
        ready_at = column(
            pool, "SELECT ready_at FROM dispatched_job WHERE derivation_build IS NOT NULL ORDER BY ready_at"
        )
    # All eight of a round could be asked for at once: no heartbeat came between to tell of the first.
    for of_round in (ready_at[:EATERS], ready_at[EATERS:]):
        assert len(of_round) == EATERS
        assert max(of_round) - min(of_round) < HEARTBEAT_SECS
    # Four peaks fit, and a fifth would not; the figures of a heartbeat are up to 10 s old.
    assert 2 <= measured.most_builds <= 4
    for sampler in (unmeasured, measured):
        assert sampler.most_mb <= TOTAL_MB
