"""From the oracle's words to the contexts of the real policy."""

import numpy as np
from gradient_server.scoring.columns import Field, JobColumns
from gradient_server.scoring.contexts import (
    InstanceContext,
    SubstituteCost,
    Windowed,
    WorkerContext,
    WorkerMetricsView,
)

from tests.properties.scoring.oracle import Instance, Job, Worker

__all__ = ["columns_of", "instance_of", "worker_of"]


def number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def columns_of(jobs: list[Job]) -> JobColumns:
    matrix = np.full((len(Field), len(jobs)), np.nan)
    for place, job in enumerate(jobs):
        values = {
            Field.IS_BUILD: job.is_build,
            Field.CACHED_EVAL: not job.is_build and job.cached,
            Field.BUILTIN: job.builtin,
            Field.PREFER_LOCAL_BUILD: 0.0,
            Field.IS_FIXED_OUTPUT: job.fixed_output,
            Field.QUEUED_AT: job.ready_at,
            Field.READY_AT: job.ready_at,
            Field.PROJECT_WORK_SHARE: job.share,
            Field.PRIORITIZED: job.prioritized,
            Field.BUILD_REQUEST: job.build_request,
            Field.IFD: job.ifd,
            Field.RESCORE_COUNT: job.rescore_count,
            Field.SUBSTITUTE_OUTPUTS: job.substitute_outputs,
            Field.OUTPUT_SIZE: job.own_output_size,
            Field.BUILD_PEAK_RAM_MB: job.own_peak_mb,
            Field.HISTORY_PEAK_RAM_MB: job.peak_mb,
            Field.HISTORY_OUTPUT_NAR_SIZE: job.output_size,
            Field.HISTORY_OOM_RATE: job.oom_rate,
            Field.HISTORY_UNCONTENDED_MS: job.uncontended_ms,
            Field.HISTORY_CORE_SCORE: job.core_score,
            Field.POOL_RAM_TOTAL_MB: job.pool_total_mb,
            Field.POOL_RAM_RELEASABLE_MB: job.pool_releasable_mb,
        }
        for name, value in values.items():
            matrix[name, place] = number(value)
    return JobColumns(
        matrix,
        now=jobs[0].now,
        missing_count=np.array([number(job.missing_count) for job in jobs]),
        missing_nar_size=np.array([number(job.missing_bytes) for job in jobs]),
        outputs_present=np.array([job.outputs_present for job in jobs]),
    )


def worker_of(worker: Worker) -> WorkerContext:
    return WorkerContext(
        fetch=worker.fetch,
        metrics=WorkerMetricsView(
            cpu_core_score=number(worker.core_score),
            ram_total_mb=number(worker.total_mb),
            ram_free_mb=number(worker.free_mb),
            cpu_usage_pct=number(worker.cpu_pct),
            upload_speed_mbps=number(worker.up_mbps),
            download_speed_mbps=number(worker.down_mbps),
            running_builds=worker.running,
            assigned_builds=worker.assigned,
            ram_reserved_mb=worker.reserved_mb,
            ram_reserved_unused_mb=worker.unused_mb,
            ram_reserved_for_waiting_build_mb=worker.kept_mb,
        ),
    )


def instance_of(instance: Instance) -> InstanceContext:
    cost = None if instance.substitute is None else SubstituteCost(*instance.substitute)
    return InstanceContext(
        wait_secs=Windowed(w1h=number(instance.wait_secs)),
        nar_size_mb=Windowed(w1h=number(instance.nar_mb)),
        missing_paths=Windowed(w1h=number(instance.paths)),
        storage_read_mbps=Windowed(w1h=number(instance.read_mbps)),
        storage_write_mbps=Windowed(w1h=number(instance.write_mbps)),
        compression_ratio=Windowed(w1h=number(instance.stored_ratio)),
        per_path_secs=number(instance.per_path),
        substitute_cost=cost,
        build_time_ms=Windowed(w1h=number(instance.build_ms_1h), w24h=number(instance.build_ms_24h)),
        peak_ram_mb=Windowed(w1h=number(instance.peak_1h), w24h=number(instance.peak_24h)),
        total_workers=instance.total_workers,
        idle_workers=instance.idle_workers,
        cpu_core_score_mean=number(instance.core_mean),
        upload_speed_mean_mbps=number(instance.up_mean),
        download_speed_mean_mbps=number(instance.down_mean),
        download_slots=instance.download_slots,
        upload_slots=instance.upload_slots,
        downloads_in_flight=instance.downloads,
        uploads_in_flight=instance.uploads,
    )
