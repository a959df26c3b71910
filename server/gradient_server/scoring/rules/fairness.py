"""Rules about whose job it is."""

import numpy as np

from gradient_server.scoring.columns import Field, JobColumns, Points, filled
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.rule import ScoreRule
from gradient_server.scoring.weights import (
    FAIR_SHARE_WEIGHT,
    QOS_BUILD_REQUEST,
    QOS_IFD,
    QOS_PRIORITIZED,
)

__all__ = ["FairShareRule", "QosRule"]


# In the order of the fields, which lie side by side: prioritized, build request, imported derivation.
_WEIGHTS = np.array([QOS_PRIORITIZED, QOS_BUILD_REQUEST, QOS_IFD])


class QosRule(ScoreRule):
    """Fixed bonuses that add up."""

    name = "QosRule"
    description = "Prefers prioritised work, what a person asked for, and builds that an evaluation waits on."

    def score(
        self,
        columns: JobColumns,
        worker: WorkerContext,  # noqa: ARG002 - the same everywhere
        instance: InstanceContext,  # noqa: ARG002 - the interface of a rule
    ) -> Points:
        """prioritized + build request + imported derivation."""
        flags = columns.matrix[Field.PRIORITIZED : Field.IFD + 1]
        points: Points = _WEIGHTS @ flags
        return points


class FairShareRule(ScoreRule):
    """Takes points from a project in proportion to what it runs already."""

    name = "FairShareRule"
    description = "Lowers the jobs of a project by its share of the work in flight."
    uses_project_work_share = True

    def score(
        self,
        columns: JobColumns,
        worker: WorkerContext,  # noqa: ARG002 - the same everywhere
        instance: InstanceContext,  # noqa: ARG002 - the interface of a rule
    ) -> Points:
        """-weight * share; nothing where the share is unknown."""
        share, _ = filled(columns.field(Field.PROJECT_WORK_SHARE), 0.0)
        return share * -FAIR_SHARE_WEIGHT
