"""Rules about time spent waiting: for a worker, and for a worker's score."""

import numpy as np

from gradient_server.scoring.columns import Field, Flags, JobColumns, Points
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.rule import ScoreRule
from gradient_server.scoring.weights import (
    RESCORE_MAX_ROUNDS,
    WAIT_TIME_CAP,
    WAIT_TIME_FALLBACK_AVG_SECS,
    WAIT_TIME_GAIN,
)

__all__ = ["RescoreWaitRule", "WaitTimeRule"]


class WaitTimeRule(ScoreRule):
    """Points for each multiple of the average wait, from the moment the dependencies finished."""

    name = "WaitTimeRule"
    description = "Raises what has waited long, measured against the average wait, so that nothing starves."

    def score(
        self,
        columns: JobColumns,
        worker: WorkerContext,  # noqa: ARG002 - waiting is the same everywhere
        instance: InstanceContext,
    ) -> Points:
        """min(gain * waited / average, cap); nothing where `ready_at` is unknown."""
        waited = columns.now - columns.field(Field.READY_AT)
        np.fmax(waited, 0.0, out=waited)
        average = instance.wait_secs.w1h_or(WAIT_TIME_FALLBACK_AVG_SECS)
        if average <= 0.0:
            return np.where(waited > 0.0, WAIT_TIME_CAP, 0.0)
        waited *= WAIT_TIME_GAIN / average
        return np.minimum(waited, WAIT_TIME_CAP, out=waited)


class RescoreWaitRule(ScoreRule):
    """Gives a worker the time to say what it would have to fetch."""

    name = "RescoreWaitRule"
    description = "Holds a build for up to four rounds while the worker has not scored it yet."
    holds_unscored = True

    def score(
        self,
        columns: JobColumns,  # noqa: ARG002 - the interface of a rule
        worker: WorkerContext,  # noqa: ARG002 - the interface of a rule
        instance: InstanceContext,  # noqa: ARG002 - the interface of a rule
    ) -> Points:
        """Nothing: the rule only holds."""
        return 0.0

    def veto(
        self,
        columns: JobColumns,
        worker: WorkerContext,  # noqa: ARG002 - the interface of a rule
        instance: InstanceContext,  # noqa: ARG002 - the interface of a rule
    ) -> Flags | None:
        """A build whose missing bytes are unknown, until its fourth round."""
        unknown = np.isnan(columns.missing_nar_size)
        if not np.count_nonzero(unknown):
            return None
        flags: Flags = unknown & (columns.field(Field.RESCORE_COUNT) < RESCORE_MAX_ROUNDS)
        return flags if columns.all_builds else flags & columns.is_build
