"""What becomes of a build's outputs: into the store, into the report, to the server."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.shapes import BuildJob, BuildOutput, BuildProduct, BuiltOutput, Metrics

from gradient_worker.executor.failure import Failure, failure, lost_outputs, missing_outputs
from gradient_worker.executor.job import Job, Phase
from gradient_worker.executor.products import find_products
from gradient_worker.executor.workshop import Workshop
from gradient_worker.stores.base import BadOutputError, PathInfo, Store
from gradient_worker.transfer import Refused, Uploaded

__all__ = ["Outputs", "all_paths", "describe", "held_outputs", "register", "report_outputs", "upload_all"]

MAX_UPLOADS_SIDE_BY_SIDE = 4
"""Uploads of one build at once."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a build in the store, in the job's order, and the products that they name."""

    infos: Sequence[PathInfo]
    products: Sequence[BuildProduct]


async def register(
    shop: Workshop, build: BuildJob, place: Path, *, taken_up: bool = False
) -> Outputs | Failure:
    """Move what the command made in `place` into the store; a missing output is the command's failure.

    `taken_up`: an earlier agent started the command, and may have moved its outputs before it went. Else
    what the store holds is of another run, and stands in for nothing. One that it had
    moved and not registered is taken where it lies; one that is nowhere may have been lost with it, so the
    build is tried again.
    """
    if not build.outputs:
        return Outputs((), ())  # a thread costs more than all else that such a build costs here
    return await shop.threads.run(lambda: _register(shop.store, build, place, taken_up=taken_up))


async def describe(shop: Workshop, build: BuildJob, infos: Sequence[PathInfo]) -> Outputs:
    """Outputs that are held already."""
    return await shop.threads.run(lambda: _describe(shop.store, build, infos))


def _register(store: Store, build: BuildJob, place: Path, *, taken_up: bool) -> Outputs | Failure:
    candidates = all_paths(build)
    infos: list[PathInfo] = []
    missing: list[str] = []
    for output in build.outputs:
        made = place / output.path
        held = store.info(output.path)
        try:
            if os.path.lexists(made):
                infos.append(store.register_output(output.path, made, candidates))
            elif held is not None and taken_up:
                infos.append(held)
            elif taken_up and (unregistered := store.take_unregistered(output.path)) is not None:
                infos.append(store.register_output(output.path, unregistered, candidates))
            else:
                missing.append(output.name)
        except BadOutputError as error:
            return failure(FailureKind.PERMANENT, str(error))
    if missing:
        return lost_outputs(missing) if taken_up else missing_outputs(missing)
    return _describe(store, build, infos)


def _describe(store: Store, build: BuildJob, infos: Sequence[PathInfo]) -> Outputs:
    named = zip(build.outputs, infos, strict=True)
    products = [p for output, info in named for p in find_products(output.name, store.real_path(info.path))]
    return Outputs(infos, products)


async def report_outputs(
    job: Job, build: BuildJob, made: Outputs, *, metrics: Metrics | None, substituted: bool
) -> None:
    """Make the BuildOutput report."""
    outputs = [
        BuiltOutput(
            name=output.name,
            path=info.path,
            nar_hash=info.nar_hash,
            nar_size=info.nar_size,
            references=list(info.references),
            contains_store_dir=info.contains_store_dir,
        )
        for output, info in zip(build.outputs, made.infos, strict=True)
    ]
    update = BuildOutput(
        outputs=outputs, products=list(made.products), substituted=substituted, metrics=metrics
    )
    await job.reports.report(update)
    job.phase = Phase.BUILT


async def upload_all(shop: Workshop, job: Job, infos: Sequence[PathInfo]) -> Failure | None:
    """Upload the outputs side by side, until each is committed or skipped."""
    outcomes: list[Uploaded | Refused] = []
    places = trio.Semaphore(MAX_UPLOADS_SIDE_BY_SIDE)

    async def one(info: PathInfo) -> None:
        async with places:
            outcomes.append(await shop.transfers.upload(job.assignment_id, info, job.spans))
        job.count(sum(isinstance(outcome, Uploaded) for outcome in outcomes), len(infos))

    if infos:
        job.count(0, len(infos))
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
        shop.speeds.upload.add(nar_bytes, job.spans.now() - first_grant)
    return None


def held_outputs(store: Store, build: BuildJob) -> list[PathInfo] | None:
    """The outputs in the store; None where one is missing."""
    infos = [store.info(output.path) for output in build.outputs]
    held = [info for info in infos if info is not None]
    return held if len(held) == len(infos) else None


def all_paths(build: BuildJob) -> list[str]:
    """What the job must not lose to a garbage collection, and what its outputs may refer to."""
    return [*(one.path for one in build.inputs), *(output.path for output in build.outputs)]
