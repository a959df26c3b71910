"""Predictions and fits equal an oracle written from the text, for random rows, unknowns included."""

import math

import numpy as np
import pytest
from gradient_server.history.prediction import MetricRow, predict
from gradient_server.history.sums import FitSums
from gradient_server.history.windows import per_path_secs, substitute_cost
from hypothesis import given, settings
from hypothesis import strategies as st

counts = st.none() | st.integers(0, 1 << 40)
rows = st.lists(
    st.builds(
        MetricRow,
        derivation=st.integers(1, 6),
        oom_killed=st.booleans(),
        concurrent_builds=st.integers(0, 64),
        peak_ram_mb=counts,
        cpu_time_ms=counts,
        build_time_ms=counts,
        disk_bytes=counts,
        cpu_core_score=st.none() | st.floats(0.1, 1e6),
    ),
    max_size=20,
)


def average(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def p95(values: list[int | None]) -> int | None:
    """The smallest that at least 95 % of all do not exceed."""
    known = [value for value in values if value is not None]
    enough = [one for one in known if 100 * sum(other <= one for other in known) >= 95 * len(known)]
    return min(enough, default=None)


def expected(history: list[MetricRow], sizes: dict[int, int]) -> dict[str, float | None]:
    """policies.md, "History", one value at a time; None is unknown."""
    return {
        "peak_ram_mb": p95([row.peak_ram_mb for row in history]),
        "build_time_p95_ms": p95([row.build_time_ms for row in history]),
        "cpu_time_ms": average([row.cpu_time_ms for row in history]),
        "build_time_ms": average([row.build_time_ms for row in history]),
        "disk_bytes": average([row.disk_bytes for row in history]),
        "output_nar_size": average([sizes.get(row.derivation) for row in history]),
        "oom_rate": average([float(row.oom_killed) for row in history]),
        "uncontended_build_time_ms": average(
            [
                None if row.build_time_ms is None else row.build_time_ms / (1 + 0.04 * row.concurrent_builds)
                for row in history
            ]
        ),
        "cpu_core_score": average([row.cpu_core_score for row in history]),
        "samples": len(history),
    }


@given(rows, st.dictionaries(st.integers(1, 6), st.integers(0, 1 << 40)))
def test_a_prediction_is_what_the_text_says(history: list[MetricRow], sizes: dict[int, int]) -> None:
    prediction = predict(history, sizes)
    for name, value in expected(history, sizes).items():
        got = getattr(prediction, name)
        if value is None:
            assert math.isnan(got), name
        else:
            assert got == pytest.approx(value, rel=1e-9), name


def sums(megabytes: np.ndarray, paths: np.ndarray, secs: np.ndarray) -> FitSums:
    return FitSums(
        len(secs),
        float(megabytes.sum()),
        float(paths.sum()),
        float(secs.sum()),
        float((megabytes**2).sum()),
        float((megabytes * paths).sum()),
        float((paths**2).sum()),
        float((megabytes * secs).sum()),
        float((paths * secs).sum()),
    )


@given(
    st.integers(0, 2**32 - 1),
    st.integers(100, 300),
    st.floats(0.0, 5.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.1),
)
@settings(max_examples=60)
def test_the_prefetch_fit_is_that_of_least_squares(
    seed: int, size: int, constant: float, per_path: float, per_mb: float
) -> None:
    random = np.random.default_rng(seed)
    megabytes, paths = random.exponential(50, size), random.integers(1, 60, size).astype(float)
    secs = constant + per_path * paths + per_mb * megabytes + random.normal(0, 0.05, size)
    oracle = np.linalg.lstsq(np.column_stack([np.ones(size), megabytes, paths]), secs, rcond=None)[0]
    assert per_path_secs(sums(megabytes, paths, secs)) == pytest.approx(max(oracle[2], 0.0), abs=1e-7)


@given(st.integers(0, 2**32 - 1), st.integers(20, 200), st.floats(0.5, 5.0), st.floats(0.01, 0.5))
@settings(max_examples=60)
def test_the_substitution_fit_is_that_of_least_squares(
    seed: int, size: int, constant: float, per_mb: float
) -> None:
    random = np.random.default_rng(seed)
    megabytes = random.exponential(50, size)
    secs = constant + per_mb * megabytes + random.normal(0, 0.01, size)
    oracle = np.linalg.lstsq(np.column_stack([np.ones(size), megabytes]), secs, rcond=None)[0]
    cost = substitute_cost(sums(megabytes, np.ones(size), secs))
    assert cost is not None
    assert (cost.per_path_secs, cost.secs_per_mb) == pytest.approx(tuple(oracle), abs=1e-7)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e4), st.floats(0, 1e6)), max_size=150))
def test_a_fit_never_gives_what_makes_no_sense(spans: list[tuple[float, float, float]]) -> None:
    columns = [np.array(column, float) for column in zip(*spans, strict=True)] or [np.zeros(0)] * 3
    per_path = per_path_secs(sums(*columns))
    assert per_path >= 0.0 or (math.isnan(per_path))
    cost = substitute_cost(sums(*columns))
    assert (cost is None) is (len(spans) < 20)
    if cost is not None:
        assert min(cost.per_path_secs, cost.secs_per_mb) >= 0.0


@pytest.mark.parametrize("size", [99, 100])
def test_a_prefetch_fit_needs_a_hundred_spans(size: int) -> None:
    paths = np.arange(size, dtype=float) + 1
    fitted = per_path_secs(sums(np.full(size, 10.0), paths, 2.0 + 0.2 * paths))
    assert math.isnan(fitted) if size < 100 else fitted == pytest.approx(0.2)
