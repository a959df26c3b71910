"""Runs one build job (protocol.md, "Build steps").

    all outputs held            -> no Prefetch, no Build, `substituted`, upload anyway
    else                        Prefetch: fetch the missing inputs
                                Build: the command at the runner, or the download of a fixed output
                                register the outputs, BuildOutput
    then                        Upload: every output committed or skipped
                                JobCompleted (by the caller)

A cluster member always runs its command. Where an earlier agent came further (`Job.phase`), the job
goes on from there: the runner starts no assignment twice, and outputs that are registered stay so.
"""

from pathlib import Path

from gradient_protocol.kinds import FailureKind, JobStage, SpanKind
from gradient_protocol.messages.shapes import BuildJob, Metrics

from gradient_worker.executor.command import run_command
from gradient_worker.executor.download import download_file
from gradient_worker.executor.failure import Failure, failure, with_metrics
from gradient_worker.executor.job import Job, Phase
from gradient_worker.executor.outputs import (
    all_paths,
    describe,
    held_outputs,
    register,
    report_outputs,
    upload_all,
)
from gradient_worker.executor.stages import enter
from gradient_worker.executor.workshop import Workshop
from gradient_worker.runner.values import build_directory

__all__ = ["downloads_directory", "run_build"]


async def run_build(shop: Workshop, job: Job, build: BuildJob) -> Failure | None:
    """Everything up to the final report. None: it succeeded."""
    paths = all_paths(build)
    for path in paths:
        shop.store.real_path(path)  # raises for what is no store path: it becomes part of file names below
    shop.store.pin(job.assignment_id, paths)
    if job.phase is not Phase.BUILT:
        failed = await _make_outputs(shop, job, build)
        if failed is not None:
            return failed
    enter(shop, job, JobStage.UPLOAD)
    infos = held_outputs(shop.store, build)
    if infos is None:
        return failure(FailureKind.TRANSIENT, "an output vanished from the worker's store")
    return await upload_all(shop, job, infos)


def downloads_directory(base_dir: Path, assignment_id: str) -> Path:
    """Where a download puts its output: such a build has no command, so the runner knows nothing of it."""
    return base_dir / "downloads" / assignment_id


async def _make_outputs(shop: Workshop, job: Job, build: BuildJob) -> Failure | None:
    taken_up = job.phase is Phase.STARTED
    held = held_outputs(shop.store, build)
    if held and not job.is_member and job.phase is Phase.ACCEPTED:
        made = await describe(shop, build, held)
        await report_outputs(job, build, made, metrics=None, substituted=True)
        return None
    if job.phase is Phase.ACCEPTED:
        enter(shop, job, JobStage.PREFETCH)
        failed = await shop.inputs.fetch(job.assignment_id, build.inputs, job.spans, job.count)
        if failed is not None:
            return failed
    enter(shop, job, JobStage.BUILD)
    metrics: Metrics | None = None
    if build.fixed_output is not None and not build.command:
        place = downloads_directory(shop.base_dir, job.assignment_id)
        failed = await _download(shop, job, build, place)
    else:
        directory = build_directory(shop.base_dir, job.assignment_id)
        place = directory.outputs
        failed, metrics = await run_command(shop, job, build, directory)
    if failed is not None:
        return failed
    outputs = await register(shop, build, place, taken_up=taken_up)
    if isinstance(outputs, Failure):
        return with_metrics(outputs, metrics)
    await report_outputs(job, build, outputs, metrics=metrics, substituted=False)
    return None


async def _download(shop: Workshop, job: Job, build: BuildJob, place: Path) -> Failure | None:
    if build.fixed_output is None or len(build.outputs) != 1:
        return failure(FailureKind.PERMANENT, "a download has exactly one output")
    started = job.spans.now()
    target = place / build.outputs[0].path
    outcome = await download_file(build.fixed_output, target, shop.threads, timeout_secs=build.timeout_secs)
    if isinstance(outcome, Failure):
        return outcome
    job.spans.add(SpanKind.DOWNLOAD, started, stored_bytes=outcome, paths=1)
    return None
