"""The pool as the API shows it: plain values, taken at one moment."""

import math
from dataclasses import dataclass

from gradient_protocol.kinds import JobKind

from gradient_server.scheduler.model import Assignment
from gradient_server.scheduler.tracker import JobTracker
from gradient_server.scheduler.worker import Worker
from gradient_server.scheduler.worker_pool import WorkerPool

__all__ = ["AssignmentSnapshot", "PoolSnapshot", "SlotsSnapshot", "WorkerSnapshot", "take_snapshot"]


@dataclass(frozen=True, slots=True)
class AssignmentSnapshot:
    """An open assignment. `stage` is a build's, None before its first."""

    assignment_id: str
    job_id: str
    name: str
    kind: str
    state: str
    stage: str | None
    age_secs: float


@dataclass(frozen=True, slots=True)
class SlotsSnapshot:
    """Slots of one kind. `idle_secs`: how long one has been found idle; None for none."""

    maximum: int
    open: int
    waiting: bool
    idle_secs: float | None


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A connected worker. Unknown figures are None; RAM in MB."""

    id: str
    name: str
    architectures: tuple[str, ...]
    features: tuple[str, ...]
    zone: str | None
    projects: tuple[str, ...] | None
    draining: str | None
    slots: dict[str, SlotsSnapshot]
    assignments: tuple[AssignmentSnapshot, ...]
    cpu_usage_pct: float | None
    cpu_core_score: float | None
    ram_total_mb: float | None
    ram_free_mb: float | None
    ram_reserved_mb: float
    window: int
    heartbeat_lateness_secs: float | None


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """Everyone who is connected, what waits by kind, and assignments whose worker is away."""

    workers: tuple[WorkerSnapshot, ...]
    pending: dict[str, int]
    held_back: int
    cluster_members: int
    away: tuple[AssignmentSnapshot, ...]


def take_snapshot(tracker: JobTracker, pool: WorkerPool, monotonic: float) -> PoolSnapshot:
    """The pool now."""
    away = [one for one in pool.assignments.values() if one.worker_id not in pool.workers]
    return PoolSnapshot(
        workers=tuple(_worker(worker, monotonic) for worker in pool),
        pending={str(kind): len(table) for kind, table in tracker.tables.items()},
        held_back=tracker.held_back_count,
        cluster_members=len(tracker.members),
        away=tuple(_assignment(one, monotonic) for one in away),
    )


def _worker(worker: Worker, monotonic: float) -> WorkerSnapshot:
    info, metrics = worker.info, worker.context.metrics
    slots = {
        str(kind): SlotsSnapshot(
            maximum=one.maximum,
            open=one.open,
            waiting=one.ready,
            idle_secs=None if one.idle_since is None else monotonic - one.idle_since,
        )
        for kind, one in worker.slots.items()
    }
    return WorkerSnapshot(
        id=info.id,
        name=info.name,
        architectures=tuple(info.capabilities.architectures),
        features=tuple(info.capabilities.system_features),
        zone=info.capabilities.zone,
        projects=None if info.projects is None else tuple(sorted(info.projects)),
        draining=worker.draining,
        slots=slots,
        assignments=tuple(_assignment(one, monotonic) for one in worker.assigned.values()),
        cpu_usage_pct=_known(metrics.cpu_usage_pct),
        cpu_core_score=_known(metrics.cpu_core_score),
        ram_total_mb=_known(metrics.ram_total_mb),
        ram_free_mb=_known(metrics.ram_free_mb),
        ram_reserved_mb=metrics.ram_reserved_mb,
        window=sum(len(worker.windows[kind]) for kind in JobKind),
        heartbeat_lateness_secs=_known(worker.lateness_secs),
    )


def _assignment(one: Assignment, monotonic: float) -> AssignmentSnapshot:
    return AssignmentSnapshot(
        assignment_id=one.assignment_id,
        job_id=one.job_id,
        name=one.name,
        kind=str(one.kind),
        state=str(one.state),
        stage=None if one.stage is None else str(one.stage),
        age_secs=monotonic - one.assigned_at,
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
