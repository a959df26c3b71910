"""How fast one core is: a small fixed piece of integer- and branch-heavy work, timed at every start.

The work is zstandard's compressor (C, the same on every host) over a corpus that is generated, so that
it is the same everywhere. Scaled so that a core of a current desktop gets about 3000.
"""

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import zstandard

__all__ = ["BenchmarkResult", "corpus", "run"]

_BUDGET_SECS = 0.45
_RUNS_MAX = 200
_RUNS_MIN = 3
_CORPUS_BYTES = 256 << 10
_LEVEL = 9
_REFERENCE_SCORE = 3000.0
_REFERENCE_MIB_PER_SEC = 90.0
"""What a current desktop core reaches on this corpus at this level."""


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """`cpu_core_score`: 3000 is a current desktop core. `spread_pct`: (slowest - fastest) / median."""

    cpu_core_score: float
    runs: int
    spread_pct: float
    took_secs: float
    pinned_cpu: int | None


def corpus(length: int = _CORPUS_BYTES) -> bytes:
    """Text-like bytes: words of a skewed vocabulary, with numbers between. The same in every run."""
    source = random.Random(20)  # noqa: S311 - the same numbers everywhere are the point
    letters = "etaoinshrdlucmfwypvbgkqjxz_"
    words = ["".join(source.choices(letters, k=source.randint(2, 11))) for _ in range(2000)]
    parts: list[str] = []
    size = 0
    while size < length:
        rank = int(source.paretovariate(0.9)) % len(words)
        word = words[rank] if source.random() < 0.9 else str(source.getrandbits(24))
        parts.append(word)
        size += len(word) + 1
    return " ".join(parts).encode()[:length]


def run(
    clock: Callable[[], float] = time.perf_counter, timer: Callable[[], float] = time.thread_time
) -> BenchmarkResult:
    """Measures one core, for at most half a second; blocks meanwhile.

    `clock` bounds the whole. `timer` times the runs: the thread's processor time, so that what else the
    host does counts only as far as it disturbs caches and frequency.
    """
    data = corpus()
    began = clock()
    before = _pin()
    try:
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        compressor.compress(data)  # the first run pays for memory and caches
        times = _timed(compressor, data, timer, lambda: clock() < began + _BUDGET_SECS)
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)
    median = statistics.median(times)
    speed = len(data) / (1 << 20) / median
    return BenchmarkResult(
        cpu_core_score=round(_REFERENCE_SCORE * speed / _REFERENCE_MIB_PER_SEC, 1),
        runs=len(times),
        spread_pct=round(100 * (max(times) - min(times)) / median, 1),
        took_secs=round(clock() - began, 3),
        pinned_cpu=None if before is None else max(before),
    )


def _timed(
    compressor: zstandard.ZstdCompressor,
    data: bytes,
    timer: Callable[[], float],
    goes_on: Callable[[], bool],
) -> list[float]:
    times: list[float] = []
    while len(times) < _RUNS_MIN or (len(times) < _RUNS_MAX and goes_on()):
        start = timer()
        compressor.compress(data)
        times.append(timer() - start)
    return times


def _pin() -> set[int] | None:
    """Keeps this thread on one processor; what it was allowed before, None where that is not possible."""
    try:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(before)})  # the first ones serve interrupts on many hosts
    except OSError:
        return None
    return before
