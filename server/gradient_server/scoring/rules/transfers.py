"""Rules about what has to be moved or fetched."""

import math

import numpy as np

from gradient_server.scoring.columns import Field, Flags, JobColumns, Points
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.rule import ScoreRule
from gradient_server.scoring.weights import (
    RESERVE_FETCH_PENALTY,
    SMALL_UPLOAD_BYTES,
    TRANSFER_LIMIT_HOLD,
)

__all__ = ["ReserveFetchWorkersRule", "TransferLimitRule"]

_BYTES_PER_MIB = 1024.0 * 1024.0


class ReserveFetchWorkersRule(ScoreRule):
    """Leaves the workers that can fetch to the evaluations that must."""

    name = "ReserveFetchWorkersRule"
    description = "Lowers evaluations with a cached source on workers that can fetch, the busier the pool."

    def score(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Points:
        """-penalty * (1 - idle / total) for a cached evaluation on a fetching worker."""
        if not worker.fetch or instance.total_workers <= 0 or columns.all_builds:
            return 0.0
        busy_share = 1.0 - min(instance.idle_workers / instance.total_workers, 1.0)
        return columns.field(Field.CACHED_EVAL) * (-RESERVE_FETCH_PENALTY * busy_share)


class TransferLimitRule(ScoreRule):
    """Holds back large transfers while every slot for them is taken."""

    name = "TransferLimitRule"
    description = (
        "Keeps builds with much to fetch, or outputs to send, below the floor while the server's "
        "transfer slots are full, until their other bonuses outweigh the hold."
    )

    def score(
        self,
        columns: JobColumns,
        worker: WorkerContext,  # noqa: ARG002 - the slots are the server's
        instance: InstanceContext,
    ) -> Points:
        """-hold for a build whose download or upload has no slot."""
        no_download = 0 < instance.download_slots <= instance.downloads_in_flight
        no_upload = 0 < instance.upload_slots <= instance.uploads_in_flight
        if not no_download and not no_upload:
            return 0.0
        held = np.zeros(len(columns), np.bool_)
        if no_download:
            held |= self._large_download(columns, instance)
        if no_upload:
            held |= columns.output_bytes > SMALL_UPLOAD_BYTES
        return np.where(held & columns.is_build, -TRANSFER_LIMIT_HOLD, 0.0)

    def _large_download(self, columns: JobColumns, instance: InstanceContext) -> Flags:
        mean_mb = instance.nar_size_mb.w1h
        mean_bytes = 0.0 if math.isnan(mean_mb) else mean_mb * _BYTES_PER_MIB
        flags: Flags = (columns.missing_nar_size > mean_bytes) & ~columns.outputs_present
        return flags
