"""Rules about whose job it is."""

import numpy as np

from gradient_server.scoring.columns import Field, JobColumns, Vector
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.rule import ScoreRule
from gradient_server.scoring.weights import (
    FAIR_SHARE_WEIGHT,
    QOS_BUILD_REQUEST,
    QOS_IFD,
    QOS_PRIORITIZED,
)

__all__ = ["FairShareRule", "QosRule"]


class QosRule(ScoreRule):
    """Fixed bonuses that add up."""

    name = "QosRule"
    description = "Prefers prioritised work, what a person asked for, and builds that an evaluation waits on."

    def score(
        self,
        columns: JobColumns,
        worker: WorkerContext,  # noqa: ARG002 - the same everywhere
        instance: InstanceContext,  # noqa: ARG002 - the interface of a rule
    ) -> Vector:
        """prioritized + build request + imported derivation."""
        return (
            columns.field(Field.PRIORITIZED) * QOS_PRIORITIZED
            + columns.field(Field.BUILD_REQUEST) * QOS_BUILD_REQUEST
            + columns.field(Field.IFD) * QOS_IFD
        )


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
    ) -> Vector:
        """-weight * share; nothing where the share is unknown."""
        share = np.nan_to_num(columns.field(Field.PROJECT_WORK_SHARE), nan=0.0)
        return share * -FAIR_SHARE_WEIGHT
