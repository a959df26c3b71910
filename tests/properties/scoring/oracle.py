"""Every rule once more, for one job and in plain Python, as policies.md words it: the oracle.

Written from the text and not from the columns. Unknown is None here.
"""

import math
from dataclasses import dataclass, field

__all__ = ["Instance", "Job", "Worker", "score"]

MIB = 1024 * 1024


@dataclass
class Job:
    """A candidate as one worker sees it."""

    is_build: bool = True
    cached: bool = False
    builtin: bool = False
    fixed_output: bool = False
    ready_at: float = 0.0
    now: float = 0.0
    prioritized: bool = False
    build_request: bool = False
    ifd: bool = False
    rescore_count: int = 0
    substitute_outputs: int | None = None
    own_output_size: int | None = None
    own_peak_mb: int | None = None
    missing_count: int | None = None
    missing_bytes: int | None = None
    outputs_present: bool = False
    share: float | None = None
    # History.
    peak_mb: float | None = None
    output_size: float | None = None
    oom_rate: float | None = None
    uncontended_ms: float | None = None
    core_score: float | None = None
    # The pool.
    pool_total_mb: float | None = None
    pool_releasable_mb: float | None = None


@dataclass
class Worker:
    """The worker that asks."""

    fetch: bool = True
    core_score: float | None = None
    total_mb: float | None = None
    free_mb: float | None = None
    cpu_pct: float | None = None
    up_mbps: float | None = None
    down_mbps: float | None = None
    running: int = 0
    assigned: int = 0
    reserved_mb: float = 0.0
    unused_mb: float = 0.0
    kept_mb: float = 0.0


@dataclass
class Instance:
    """What the instance knows."""

    wait_secs: float | None = None
    nar_mb: float | None = None
    paths: float | None = None
    read_mbps: float | None = None
    write_mbps: float | None = None
    stored_ratio: float | None = None
    per_path: float | None = None
    substitute: tuple[float, float] | None = None
    build_ms_1h: float | None = None
    build_ms_24h: float | None = None
    peak_1h: float | None = None
    peak_24h: float | None = None
    total_workers: int = 1
    idle_workers: int = 0
    core_mean: float | None = None
    up_mean: float | None = None
    down_mean: float | None = None
    download_slots: int = 0
    upload_slots: int = 0
    downloads: int = 0
    uploads: int = 0


@dataclass
class Result:
    """Points by rule and the rules that hold."""

    rules: dict[str, float] = field(default_factory=dict)
    vetoes: set[str] = field(default_factory=set)


def known(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def output_bytes(job: Job) -> float | None:
    if job.own_output_size is not None:
        return job.own_output_size
    return None if job.outputs_present else job.output_size


def peak(job: Job) -> float | None:
    if job.outputs_present:
        return None
    peaks = [value for value in (job.peak_mb, job.own_peak_mb) if value is not None]
    return max(peaks) if peaks else None


def transfer(size: float, speed: float | None, share: float) -> float:
    if size <= 0:
        return 0.0
    rate = share if speed is None else min(speed, share)
    return size * 8 / 1e6 / rate


def run_secs(job: Job, worker: Worker, instance: Instance) -> float:
    uncontended = None if job.outputs_present else job.uncontended_ms
    if uncontended is None:
        if not job.is_build:
            return 0.0
        uncontended = known(instance.build_ms_1h, instance.build_ms_24h, 0.0)
    built_by = known(None if job.outputs_present else job.core_score, instance.core_mean)
    mine = known(worker.core_score, instance.core_mean)
    ratio = 1.0
    if built_by is not None and mine is not None:
        ratio = min(max(built_by / mine, 0.5), 2.0)
    return uncontended / 1000 * ratio * (1 + 0.04 * worker.running)


def oom_chance(job: Job, worker: Worker) -> float:
    rate = 0.0 if job.outputs_present else (job.oom_rate or 0.0)
    overshoot = 0.0
    predicted = peak(job)
    if predicted is not None and worker.free_mb is not None and predicted > worker.free_mb:
        overshoot = 1.0 if worker.free_mb == 0 else min(1.0, (predicted - worker.free_mb) / worker.free_mb)
    return min(1.0, rate + overshoot)


def estimate(job: Job, worker: Worker, instance: Instance) -> float:
    ratio = known(instance.stored_ratio, 1.0)
    out = output_bytes(job) or 0.0

    def download(size: float) -> float:
        share = known(instance.read_mbps, 1200.0) / ratio / (instance.downloads + 1)
        return transfer(size, known(worker.down_mbps, instance.down_mean), share)

    up_share = known(instance.write_mbps, 1120.0) / ratio / (instance.uploads + 1)
    upload = transfer(out, known(worker.up_mbps, instance.up_mean), up_share)
    run = run_secs(job, worker, instance)
    retry = oom_chance(job, worker) * run
    if not job.is_build:
        return run + retry
    if job.outputs_present:
        return upload
    if job.substitute_outputs is not None:
        if instance.substitute is not None:
            per_path, per_mb = instance.substitute
            return job.substitute_outputs * per_path + out / 1e6 * per_mb + upload
        return download(out) + upload
    missing = job.missing_bytes if job.missing_bytes is not None else (instance.nar_mb or 0.0) * MIB
    count = job.missing_count if job.missing_count is not None else (instance.paths or 0.0)
    return download(missing) + count * known(instance.per_path, 0.18) + run + retry + upload


def needed_mb(job: Job, instance: Instance) -> float:
    if not job.is_build or job.outputs_present or job.substitute_outputs is not None:
        return 0.0
    predicted = peak(job)
    if predicted is not None:
        return math.ceil(predicted * 1.1)
    if job.fixed_output:
        return 0.0
    return known(instance.peak_24h, instance.peak_1h, 1024.0)


def available_mb(worker: Worker) -> float | None:
    measured = None if worker.free_mb is None else worker.free_mb - worker.unused_mb
    booked = None if worker.total_mb is None else worker.total_mb - worker.reserved_mb
    values = [value for value in (measured, booked) if value is not None]
    return min(values) - worker.kept_mb if values else None


def saturation(job: Job, worker: Worker, instance: Instance) -> tuple[float, bool]:
    if not job.is_build:
        return 0.0, False
    signals = 0
    if worker.assigned:
        threshold = 90.0 if job.builtin else 80.0
        hot = worker.cpu_pct is not None and worker.cpu_pct >= threshold
        low = (
            worker.free_mb is not None
            and worker.total_mb is not None
            and worker.free_mb <= 0.1 * worker.total_mb
        )
        signals += hot or low
    need, available = needed_mb(job, instance), available_mb(worker)
    unfit = need > 0 and available is not None and need > available
    releases = worker.reserved_mb > 0
    veto = unfit and releases and (worker.total_mb is None or need <= worker.total_mb)
    forgiven = False
    if not releases:
        too_large_for_all = job.pool_total_mb is not None and need > job.pool_total_mb
        is_largest = (
            worker.total_mb is None or job.pool_total_mb is None or worker.total_mb >= job.pool_total_mb
        )
        fits_nowhere = (
            not too_large_for_all and job.pool_releasable_mb is not None and need > job.pool_releasable_mb
        )
        forgiven = (too_large_for_all and is_largest) or fits_nowhere
    signals += unfit and not forgiven
    return -8600.0 * signals, veto


def score(job: Job, worker: Worker, instance: Instance) -> Result:
    """Every rule, FairShareRule included."""
    result = Result()
    rules = result.rules
    rules["EstimatedTimeRule"] = 3600.0 - min(estimate(job, worker, instance), 3600.0)
    rules["RescoreWaitRule"] = 0.0
    if job.is_build and job.missing_bytes is None and job.rescore_count < 4:
        result.vetoes.add("RescoreWaitRule")
    waited, average = max(job.now - job.ready_at, 0.0), known(instance.wait_secs, 60.0)
    if average == 0:
        rules["WaitTimeRule"] = 4000.0 if waited > 0 else 0.0
    else:
        rules["WaitTimeRule"] = min(60.0 * waited / average, 4000.0)
    reserve = not job.is_build and job.cached and worker.fetch and instance.total_workers > 0
    idle = min(instance.idle_workers / instance.total_workers, 1.0) if instance.total_workers else 0.0
    rules["ReserveFetchWorkersRule"] = -300.0 * (1 - idle) if reserve else 0.0
    no_download = 0 < instance.download_slots <= instance.downloads
    no_upload = 0 < instance.upload_slots <= instance.uploads
    big_in = (job.missing_bytes or 0) > (instance.nar_mb or 0.0) * MIB and not job.outputs_present
    big_out = (output_bytes(job) or 0.0) > MIB
    held = job.is_build and ((no_download and big_in) or (no_upload and big_out))
    rules["TransferLimitRule"] = -3600.0 if held else 0.0
    rules["QosRule"] = 5000.0 * job.prioritized + 1000.0 * job.build_request + 3000.0 * job.ifd
    rules["ResourceSaturationRule"], veto = saturation(job, worker, instance)
    if veto:
        result.vetoes.add("ResourceSaturationRule")
    rules["FairShareRule"] = -500.0 * (job.share or 0.0)
    return result
