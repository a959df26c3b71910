"""What earlier runs of a job tell of its next (scoring.md, "History and Closure Size"; policies.md).

Pure. A value that no run measured is NaN, as everywhere in scoring.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gradient_server.scoring.contexts import NAN, HistoryPrediction
from gradient_server.scoring.weights import BUILD_CONTENTION_PER_BUILD

__all__ = [
    "EVALUATION_PEAK_WINDOW_SECS",
    "HISTORY_ROWS",
    "EvalDuration",
    "MetricRow",
    "contention_factor",
    "nearest_rank",
    "predict",
    "predict_evaluation",
]

HISTORY_ROWS: Final = 20
EVALUATION_PEAK_WINDOW_SECS: Final = 86_400.0
_PEAK_QUANTILE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One real build. MiB, milliseconds, bytes; None was not measured."""

    derivation: int
    oom_killed: bool
    concurrent_builds: int
    peak_ram_mb: int | None = None
    cpu_time_ms: int | None = None
    build_time_ms: int | None = None
    disk_bytes: int | None = None
    cpu_core_score: float | None = None


@dataclass(frozen=True, slots=True)
class EvalDuration:
    """Mean seconds of a task's source fetch, and of the rest of its evaluations; NaN for no run."""

    fetch_secs: float = NAN
    rest_secs: float = NAN


def contention_factor(concurrent_builds: int) -> float:
    """How much slower a build runs beside `concurrent_builds` others."""
    return 1.0 + BUILD_CONTENTION_PER_BUILD * max(concurrent_builds, 0)


def nearest_rank(values: Iterable[float], quantile: float) -> float:
    """The smallest value that at least `quantile` of all are not above; NaN for none."""
    ordered = sorted(values)
    if not ordered:
        return NAN
    rank = math.ceil(quantile * len(ordered))
    return float(ordered[max(rank, 1) - 1])


def predict(rows: Sequence[MetricRow], output_sizes: Mapping[int, int]) -> HistoryPrediction:
    """The prediction from the newest rows of one history name and architecture.

    `output_sizes`: bytes of all outputs of a derivation, of those where every one is known.
    """
    if not rows:
        return HistoryPrediction()
    return HistoryPrediction(
        peak_ram_mb=nearest_rank(_known(row.peak_ram_mb for row in rows), _PEAK_QUANTILE),
        cpu_time_ms=_mean(row.cpu_time_ms for row in rows),
        build_time_ms=_mean(row.build_time_ms for row in rows),
        build_time_p95_ms=nearest_rank(_known(row.build_time_ms for row in rows), _PEAK_QUANTILE),
        disk_bytes=_mean(row.disk_bytes for row in rows),
        output_nar_size=_mean(output_sizes.get(row.derivation) for row in rows),
        oom_rate=sum(row.oom_killed for row in rows) / len(rows),
        uncontended_build_time_ms=_mean(
            None
            if row.build_time_ms is None
            else row.build_time_ms / contention_factor(row.concurrent_builds)
            for row in rows
        ),
        cpu_core_score=_mean(row.cpu_core_score for row in rows),
        samples=len(rows),
    )


def predict_evaluation(
    peaks_mb: Sequence[float], duration: EvalDuration, *, fetches: bool, evaluates: bool
) -> HistoryPrediction:
    """An evaluation's prediction: its task's p95 peak, and the mean run time of what it will do.

    The run time is in both build times (scoring.md); NaN where a part of it is not known.
    """
    fetch_secs = duration.fetch_secs if fetches else 0.0
    rest_secs = duration.rest_secs if evaluates else 0.0
    run_ms = (fetch_secs + rest_secs) * 1000.0
    return HistoryPrediction(
        peak_ram_mb=nearest_rank(peaks_mb, _PEAK_QUANTILE),
        build_time_ms=run_ms,
        uncontended_build_time_ms=run_ms,
        samples=len(peaks_mb),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float:
    known = _known(values)
    return math.fsum(known) / len(known) if known else NAN
