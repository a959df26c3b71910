"""What rules read: the worker, the instance and the history of a job (scoring.md, "Contexts").

Owned values only, nothing is looked up while scoring. Unknown is NaN in a number, never 0: a worker
that has measured nothing is not a slow worker. The jobs' own context is `columns.JobColumns`.
"""

import math
from dataclasses import dataclass, field

from gradient_server.scoring.weights import UNMEASURED_BUILD_RAM_FALLBACK_MB

__all__ = [
    "NAN",
    "HistoryPrediction",
    "InstanceContext",
    "SubstituteCost",
    "Windowed",
    "WorkerContext",
    "WorkerMetricsView",
    "first_known",
]

NAN = math.nan


def first_known(*values: float) -> float:
    """The first value that is not NaN; NaN if there is none."""
    for value in values:
        if not math.isnan(value):
            return value
    return NAN


@dataclass(frozen=True, slots=True)
class Windowed:
    """Averages over 5 minutes, 1 hour and 24 hours. NaN: no samples; a measured 0 stays 0."""

    w5m: float = NAN
    w1h: float = NAN
    w24h: float = NAN

    def w1h_or(self, fallback: float) -> float:
        """The hour's average, or `fallback` without one."""
        return first_known(self.w1h, fallback)

    def w24h_or(self, fallback: float) -> float:
        """The day's average, or `fallback` without one."""
        return first_known(self.w24h, fallback)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPrediction:
    """What earlier runs of the same job tell (scoring.md, "History and Closure Size").

    RAM in MB, times in milliseconds, sizes in bytes. An evaluation's mean run time is in the two
    build times, and its peak in `peak_ram_mb`. A value that no run measured is NaN.
    """

    peak_ram_mb: float = NAN
    cpu_time_ms: float = NAN
    build_time_ms: float = NAN
    # The 95th percentile: what a job on a reserved seat may be expected to stay below.
    build_time_p95_ms: float = NAN
    disk_bytes: float = NAN
    output_nar_size: float = NAN
    oom_rate: float = NAN
    uncontended_build_time_ms: float = NAN
    cpu_core_score: float = NAN
    samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetricsView:
    """A worker's static and live figures. RAM in MB, links in Mbit/s, disk in MiB/s."""

    cpu_count: float = NAN
    cpu_core_score: float = NAN
    ram_total_mb: float = NAN
    ram_free_mb: float = NAN
    cpu_usage_pct: float = NAN
    disk_speed_mbps: float = NAN
    upload_speed_mbps: float = NAN
    download_speed_mbps: float = NAN
    running_builds: int = 0
    # Builds assigned to the worker; a host that holds none is never called saturated. An evaluation
    # does not count: one that waits for an import would hold the import's build off for ever.
    assigned_builds: int = 0
    ram_reserved_mb: float = 0.0
    ram_reserved_unused_mb: float = 0.0
    ram_reserved_for_waiting_build_mb: float = 0.0

    @property
    def ram_available_mb(self) -> float:
        """What a further build may take; NaN where neither total nor free RAM is known.

        The measured value alone would lag behind a burst of assignments.
        """
        measured = self.ram_free_mb - self.ram_reserved_unused_mb
        booked = self.ram_total_mb - self.ram_reserved_mb
        if math.isnan(measured):
            lower = booked
        elif math.isnan(booked):
            lower = measured
        else:
            lower = min(measured, booked)
        return lower - self.ram_reserved_for_waiting_build_mb

    @property
    def will_release_ram(self) -> bool:
        """Whether waiting helps: the worker holds reservations that will end."""
        return self.ram_reserved_mb > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The worker that asks."""

    architectures: frozenset[str] = frozenset()
    system_features: frozenset[str] = frozenset()
    fetch: bool = False
    metrics: WorkerMetricsView = field(default_factory=WorkerMetricsView)


@dataclass(frozen=True, slots=True)
class SubstituteCost:
    """A fit over measured substitutions: seconds a path, and seconds a megabyte (10^6 bytes)."""

    per_path_secs: float
    secs_per_mb: float


_NO_SAMPLES = Windowed()


@dataclass(slots=True, kw_only=True)
class InstanceContext:
    """What this instance has measured, and its live counts (scoring.md, "Instance Windows").

    Not frozen: the live counts change with each assignment, and a copy for each decision would cost
    more than the rules that read it. Rules do not write to it.
    """

    peak_ram_mb: Windowed = _NO_SAMPLES
    cpu_time_ms: Windowed = _NO_SAMPLES
    avg_cpu_pct: Windowed = _NO_SAMPLES
    disk_bytes: Windowed = _NO_SAMPLES
    build_time_ms: Windowed = _NO_SAMPLES
    build_time_median_ms: Windowed = _NO_SAMPLES
    closure_size: Windowed = _NO_SAMPLES
    oom_rate: Windowed = _NO_SAMPLES
    completed: Windowed = _NO_SAMPLES
    wait_secs: Windowed = _NO_SAMPLES
    nar_size_mb: Windowed = _NO_SAMPLES
    missing_paths: Windowed = _NO_SAMPLES
    dependency_cnt: Windowed = _NO_SAMPLES
    storage_read_mbps: Windowed = _NO_SAMPLES
    storage_write_mbps: Windowed = _NO_SAMPLES
    compression_ratio: Windowed = _NO_SAMPLES
    per_path_secs: float = NAN
    substitute_cost: SubstituteCost | None = None
    active_builds: int = 0
    pending_builds: int = 0
    total_workers: int = 0
    idle_workers: int = 0
    cpu_core_score_mean: float = NAN
    upload_speed_mean_mbps: float = NAN
    download_speed_mean_mbps: float = NAN
    # 0 slots: no limit.
    download_slots: int = 0
    upload_slots: int = 0
    downloads_in_flight: int = 0
    uploads_in_flight: int = 0

    @property
    def unmeasured_build_ram_mb(self) -> float:
        """What a build without a prediction is held at: the day's mean, or the hour's."""
        return first_known(self.peak_ram_mb.w24h, self.peak_ram_mb.w1h, UNMEASURED_BUILD_RAM_FALLBACK_MB)

    @property
    def mean_build_time_ms(self) -> float:
        """The hour's mean, else the day's; NaN for neither."""
        return first_known(self.build_time_ms.w1h, self.build_time_ms.w24h)
