"""Keeps builds off hosts that have no CPU or no memory left for them."""

import math

import numpy as np

from gradient_server.scoring.columns import Field, Flags, JobColumns, Points
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

    def score(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Points:
        """0, or one or two penalties."""
        if not columns.any_build:
            return 0.0
        saturated = self._saturated(columns, worker)
        unfit = self._counts_as_unfit(columns, worker, instance)
        if saturated is None and unfit is None:
            return 0.0
        points = np.zeros(len(columns))
        for signal in (saturated, unfit):
            if signal is not None:
                points += signal
        points *= -RESOURCE_SATURATION_PENALTY
        return columns.without(columns.evaluations, points)

    def veto(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Flags | None:
        """Does not fit now, fits the whole worker, and the worker will release memory."""
        metrics = worker.metrics
        if not metrics.will_release_ram:
            return None
        unfit = self._unfit(columns, worker, instance)
        if unfit is None:
            return None
        too_large = _over(needed_to_start_mb(columns, instance), metrics.ram_total_mb, len(columns))
        return unfit & ~too_large

    def waits(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Flags | None:
        """Larger than every worker, on the largest of them, while that holds reservations.

        It is penalised and not held, for it will never fit; but it can start there once nothing else
        is reserved, and would not ever beside a stream of small builds.
        """
        metrics = worker.metrics
        if not metrics.will_release_ram or math.isnan(metrics.ram_total_mb):
            return None
        pool_total = columns.field(Field.POOL_RAM_TOTAL_MB)
        need = needed_to_start_mb(columns, instance)
        flags: Flags = (need > pool_total) & (metrics.ram_total_mb >= pool_total)
        return flags if np.count_nonzero(flags) else None

    def _saturated(self, columns: JobColumns, worker: WorkerContext) -> Flags | None:
        """Candidates that the host's load counts against; None for none."""
        metrics = worker.metrics
        if metrics.assigned_builds <= 0:
            return None
        low_ram = metrics.ram_free_mb <= metrics.ram_total_mb * RAM_SATURATED_FREE_FRAC
        if low_ram or metrics.cpu_usage_pct >= CPU_SATURATED_PCT_BUILTIN:
            return np.ones(len(columns), np.bool_)
        if metrics.cpu_usage_pct >= CPU_SATURATED_PCT:
            return ~columns.flag(Field.BUILTIN)
        return None

    def _unfit(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Flags | None:
        """Candidates whose need is not available; None for none."""
        available = worker.metrics.ram_available_mb
        if math.isnan(available):
            return None
        need = needed_to_start_mb(columns, instance)
        # What needs nothing fits always, whatever is overbooked.
        unfit = _over(need, max(available, 0.0), len(columns))
        return unfit if np.count_nonzero(unfit) else None

    def _counts_as_unfit(
        self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext
    ) -> Flags | None:
        """Does not fit, the two exceptions for a worker without reservations taken off."""
        metrics = worker.metrics
        unfit = self._unfit(columns, worker, instance)
        if unfit is None or metrics.will_release_ram:
            return unfit
        need = needed_to_start_mb(columns, instance)
        pool_total = columns.field(Field.POOL_RAM_TOTAL_MB)
        too_large = need > pool_total
        largest = too_large & ~(metrics.ram_total_mb < pool_total)
        # What is too large for every host is for the largest alone, however idle another is.
        nowhere = ~too_large & (need > columns.field(Field.POOL_RAM_RELEASABLE_MB))
        flags: Flags = unfit & ~(largest | nowhere)
        return flags


def _over(need: Points, limit: float, size: int) -> Flags:
    """Whose need is above the limit; an unknown limit is above all."""
    return np.full(size, need > limit) if isinstance(need, float) else need > limit
