"""The benchmark keeps its half second and measures the same work everywhere."""

import hashlib
import itertools
import os

from gradient_worker.meters import cpu_benchmark

CORPUS_SHA256 = "769a17dba734aee6662ff32fb956aec6ab6b354f3180fedc929988373090c66e"


def test_the_work_is_the_same_everywhere() -> None:
    data = cpu_benchmark.corpus()
    assert len(data) == 256 << 10
    assert hashlib.sha256(data).hexdigest() == CORPUS_SHA256


def test_a_core_of_twice_the_speed_scores_twice() -> None:
    def run(secs_each: float) -> float:
        ticks = itertools.count()
        return cpu_benchmark.run(clock=lambda: 0.0, timer=lambda: next(ticks) * secs_each).cpu_core_score

    slow, fast = run(0.002), run(0.001)
    assert abs(fast / slow - 2) < 0.001


def test_it_ends_in_time_however_slow_the_core_and_undoes_the_pinning() -> None:
    allowed = os.sched_getaffinity(0)
    now = itertools.count()
    result = cpu_benchmark.run(clock=lambda: float(next(now)))  # a second passes at each look
    assert result.runs == 3
    assert os.sched_getaffinity(0) == allowed
    real = cpu_benchmark.run()
    assert real.took_secs < 1
    assert real.cpu_core_score > 0
