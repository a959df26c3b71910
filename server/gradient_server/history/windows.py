"""The instance windows as one immutable snapshot, with its fits (scoring.md, "Instance Windows"). Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from gradient_server.history.prediction import EvalDuration
from gradient_server.history.sums import BuildSums, EvalSums, FitSums, WaitSums
from gradient_server.scoring.contexts import NAN, InstanceContext, SubstituteCost, Windowed

__all__ = [
    "DAY_SECS",
    "EVALUATIONS_SECS",
    "HOUR_SECS",
    "MIN_PREFETCHES",
    "MIN_SUBSTITUTIONS",
    "WINDOWS_SECS",
    "EvalDurations",
    "WindowsSnapshot",
    "eval_durations",
    "per_path_secs",
    "substitute_cost",
    "windowed",
]

HOUR_SECS: Final = 3_600.0
DAY_SECS: Final = 86_400.0
# Of every `Windowed`, in the order of its fields.
WINDOWS_SECS: Final = (300.0, HOUR_SECS, DAY_SECS)
EVALUATIONS_SECS: Final = 7 * DAY_SECS
MIN_PREFETCHES: Final = 100
MIN_SUBSTITUTIONS: Final = 20
_SINGULAR: Final = 1e-9

_NO_BUILDS: Final = BuildSums(*[NAN] * 8)
_NO_WAITS: Final = WaitSums(*[NAN] * 4)


@dataclass(frozen=True, slots=True)
class EvalDurations:
    """Mean seconds of evaluations by task, and over all runs for a part that a task has no run of."""

    by_task: Mapping[str, EvalDuration] = field(default_factory=dict)
    overall: EvalDuration = field(default_factory=EvalDuration)

    def of(self, task: str | None) -> EvalDuration:
        """What a task's next evaluation is expected to take."""
        own = self.by_task.get(task or "", EvalDuration())
        return EvalDuration(
            self.overall.fetch_secs if math.isnan(own.fetch_secs) else own.fetch_secs,
            self.overall.rest_secs if math.isnan(own.rest_secs) else own.rest_secs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowsSnapshot:
    """What one pass measured. None: the query failed, or there were no samples.

    `builds`, `waits` and `medians_ms` (of build times) are in the order of `WINDOWS_SECS`; `read_mbps`
    and `write_mbps` are Mbit/s of stored bytes. `failed` names what could not be read.
    """

    taken_at: float
    builds: tuple[BuildSums | None, ...] = (None, None, None)
    waits: tuple[WaitSums | None, ...] = (None, None, None)
    medians_ms: tuple[float | None, ...] = (None, None, None)
    read_mbps: float | None = None
    write_mbps: float | None = None
    stored_per_nar_byte: float | None = None
    prefetches: FitSums | None = None
    substitutions: FitSums | None = None
    evaluations: EvalDurations = field(default_factory=EvalDurations)
    failed: tuple[str, ...] = ()

    def context(self) -> InstanceContext:
        """The windows as rules read them; live counts are the pool's to fill in."""
        builds = [one or _NO_BUILDS for one in self.builds]
        waits = [one or _NO_WAITS for one in self.waits]
        return InstanceContext(
            peak_ram_mb=windowed(*(one.peak_ram_mb for one in builds)),
            cpu_time_ms=windowed(*(one.cpu_time_ms for one in builds)),
            avg_cpu_pct=windowed(*(one.avg_cpu_pct for one in builds)),
            disk_bytes=windowed(*(one.disk_bytes for one in builds)),
            build_time_ms=windowed(*(one.build_time_ms for one in builds)),
            build_time_median_ms=windowed(*self.medians_ms),
            closure_size=windowed(*(one.closure_size for one in builds)),
            oom_rate=windowed(*(one.oom_rate for one in builds)),
            completed=windowed(*(one.completed for one in builds)),
            wait_secs=windowed(*(one.wait_secs for one in waits)),
            nar_size_mb=windowed(*(one.nar_size_mb for one in waits)),
            missing_paths=windowed(*(one.missing_paths for one in waits)),
            dependency_cnt=windowed(*(one.dependency_cnt for one in waits)),
            storage_read_mbps=Windowed(w1h=_finite(self.read_mbps)),
            storage_write_mbps=Windowed(w1h=_finite(self.write_mbps)),
            compression_ratio=Windowed(w1h=_finite(self.stored_per_nar_byte)),
            per_path_secs=per_path_secs(self.prefetches),
            substitute_cost=substitute_cost(self.substitutions),
        )


def windowed(w5m: float | None, w1h: float | None, w24h: float | None) -> Windowed:
    """The three averages; whatever is no number or negative is unknown."""
    return Windowed(_finite(w5m), _finite(w1h), _finite(w24h))


def _finite(value: float | None) -> float:
    return NAN if value is None or not math.isfinite(value) or value < 0.0 else value


def per_path_secs(sums: FitSums | None) -> float:
    """Seconds a path, of seconds fitted over a constant, MB and paths by least squares.

    NaN below `MIN_PREFETCHES`, and where the spans cannot tell a path's time from a byte's. Never
    negative: where the best fit would be, 0 is the best that makes sense.
    """
    if sums is None or sums.count < MIN_PREFETCHES:
        return NAN
    n = sums.count
    # About the means, for the sums of squares dwarf what they differ by.
    xx, pp = sums.xx - sums.x * sums.x / n, sums.pp - sums.p * sums.p / n
    xp = sums.xp - sums.x * sums.p / n
    xy, py = sums.xy - sums.x * sums.y / n, sums.py - sums.p * sums.y / n
    if pp <= _SINGULAR * max(sums.pp, 1.0):
        return NAN
    if xx <= _SINGULAR * sums.xx:
        return max(_finite_or_nan(py / pp), 0.0)
    if xx * pp - xp * xp <= _SINGULAR * xx * pp:
        return NAN
    solved = np.linalg.solve(np.array([[xx, xp], [xp, pp]]), np.array([xy, py]))
    return max(_finite_or_nan(float(solved[1])), 0.0)


def substitute_cost(sums: FitSums | None) -> SubstituteCost | None:
    """Seconds a path and a MB, of seconds fitted over a constant and MB: a span is one path.

    None below `MIN_SUBSTITUTIONS`. Where all are of one size, the whole time is the path's.
    """
    if sums is None or sums.count < MIN_SUBSTITUTIONS:
        return None
    n = sums.count
    xx, xy = sums.xx - sums.x * sums.x / n, sums.xy - sums.x * sums.y / n
    slope = xy / xx if xx > _SINGULAR * sums.xx else 0.0
    slope = max(slope, 0.0)
    constant = (sums.y - slope * sums.x) / n
    if constant < 0.0:
        # The best line that does not start below 0 goes through it.
        constant, slope = 0.0, sums.xy / sums.xx
    if not (math.isfinite(constant) and math.isfinite(slope)):
        return None
    return SubstituteCost(per_path_secs=constant, secs_per_mb=slope)


def eval_durations(by_task: Mapping[str, EvalSums]) -> EvalDurations:
    """Means by task, and of all runs."""
    every = by_task.values()
    return EvalDurations(
        {
            task: _duration(sums.fetch_secs, sums.fetch_runs, sums.rest_secs, sums.rest_runs)
            for task, sums in by_task.items()
        },
        _duration(
            math.fsum(one.fetch_secs for one in every),
            sum(one.fetch_runs for one in every),
            math.fsum(one.rest_secs for one in every),
            sum(one.rest_runs for one in every),
        ),
    )


def _duration(fetch_secs: float, fetch_runs: int, rest_secs: float, rest_runs: int) -> EvalDuration:
    return EvalDuration(
        fetch_secs / fetch_runs if fetch_runs else NAN, rest_secs / rest_runs if rest_runs else NAN
    )


def _finite_or_nan(value: float) -> float:
    return value if math.isfinite(value) else NAN
