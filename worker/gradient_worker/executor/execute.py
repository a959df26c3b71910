"""Runs one job from its start to its final report, whatever happens in between."""

import structlog
import trio
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.shapes import BuildJob

from gradient_worker.executor.build import run_build
from gradient_worker.executor.evaluation import run_evaluation
from gradient_worker.executor.failure import Failure, failure, of_exception
from gradient_worker.executor.job import Job, Stop, StopCause
from gradient_worker.executor.workshop import Workshop
from gradient_worker.jobs import Jobs

__all__ = ["execute"]

logger = structlog.get_logger(__name__)


async def execute(shop: Workshop, jobs: Jobs, job: Job) -> None:
    """Run the job; then ship its log and reports until the server has all of it, or wants none."""
    async with trio.open_nursery() as nursery:
        if job.log is not None:
            nursery.start_soon(job.log.run)
        if not job.reports.finished:
            await _to_final_report(shop, jobs, job)
        if job.log is not None:
            job.log.end()
        jobs.flush(job)
        if job.stopped is None or job.stopped.cause not in (StopCause.FORGOTTEN, StopCause.HANDED_OVER):
            await job.gone.wait()
        nursery.cancel_scope.cancel()
    if job.stopped is not None and job.stopped.cause is StopCause.FORGOTTEN:
        jobs.forget(job)


async def _to_final_report(shop: Workshop, jobs: Jobs, job: Job) -> None:
    outcome: Failure | None = None
    with job.scope:
        try:
            outcome = await _run(shop, job)
        except Exception as error:
            # Where the agent goes, what the job works with may go first: that says nothing of the job.
            await trio.lowlevel.checkpoint_if_cancelled()
            outcome = of_exception(error)
            logger.error("job failed by the worker", assignment_id=job.assignment_id, exc_info=error)
    if job.scope.cancelled_caught:
        assert job.stopped is not None
        outcome = _of_stop(job.stopped)
        if outcome is None:
            return
    if job.reports.finished:
        return  # refused while it ran
    _tell(job, outcome)
    jobs.finish(job, outcome)


async def _run(shop: Workshop, job: Job) -> Failure | None:
    match job.assign.job:
        case BuildJob() as build:
            return await run_build(shop, job, build)
        case evaluation:
            return await run_evaluation(shop, job, evaluation)


def _of_stop(stop: Stop) -> Failure | None:
    """What a stopped job reports; None where it reports nothing (any more)."""
    match stop.cause:
        case StopCause.ABORTED:
            return failure(FailureKind.ABORTED, stop.reason)
        case StopCause.CANCELED:
            return failure(FailureKind.CANCELED, stop.reason)
        case StopCause.REFUSED | StopCause.FORGOTTEN | StopCause.HANDED_OVER:
            return None


def _tell(job: Job, outcome: Failure | None) -> None:
    if outcome is None:
        logger.info("job completed", assignment_id=job.assignment_id, job_id=job.assign.job_id)
    else:
        logger.info(
            "job failed",
            assignment_id=job.assignment_id,
            job_id=job.assign.job_id,
            kind=outcome.kind.value,
            error=outcome.error,
        )
