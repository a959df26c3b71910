"""Short jobs, and jobs whose inputs are near, first."""

import numpy as np

from gradient_server.scoring.columns import JobColumns, Points
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.estimate import estimate_of
from gradient_server.scoring.rule import ScoreRule
from gradient_server.scoring.weights import ESTIMATED_TIME_CAP_SECS, ESTIMATED_TIME_POINTS_PER_SEC

__all__ = ["EstimatedTimeRule"]


class EstimatedTimeRule(ScoreRule):
    """One point for each second that the job is expected to end before the cap."""

    name = "EstimatedTimeRule"
    description = (
        "Prefers what is done soonest on this worker: transfer of missing inputs, run time by history, "
        "risk of running out of memory, upload of the outputs."
    )

    def score(self, columns: JobColumns, worker: WorkerContext, instance: InstanceContext) -> Points:
        """points_per_sec * (cap - min(estimate, cap)), never negative."""
        total = estimate_of(columns, worker, instance).total
        points = np.minimum(total, ESTIMATED_TIME_CAP_SECS)
        np.subtract(ESTIMATED_TIME_CAP_SECS, points, out=points)
        points *= ESTIMATED_TIME_POINTS_PER_SEC
        return points
