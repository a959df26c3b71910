"""What the database sums up for the instance windows, as plain values. NaN is "no samples"."""

from dataclasses import dataclass

__all__ = ["BuildSums", "EvalSums", "FitSums", "WaitSums"]


@dataclass(frozen=True, slots=True)
class BuildSums:
    """Averages over the builds of one window. MiB, ms, bytes; `completed` counts."""

    peak_ram_mb: float
    cpu_time_ms: float
    avg_cpu_pct: float
    disk_bytes: float
    build_time_ms: float
    closure_size: float
    oom_rate: float
    completed: float


@dataclass(frozen=True, slots=True)
class WaitSums:
    """Averages over the build assignments of one window: seconds, MiB, counts."""

    wait_secs: float
    nar_size_mb: float
    missing_paths: float
    dependency_cnt: float


@dataclass(frozen=True, slots=True)
class FitSums:
    """Sums over spans, for least squares: x in MB (10^6 bytes), p in paths, y in seconds."""

    count: int
    x: float
    p: float
    y: float
    xx: float
    xp: float
    pp: float
    xy: float
    py: float


@dataclass(frozen=True, slots=True)
class EvalSums:
    """A task's completed evaluation jobs: runs and seconds of the fetch, and of the rest."""

    fetch_runs: int
    fetch_secs: float
    rest_runs: int
    rest_secs: float
