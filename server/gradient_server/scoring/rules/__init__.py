"""The rules of the scoring policies, one module an area. Pure."""

from gradient_server.scoring.rules.estimated_time import EstimatedTimeRule
from gradient_server.scoring.rules.fairness import FairShareRule, QosRule
from gradient_server.scoring.rules.saturation import ResourceSaturationRule
from gradient_server.scoring.rules.transfers import ReserveFetchWorkersRule, TransferLimitRule
from gradient_server.scoring.rules.waiting import RescoreWaitRule, WaitTimeRule

__all__ = [
    "EstimatedTimeRule",
    "FairShareRule",
    "QosRule",
    "RescoreWaitRule",
    "ReserveFetchWorkersRule",
    "ResourceSaturationRule",
    "TransferLimitRule",
    "WaitTimeRule",
]
