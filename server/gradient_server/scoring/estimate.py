"""The estimated seconds of a job on a worker, part by part (policies.md, EstimatedTimeRule).

download of what is missing + paths + run + out-of-memory retry + upload of the outputs. An unknown
input is replaced by a fallback, which is remembered, so that the board can say how sure it is.
"""

import math
from dataclasses import dataclass

import numpy as np

from gradient_server.scoring.columns import Field, Flags, JobColumns, Points, at, filled
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
    """Seconds, each part for every candidate. The masks tell where a fallback was used."""

    download: Points
    paths: Points
    run: Points
    oom_retry: Points
    upload: Points
    total: Points
    missing_unknown: Flags
    history_unknown: Flags
    built: Flags | None
    links: Links

    def detail(self, index: int) -> dict[str, object]:
        """One candidate's parts in seconds and the fallbacks used, as it is recorded."""
        fallbacks = list(self.links.fallbacks)
        built = self.built is None or bool(self.built[index])
        if built and self.missing_unknown[index]:
            fallbacks.append("missing")
        if built and self.history_unknown[index]:
            fallbacks.append("history")
        return {
            "download_secs": _finite(at(self.download, index)),
            "paths_secs": _finite(at(self.paths, index)),
            "run_secs": _finite(at(self.run, index)),
            "oom_retry_secs": _finite(at(self.oom_retry, index)),
            "upload_secs": _finite(at(self.upload, index)),
            "total_secs": _finite(at(self.total, index)),
            "fallbacks": fallbacks,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


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
    output_bytes = np.fmax(columns.output_bytes, 0.0)  # nothing where it is not known
    unknown_bytes = first_known(instance.nar_size_mb.w1h, 0.0) * _BYTES_PER_MIB
    missing_bytes, missing_unknown = filled(columns.missing_nar_size, unknown_bytes)
    missing_count, _ = filled(columns.missing_count, first_known(instance.missing_paths.w1h, 0.0))

    path_secs = first_known(instance.per_path_secs, PER_PATH_FALLBACK_SECS)
    unbuilt = columns.unbuilt
    download = columns.without(unbuilt, _transfer(missing_bytes, links.download_secs_per_byte))
    paths = columns.without(unbuilt, missing_count * path_secs)
    if columns.substituted is not None:
        substituted = columns.substituted & ~columns.outputs_present
        fetch, fetch_paths = _substitution(columns, output_bytes, links, instance)
        download = np.where(substituted, fetch, download)
        paths = np.where(substituted, fetch_paths, paths)
    run, history_unknown = _run_secs(columns, worker, instance)
    run = columns.without(columns.unrun, run)
    oom_retry = _oom_chance(columns, worker) * run
    upload = _transfer(output_bytes, links.upload_secs_per_byte)
    upload = columns.without(columns.evaluations, upload)
    total = download + paths
    for part in (run, oom_retry, upload):
        total += part
    return Estimate(
        download=download,
        paths=paths,
        run=run,
        oom_retry=oom_retry,
        upload=upload,
        total=total,
        missing_unknown=missing_unknown,
        history_unknown=history_unknown,
        built=columns.built,
        links=links,
    )


def _transfer(size_bytes: Points, secs_per_byte: float) -> Points:
    if math.isinf(secs_per_byte):
        return np.where(np.asarray(size_bytes) > 0.0, math.inf, 0.0)
    return size_bytes * secs_per_byte


def _substitution(
    columns: JobColumns, output_bytes: Points, links: Links, instance: InstanceContext
) -> tuple[Points, Points]:
    """Seconds for the bytes and for the paths of a substitution."""
    cost = instance.substitute_cost
    if cost is None:
        return _transfer(output_bytes, links.download_secs_per_byte), 0.0
    outputs = columns.field(Field.SUBSTITUTE_OUTPUTS)
    return output_bytes / _BYTES_PER_MB * cost.secs_per_mb, outputs * cost.per_path_secs


def _run_secs(columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> tuple[Points, Flags]:
    """Seconds of the run itself, as if everything ran, and where no history told them.

    The fields are read as they are, and not by `history`: where nothing runs, the caller takes the run out.
    """
    fallback = first_known(instance.mean_build_time_ms, 0.0) if columns.any_build else 0.0
    run, unknown = filled(columns.field(Field.HISTORY_UNCONTENDED_MS), fallback)
    if columns.any_build and not columns.all_builds:
        # Evaluations differ too much for a fleet mean to say anything.
        run = np.where(unknown & ~columns.is_build, 0.0, run)
    contention = 1.0 + BUILD_CONTENTION_PER_BUILD * worker.metrics.running_builds
    run = run * (contention / 1000.0)
    worker_score = first_known(worker.metrics.cpu_core_score, instance.cpu_core_score_mean)
    if math.isnan(worker_score):
        return run, unknown
    # Where neither is known, the ratio is 1.
    mean = first_known(instance.cpu_core_score_mean, worker_score)
    built_by, _ = filled(columns.field(Field.HISTORY_CORE_SCORE), mean)
    ratio = built_by / worker_score
    if isinstance(ratio, float):
        ratio = min(max(ratio, CORE_SCORE_RATIO_MIN), CORE_SCORE_RATIO_MAX)
    else:
        np.clip(ratio, CORE_SCORE_RATIO_MIN, CORE_SCORE_RATIO_MAX, out=ratio)
    run *= ratio
    return run, unknown


def _oom_chance(columns: JobColumns, worker: WorkerContext) -> Points:
    """How likely the run ends in an out-of-memory kill, 0 to 1."""
    rate, _ = filled(columns.field(Field.HISTORY_OOM_RATE), 0.0)
    free = worker.metrics.ram_free_mb
    over: Flags = columns.predicted_peak_ram_mb > free
    if not np.count_nonzero(over):
        return np.minimum(rate, 1.0)
    if free > 0.0:
        chance = columns.predicted_peak_ram_mb - free
        chance /= free
        np.fmax(chance, 0.0, out=chance)
    else:
        chance = over.astype(np.float64)
    chance += rate
    return np.minimum(chance, 1.0, out=chance)
