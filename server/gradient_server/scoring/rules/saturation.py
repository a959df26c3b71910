"""Keeps builds off hosts that have no CPU or no memory left for them."""

import math

import numpy as np

from gradient_server.scoring.columns import Field, Flags, JobColumns, Vector
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.ram_need import needed_to_start_mb
from gradient_server.scoring.rule import ScoreRule
from gradient_server.scoring.weights import (
    CPU_SATURATED_PCT,
    CPU_SATURATED_PCT_BUILTIN,
    RAM_SATURATED_FREE_FRAC,
    RESOURCE_SATURATION_PENALTY,
)

__all__ = ["ResourceSaturationRule"]

_NEED = "ram_needed_to_start"


class ResourceSaturationRule(ScoreRule):
    """Penalties that no wait outweighs, and a hold where waiting will help.

    One penalty when CPU or free RAM is saturated, counted only on a worker that holds a job: a host
    kept busy by others slows down and never stops. Another when the RAM that the build needs is
    not available. A build that no worker of the pool could ever fit is let through where it fits
    best, or it would wait for ever.
    """

    name = "ResourceSaturationRule"
    description = (
        "Lowers builds on a worker whose CPU or memory is used up, and holds one that does not fit "
        "now but will once running builds give their memory back."
    )

    def score(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Vector:
        """0, or one or two penalties."""
        signals = self._saturated(columns, worker).astype(np.float64)
        signals += self._counts_as_unfit(columns, worker, instance)
        return np.where(columns.is_build, signals * -RESOURCE_SATURATION_PENALTY, 0.0)

    def veto(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Flags | None:
        """Does not fit now, fits the whole worker, and the worker will release memory."""
        metrics = worker.metrics
        if not metrics.will_release_ram:
            return None
        need = self._need(columns, instance)
        fits_whole = ~(need > metrics.ram_total_mb)
        flags: Flags = columns.is_build & self._unfit(need, worker) & fits_whole
        return flags

    def _saturated(self, columns: JobColumns, worker: WorkerContext) -> Flags:
        metrics = worker.metrics
        saturated = np.zeros(len(columns), np.bool_)
        if metrics.assigned_jobs <= 0:
            return saturated
        if (
            metrics.ram_free_mb <= metrics.ram_total_mb * RAM_SATURATED_FREE_FRAC
            or metrics.cpu_usage_pct >= CPU_SATURATED_PCT_BUILTIN
        ):
            saturated[:] = True
        elif metrics.cpu_usage_pct >= CPU_SATURATED_PCT:
            saturated = ~columns.flag(Field.BUILTIN)
        return saturated

    def _need(self, columns: JobColumns, instance: InstanceContext) -> Vector:
        known = columns.memo.get(_NEED)
        if isinstance(known, np.ndarray):
            return known
        need = needed_to_start_mb(columns, instance)
        columns.memo[_NEED] = need
        return need

    def _unfit(self, need: Vector, worker: WorkerContext) -> Flags:
        available = worker.metrics.ram_available_mb
        if math.isnan(available):
            return np.zeros(len(need), np.bool_)
        flags: Flags = (need > 0.0) & (need > available)
        return flags

    def _counts_as_unfit(
        self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext
    ) -> Flags:
        """Does not fit, the two exceptions for a worker without reservations taken off."""
        metrics = worker.metrics
        need = self._need(columns, instance)
        unfit = self._unfit(need, worker)
        if metrics.will_release_ram or not unfit.any():
            return unfit
        pool_total = columns.field(Field.POOL_RAM_TOTAL_MB)
        largest = (need > pool_total) & ~(metrics.ram_total_mb < pool_total)
        nowhere = need > columns.field(Field.POOL_RAM_RELEASABLE_MB)
        flags: Flags = unfit & ~(largest | nowhere)
        return flags
