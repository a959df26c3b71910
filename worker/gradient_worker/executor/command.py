"""The command of a build, from its start at the runner to what its end means."""

from collections.abc import Mapping

import structlog
import trio
from gradient_protocol.kinds import FailureKind, SpanKind
from gradient_protocol.messages.shapes import BuildJob, Metrics

from gradient_worker.cluster_socket import cluster_socket_path, while_served
from gradient_worker.executor.environment import command_environment, member_environment
from gradient_worker.executor.failure import Failure, failure, of_exit, with_metrics
from gradient_worker.executor.job import Job, Phase, StopCause
from gradient_worker.executor.workshop import Workshop
from gradient_worker.runner.client import RunnerClient
from gradient_worker.runner.layout import ExitReason
from gradient_worker.runner.values import BuildDirectory, BuildExit, BuildSpec, RunnerGone, RunnerRefused
from gradient_worker.timing import CLEANUP_SECS, HOST_FAILURE_WINDOW_SECS

__all__ = ["run_command"]

HASH_CHARS = 32
"""Of a store path, before the dash and the name."""

MIN_SPOOL_BYTES = 512 * 1024 * 1024
"""Output of one build that is kept on disk, at the least."""

logger = structlog.get_logger(__name__)


async def run_command(
    shop: Workshop, job: Job, build: BuildJob, directory: BuildDirectory
) -> tuple[Failure | None, Metrics | None]:
    runner = await shop.runner.client()
    concurrent = shop.host.running + 1
    job.phase = Phase.STARTED
    try:
        spec = _spec(shop, job, build, directory)
        ended = await while_served(shop, job, lambda: _at_runner(shop, runner, job, spec))
        metrics = shop.meters.read(
            job.assignment_id,
            ended,
            concurrent=concurrent,
            cores=_cores(shop, build),
            score=shop.cpu_core_score,
        )
    except RunnerRefused as error:
        return failure(FailureKind.TRANSIENT, f"the build could not be started: {error}"), None
    finally:
        shop.meters.unwatch(job.assignment_id)
    _note_span(shop, job, ended)
    host_failure = await _is_host_failure(shop, job.assignment_id)
    failed = of_exit(
        ended,
        timeout_secs=build.timeout_secs,
        max_silent_secs=build.max_silent_secs,
        host_failure=host_failure,
    )
    return with_metrics(failed, metrics) if failed is not None else None, metrics


def _note_span(shop: Workshop, job: Job, ended: BuildExit) -> None:
    """When the command ran; how long is the runner's to say, for the wall clock may be set meanwhile."""
    end = shop.clock.of_wall(ended.ended_at) if ended.ended_steady is None else ended.ended_steady
    secs = ended.ended_at - ended.started_at if ended.duration_secs is None else ended.duration_secs
    job.spans.add(SpanKind.BUILD, end - max(0.0, secs), end=end)


async def _at_runner(shop: Workshop, runner: RunnerClient, job: Job, spec: BuildSpec) -> BuildExit:
    assignment_id = job.assignment_id
    by_signal = False
    try:
        running = await runner.start(spec)
        shop.meters.watch(running)
        shop.host.started(assignment_id, trio.current_time())
        ended = await runner.wait(assignment_id)
        by_signal = ended.signal is not None and ended.reason is ExitReason.EXITED
    except trio.Cancelled:
        # An agent that goes, whatever makes it go, leaves its builds to the next one.
        if job.stopped is not None and job.stopped.cause is not StopCause.HANDED_OVER:
            await _kill(runner, assignment_id)
        raise
    finally:
        shop.host.ended(assignment_id, trio.current_time(), by_signal=by_signal)
    if job.log is not None:
        job.log.end(ended.log_discarded_bytes)
    return ended


async def _kill(runner: RunnerClient, assignment_id: str) -> None:
    with trio.move_on_after(CLEANUP_SECS, shield=True) as scope:
        try:
            await runner.kill(assignment_id)
            await runner.wait(assignment_id)
        except (RunnerGone, RunnerRefused) as error:
            logger.warning(
                "a build was not there to be killed", assignment_id=assignment_id, error=str(error)
            )
    if scope.cancelled_caught:
        logger.error("a killed build has not ended", assignment_id=assignment_id, waited_secs=CLEANUP_SECS)


async def _is_host_failure(shop: Workshop, assignment_id: str) -> bool:
    if not shop.host.may_be_host(assignment_id):
        return False
    await trio.sleep(HOST_FAILURE_WINDOW_SECS)  # until the others have ended too, or have not
    return shop.host.is_host(assignment_id)


def _spec(shop: Workshop, job: Job, build: BuildJob, directory: BuildDirectory) -> BuildSpec:
    limits = shop.log_limits
    hours = int(build.timeout_secs // 3600) + 1
    return BuildSpec(
        assignment_id=job.assignment_id,
        derivation_hash=build.drv_path[:HASH_CHARS],
        argv=tuple(build.command),
        env=_environment(shop, job, build, directory),
        timeout_secs=build.timeout_secs,
        max_silent_secs=build.max_silent_secs,
        # A bound for the disk alone: `log_plan` decides what of it becomes the log.
        log_limit_bytes=max(MIN_SPOOL_BYTES, limits.sustained_bytes_per_hour * hours),
    )


def _environment(shop: Workshop, job: Job, build: BuildJob, directory: BuildDirectory) -> Mapping[str, str]:
    environment = command_environment(
        build, directory, shop.store.real_path, tools=shop.tools, cores=_cores(shop, build)
    )
    if job.member is None:
        return environment
    socket = cluster_socket_path(shop.base_dir, job.assignment_id)
    return {**environment, **member_environment(job.member.signals, socket)}


def _cores(shop: Workshop, build: BuildJob) -> int:
    if build.cores is not None:
        return build.cores
    return max(1, shop.cpu_count // max(1, shop.max_concurrent_builds))
