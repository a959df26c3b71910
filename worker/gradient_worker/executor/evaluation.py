"""Runs one evaluation job: fetches its source, evaluates it, reports the graph as it comes.

    Fetch       the source into the store; FetchResult; a Git source is uploaded, for the server has it not
    Evaluate    the recipe evaluator, step by step: it asks, this module answers
                  Report      -> EvalResult, in batches
                  QueryKnown  -> QueryKnownDerivations
                  NeedImport  -> ImportRequest, then the outputs are fetched and read in turn
                  Done        -> EvalStats

While an import is built the evaluation keeps its own slot and no build slot. Errors of the recipe are
results (EvalResult.errors), and the job completes; what this worker could not do is a failure.
"""

import resource
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio
from gradient_protocol.kinds import EvalStage, EvalStep, FailureKind, NoteLevel, SpanKind
from gradient_protocol.limits import MAX_ERROR_TEXT
from gradient_protocol.messages.shapes import (
    EvalJob,
    EvalResult,
    EvalStats,
    FetchResult,
    GitSource,
    Note,
    PathSource,
)
from gradient_protocol.messages.worker import EvalMessage
from gradient_protocol.nar import remove_tree
from gradient_protocol.text import legible

from gradient_worker.evaluator.evaluator import (
    Answer,
    Done,
    ImportAnswer,
    KnownAnswer,
    NeedImport,
    QueryKnown,
    RecipeEvaluation,
    Report,
)
from gradient_worker.evaluator.git import GitError, fetch_git, register_source
from gradient_worker.executor.failure import Failure, failure, inputs_unavailable
from gradient_worker.executor.job import Job
from gradient_worker.executor.outputs import upload_all
from gradient_worker.executor.stages import enter
from gradient_worker.executor.workshop import Workshop
from gradient_worker.queries import QueryRefusedError
from gradient_worker.stores.base import PathInfo
from gradient_worker.transfer import Downloaded, Lost, Stalled

__all__ = ["run_evaluation"]


async def run_evaluation(shop: Workshop, job: Job, evaluation: EvalJob) -> Failure | None:
    """Everything up to the final report. None: it came to an end, with or without errors of the recipe."""
    with trio.move_on_after(evaluation.timeout_secs):
        try:
            return await _fetch_and_evaluate(shop, job, evaluation)
        except GitError as error:
            kind = FailureKind.PERMANENT if error.permanent else FailureKind.TRANSIENT
            return failure(kind, str(error))
        except QueryRefusedError as error:
            return failure(FailureKind.TRANSIENT, str(error))
    return failure(FailureKind.TIMEOUT, f"the evaluation took longer than {evaluation.timeout_secs:g} s")


async def _fetch_and_evaluate(shop: Workshop, job: Job, evaluation: EvalJob) -> Failure | None:
    source = evaluation.source
    if EvalStep.FETCH not in evaluation.steps and isinstance(source, GitSource):
        return failure(FailureKind.PERMANENT, "an evaluation that does not fetch needs a source in the store")
    enter(shop, job, EvalStage.FETCHING)
    match source:
        case PathSource(path=path):
            info = await _held_or_fetched(shop, job, path)
            rev = None
        case GitSource():
            info, rev = await _fetch_from_git(shop, job, source)
    if isinstance(info, Failure):
        return info
    if EvalStep.FETCH in evaluation.steps:
        result = FetchResult(path=info.path, nar_hash=info.nar_hash, nar_size=info.nar_size, rev=rev)
        await job.reports.report(result)
        if isinstance(source, GitSource):
            failed = await upload_all(shop, job, [info])
            if failed is not None:
                return failed
    if EvalStep.EVALUATE in evaluation.steps:
        return await _evaluate(shop, job, evaluation, info)
    return None


async def _held_or_fetched(shop: Workshop, job: Job, path: str) -> PathInfo | Failure:
    """A path that the server has, in this worker's store."""
    shop.store.pin(job.assignment_id, [path])
    held = shop.store.info(path)
    if held is not None:
        return held
    started = job.spans.now()
    began = trio.current_time()
    outcome = await shop.transfers.download(job.assignment_id, path, None, job.spans)
    match outcome:
        case Downloaded(info=info, stored_bytes=stored):
            job.spans.add(SpanKind.FETCH, started, nar_bytes=info.nar_size, stored_bytes=stored, paths=1)
            shop.speeds.download.add(info.nar_size, trio.current_time() - began)
            return info
        case Lost(reason=reason):
            return inputs_unavailable([path], reason)
        case Stalled(reason=reason):
            return failure(FailureKind.TRANSIENT, f"fetching {path} failed: {reason}")


async def _fetch_from_git(shop: Workshop, job: Job, source: GitSource) -> tuple[PathInfo, str]:
    started = job.spans.now()
    work = shop.base_dir / "sources" / job.assignment_id
    tree = work / "tree"
    await shop.threads.run(lambda: work.mkdir(parents=True, exist_ok=True))
    try:
        rev = await fetch_git(source.url, source.rev, tree)
        info = await shop.threads.run(lambda: register_source(shop.store, tree))
    finally:
        with trio.CancelScope(shield=True):
            await shop.threads.run(lambda: remove_tree(work))
    shop.store.pin(job.assignment_id, [info.path])
    job.spans.add(SpanKind.FETCH, started, nar_bytes=info.nar_size, paths=1)
    return info, rev


async def _evaluate(shop: Workshop, job: Job, evaluation: EvalJob, source: PathInfo) -> Failure | None:
    enter(shop, job, EvalStage.EVALUATING_DERIVATIONS)
    started = job.spans.now()
    directory = shop.store.real_path(source.path)
    recipes = RecipeEvaluation(directory, source.path, evaluation.attrs)
    answer: Answer | None = None
    while True:
        step = await shop.threads.run(partial(recipes.advance, answer))
        job.count(*recipes.progress)
        match step:
            case Report(result=result):
                _show(shop, job, result)
                await job.reports.report(result)
                answer = None
            case QueryKnown(drv_paths=paths):
                asked = job.spans.now()
                known = await shop.queries.known_derivations(job.assignment_id, paths)
                job.spans.add(SpanKind.KNOWN_DERIVATIONS_WAIT, asked, paths=len(paths))
                answer = KnownAnswer(frozenset(known))
            case NeedImport(paths=paths):
                imported = await _import(shop, job, paths)
                if isinstance(imported, Failure):
                    return imported
                answer = imported
            case Done(stats=stats):
                job.spans.add(SpanKind.EVALUATION, started)
                await job.reports.report(_with_peak(stats))
                return None


async def _import(shop: Workshop, job: Job, paths: Sequence[str]) -> ImportAnswer | Failure:
    asked = job.spans.now()
    result = await shop.queries.build_now(job.assignment_id, paths)
    job.spans.add(SpanKind.IMPORT_WAIT, asked, paths=len(paths))
    directories: dict[str, Path] = {}
    for path in result.ready:
        info = await _held_or_fetched(shop, job, path)
        if isinstance(info, Failure):
            return info
        directories[path] = shop.store.real_path(path)
    return ImportAnswer(directories, result.failed)


def _with_peak(stats: EvalStats) -> EvalStats:
    """Memory is the whole agent's, at its highest: the evaluator runs inside of it."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return EvalStats(
        derivations=stats.derivations,
        known=stats.known,
        wall_ms=stats.wall_ms,
        cpu_ms=stats.cpu_ms,
        peak_rss_mb=peak_kib // 1024,
    )


def _show(shop: Workshop, job: Job, result: EvalResult) -> None:
    """Notes for people who watch; the report itself is what decides."""
    for level, told in ((NoteLevel.WARNING, result.warnings), (NoteLevel.ERROR, result.errors)):
        for note in told:
            shop.link.post(_message(job, level, note))


def _message(job: Job, level: NoteLevel, note: Note) -> EvalMessage:
    text = legible(note.message).encode()[:MAX_ERROR_TEXT].decode(errors="ignore")
    source = None if note.source is None else legible(note.source)
    return EvalMessage(assignment_id=job.assignment_id, level=level, source=source, message=text)
