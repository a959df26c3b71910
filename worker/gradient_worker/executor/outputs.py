"""What becomes of a build's outputs: into the store, into the report, to the server."""

import os
from collections.abc import Sequence
from pathlib import Path

import trio
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.shapes import BuildJob, BuildOutput, BuiltOutput, Metrics

from gradient_worker.executor.failure import Failure, failure, missing_outputs
from gradient_worker.executor.job import Job, Phase
from gradient_worker.executor.products import find_products
from gradient_worker.executor.workshop import Workshop
from gradient_worker.stores.base import BadOutputError, PathInfo, Store
from gradient_worker.transfer import Refused, Uploaded

__all__ = ["all_paths", "held_outputs", "register", "report_outputs", "upload_all"]

MAX_UPLOADS_SIDE_BY_SIDE = 4
"""Uploads of one build at once."""


async def register(shop: Workshop, build: BuildJob, place: Path) -> list[PathInfo] | Failure:
    """Move what the command made in `place` into the store; a missing output is the command's failure."""
    return await shop.threads.run(lambda: _register(shop.store, build, place))


def _register(store: Store, build: BuildJob, place: Path) -> list[PathInfo] | Failure:
    candidates = all_paths(build)
    infos: list[PathInfo] = []
    missing: list[str] = []
    for output in build.outputs:
        made = place / output.path
        held = store.info(output.path)
        try:
            if os.path.lexists(made):
                infos.append(store.register_output(output.path, made, candidates))
            elif held is not None:  # an earlier agent moved it before it went
                infos.append(held)
            else:
                missing.append(output.name)
        except BadOutputError as error:
            return failure(FailureKind.PERMANENT, str(error))
    return missing_outputs(missing) if missing else infos


async def report_outputs(
    shop: Workshop,
    job: Job,
    build: BuildJob,
    infos: Sequence[PathInfo],
    *,
    metrics: Metrics | None,
    substituted: bool,
) -> None:
    """Make the BuildOutput report, with the products that the outputs name."""
    names = {output.path: output.name for output in build.outputs}
    products = await shop.threads.run(
        lambda: [
            p for info in infos for p in find_products(names[info.path], shop.store.real_path(info.path))
        ]
    )
    outputs = [
        BuiltOutput(
            name=names[info.path],
            path=info.path,
            nar_hash=info.nar_hash,
            nar_size=info.nar_size,
            references=list(info.references),
            contains_store_dir=info.contains_store_dir,
        )
        for info in infos
    ]
    update = BuildOutput(outputs=outputs, products=products, substituted=substituted, metrics=metrics)
    await job.reports.report(update)
    job.phase = Phase.BUILT


async def upload_all(shop: Workshop, job: Job, infos: Sequence[PathInfo]) -> Failure | None:
    """Upload the outputs side by side, until each is committed or skipped."""
    outcomes: list[Uploaded | Refused] = []
    places = trio.Semaphore(MAX_UPLOADS_SIDE_BY_SIDE)

    async def one(info: PathInfo) -> None:
        async with places:
            outcomes.append(await shop.transfers.upload(job.assignment_id, info, job.spans))

    async with trio.open_nursery() as nursery:
        for info in infos:
            nursery.start_soon(one, info)
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
    if refused:
        return failure(FailureKind.TRANSIENT, f"upload of {refused[0].path} failed: {refused[0].reason}")
    pushed = [outcome for outcome in outcomes if isinstance(outcome, Uploaded) and outcome.pushed]
    if pushed:
        first_grant = min(outcome.granted_at for outcome in pushed)
        nar_bytes = sum(outcome.info.nar_size for outcome in pushed)
        shop.speeds.upload.add(nar_bytes, shop.clock.now() - first_grant)
    return None


def held_outputs(store: Store, build: BuildJob) -> list[PathInfo] | None:
    """The outputs in the store; None where one is missing."""
    infos = [store.info(output.path) for output in build.outputs]
    held = [info for info in infos if info is not None]
    return held if len(held) == len(infos) else None


def all_paths(build: BuildJob) -> list[str]:
    """What the job must not lose to a garbage collection, and what its outputs may refer to."""
    return [*(one.path for one in build.inputs), *(output.path for output in build.outputs)]
