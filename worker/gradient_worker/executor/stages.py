"""Tells the server where a job is. Stages are live state: one that no session carries is not kept.

After a resume the present stage is reported again (`Job.stage_update`).
"""

from gradient_protocol.kinds import EvalStage, JobStage

from gradient_worker.executor.job import Job
from gradient_worker.executor.workshop import Workshop

__all__ = ["enter"]


def enter(shop: Workshop, job: Job, stage: JobStage | EvalStage) -> None:
    """The job enters a stage."""
    job.stage = stage
    job.progress = None
    update = job.stage_update()
    if update is not None:
        shop.link.post(update)
