"""The estimated seconds of a job on a worker, part by part (policies.md, EstimatedTimeRule).

download of what is missing + paths + run + out-of-memory retry + upload of the outputs. An unknown
input is replaced by a fallback, which is remembered, so that the board can say how sure it is.
"""

import math
from dataclasses import dataclass

import numpy as np

from gradient_server.scoring.columns import Field, Flags, JobColumns, Vector
from gradient_server.scoring.contexts import InstanceContext, WorkerContext, first_known
from gradient_server.scoring.weights import (
    BUILD_CONTENTION_PER_BUILD,
    CORE_SCORE_RATIO_MAX,
    CORE_SCORE_RATIO_MIN,
    PER_PATH_FALLBACK_SECS,
    STORAGE_READ_FALLBACK_MBPS,
    STORAGE_WRITE_FALLBACK_MBPS,
    STORED_PER_NAR_BYTE_FALLBACK,
)

__all__ = ["Estimate", "Links", "estimate_of"]

_BITS_PER_MBIT = 1e6 / 8.0
_BYTES_PER_MIB = 1024.0 * 1024.0
_BYTES_PER_MB = 1e6
_MEMO = "estimate"


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds a byte for a download to and an upload from one worker, storage share included.

    `fallbacks` names what was not measured.
    """

    download_secs_per_byte: float
    upload_secs_per_byte: float
    fallbacks: tuple[str, ...]

    @classmethod
    def of(cls, worker: WorkerContext, instance: InstanceContext) -> "Links":
        """min(the worker's speed, its share of the storage's), each way."""
        metrics = worker.metrics
        fallbacks: list[str] = []
        if math.isnan(metrics.download_speed_mbps):
            fallbacks.append("download_speed")
        if math.isnan(metrics.upload_speed_mbps):
            fallbacks.append("upload_speed")
        stored_per_nar_byte = instance.compression_ratio.w1h_or(STORED_PER_NAR_BYTE_FALLBACK)
        return cls(
            _secs_per_byte(
                first_known(metrics.download_speed_mbps, instance.download_speed_mean_mbps),
                instance.storage_read_mbps.w1h_or(STORAGE_READ_FALLBACK_MBPS),
                stored_per_nar_byte,
                instance.downloads_in_flight,
            ),
            _secs_per_byte(
                first_known(metrics.upload_speed_mbps, instance.upload_speed_mean_mbps),
                instance.storage_write_mbps.w1h_or(STORAGE_WRITE_FALLBACK_MBPS),
                stored_per_nar_byte,
                instance.uploads_in_flight,
            ),
            tuple(fallbacks),
        )


def _secs_per_byte(
    link_mbps: float, storage_mbps: float, stored_per_nar_byte: float, in_flight: int
) -> float:
    share = storage_mbps / stored_per_nar_byte / (in_flight + 1) if stored_per_nar_byte > 0 else math.inf
    rate = share if math.isnan(link_mbps) else min(link_mbps, share)
    return 1.0 / (rate * _BITS_PER_MBIT) if rate > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, each part a vector of n. The masks tell where a fallback was used."""

    download: Vector
    paths: Vector
    run: Vector
    oom_retry: Vector
    upload: Vector
    total: Vector
    missing_unknown: Flags
    history_unknown: Flags
    links: Links

    def detail(self, index: int) -> dict[str, object]:
        """One candidate's parts in seconds and the fallbacks used, as it is recorded."""
        fallbacks = list(self.links.fallbacks)
        if self.missing_unknown[index]:
            fallbacks.append("missing")
        if self.history_unknown[index]:
            fallbacks.append("history")
        parts = ("download", "paths", "run", "oom_retry", "upload", "total")
        detail: dict[str, object] = {f"{part}_secs": _finite(getattr(self, part)[index]) for part in parts}
        detail["fallbacks"] = fallbacks
        return detail


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def estimate_of(columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Estimate:
    """The estimate of every candidate; computed once a decision."""
    known = columns.memo.get(_MEMO)
    if isinstance(known, Estimate):
        return known
    estimate = _estimate(columns, worker, instance)
    columns.memo[_MEMO] = estimate
    return estimate


def _estimate(columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Estimate:
    links = Links.of(worker, instance)
    is_build, present = columns.is_build, columns.outputs_present
    substitutes = columns.field(Field.SUBSTITUTE_OUTPUTS)
    substituted = ~np.isnan(substitutes) & is_build & ~present
    built = is_build & ~present & ~substituted
    output_bytes = np.nan_to_num(columns.output_bytes, nan=0.0, posinf=0.0, neginf=0.0)

    missing_unknown = np.isnan(columns.missing_nar_size)
    unknown_bytes = first_known(instance.nar_size_mb.w1h, 0.0) * _BYTES_PER_MIB
    missing_bytes = np.where(missing_unknown, unknown_bytes, columns.missing_nar_size)
    unknown_count = first_known(instance.missing_paths.w1h, 0.0)
    missing_count = np.where(np.isnan(columns.missing_count), unknown_count, columns.missing_count)
    per_path_secs = first_known(instance.per_path_secs, PER_PATH_FALLBACK_SECS)

    download = np.where(built, _transfer(missing_bytes, links.download_secs_per_byte), 0.0)
    paths = np.where(built, missing_count * per_path_secs, 0.0)
    if substituted.any():
        fetch, fetch_paths = _substitution(substitutes, output_bytes, links, instance)
        download = np.where(substituted, fetch, download)
        paths = np.where(substituted, fetch_paths, paths)

    run, history_unknown = _run_secs(columns, worker, instance)
    run = np.where(substituted | present, 0.0, run)
    oom_retry = _oom_chance(columns, worker) * run
    upload = np.where(is_build, _transfer(output_bytes, links.upload_secs_per_byte), 0.0)
    return Estimate(
        download=download,
        paths=paths,
        run=run,
        oom_retry=oom_retry,
        upload=upload,
        total=download + paths + run + oom_retry + upload,
        missing_unknown=missing_unknown & built,
        history_unknown=history_unknown & ~(substituted | present),
        links=links,
    )


def _transfer(size_bytes: Vector, secs_per_byte: float) -> Vector:
    if math.isinf(secs_per_byte):
        return np.where(size_bytes > 0.0, math.inf, 0.0)
    return size_bytes * secs_per_byte


def _substitution(
    outputs: Vector, output_bytes: Vector, links: Links, instance: InstanceContext
) -> tuple[Vector, Vector]:
    """Seconds for the bytes and for the paths of a substitution."""
    cost = instance.substitute_cost
    if cost is None:
        return _transfer(output_bytes, links.download_secs_per_byte), np.zeros_like(output_bytes)
    return output_bytes / _BYTES_PER_MB * cost.secs_per_mb, outputs * cost.per_path_secs


def _run_secs(columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> tuple[Vector, Flags]:
    """Seconds of the run itself, and where no history told them."""
    uncontended = columns.history(Field.HISTORY_UNCONTENDED_MS)
    unknown = np.isnan(uncontended)
    # Evaluations differ too much for a fleet mean to say anything.
    fallback = np.where(columns.is_build, first_known(instance.mean_build_time_ms, 0.0), 0.0)
    worker_score = first_known(worker.metrics.cpu_core_score, instance.cpu_core_score_mean)
    contention = 1.0 + BUILD_CONTENTION_PER_BUILD * worker.metrics.running_builds
    run = np.where(unknown, fallback, uncontended) * (contention / 1000.0)
    if math.isnan(worker_score) or worker_score <= 0.0:
        return run, unknown
    built_by = columns.history(Field.HISTORY_CORE_SCORE)
    built_by = np.where(np.isnan(built_by), instance.cpu_core_score_mean, built_by)
    ratio = np.minimum(np.maximum(built_by / worker_score, CORE_SCORE_RATIO_MIN), CORE_SCORE_RATIO_MAX)
    return run * np.where(np.isnan(ratio), 1.0, ratio), unknown


def _oom_chance(columns: JobColumns, worker: WorkerContext) -> Vector:
    """How likely the run ends in an out-of-memory kill, 0 to 1."""
    rate = np.nan_to_num(columns.history(Field.HISTORY_OOM_RATE), nan=0.0)
    free = worker.metrics.ram_free_mb
    if math.isnan(free):
        return np.minimum(rate, 1.0)
    peak = columns.predicted_peak_ram_mb
    over = (peak - free) / free if free > 0.0 else np.where(peak > 0.0, 1.0, 0.0)
    overshoot = np.minimum(np.fmax(over, 0.0), 1.0)
    return np.minimum(rate + overshoot, 1.0)
