"""Evaluations as JSON: the graph's views with the stages that only the scheduler knows."""

from functools import partial
from typing import Any, Final

import msgspec
import trio
from pydantic import BaseModel

from gradient_server.domain.job import build_key
from gradient_server.domain.status import BuildStatus
from gradient_server.graph.views import BuildView, EvaluationSummary, EvaluationView
from gradient_server.scheduler.scheduler import Scheduler

__all__ = [
    "BuildEntry",
    "EvaluationAnswer",
    "EvaluationEntry",
    "EvaluationSnapshot",
    "evaluation_json",
    "list_entry",
    "stage_of",
]

# Builds that are encoded on the event loop, in about 1 ms.
MAX_ENCODED_AT_ONCE: Final = 500


class EvaluationEntry(BaseModel):
    """An evaluation without its builds. `counts` are builds by status; times in seconds since the epoch."""

    id: str
    project: str
    task: str
    status: str
    created_at: float
    finished_at: float | None
    error: str | None
    source_path: str | None
    attrs: list[str]
    prioritized: bool
    counts: dict[str, int]


class BuildEntry(BaseModel):
    """A build that the evaluation wants. `worker` is the name of the host that has it, or had it last."""

    id: str
    name: str
    attr: str | None
    status: str
    created_at: float
    finished_at: float | None
    worker: str | None
    stage: str | None
    error: str | None
    attempts: int
    substituted: bool


class NoteEntry(BaseModel):
    """A warning or error of the evaluation; `source` is where it comes from."""

    level: str
    source: str | None
    message: str


class OutputEntry(BaseModel):
    """An output of a completed build that was asked for; `nar_size` in bytes once it is held."""

    attr: str | None
    name: str
    output: str
    path: str
    nar_size: int | None
    contains_store_dir: bool


class EvaluationSnapshot(EvaluationEntry):
    """An evaluation with its builds, at most 20,000 (`truncated` where there are more), and its notes."""

    builds: list[BuildEntry]
    notes: list[NoteEntry]
    truncated: bool


class EvaluationAnswer(EvaluationSnapshot):
    """All of it, with the outputs that were asked for."""

    outputs: list[OutputEntry]


def list_entry(summary: EvaluationSummary) -> EvaluationEntry:
    """One of a list."""
    return EvaluationEntry(**_entry(summary))


async def evaluation_json(view: EvaluationView, scheduler: Scheduler, *, outputs: bool) -> bytes:
    """An EvaluationAnswer, or, without outputs, an EvaluationSnapshot.

    Of many builds in a thread: 20,000 of them take longer than anybody may wait for the event loop.
    """
    if len(view.builds) <= MAX_ENCODED_AT_ONCE:
        return _encode(view, scheduler, outputs=outputs)
    return await trio.to_thread.run_sync(partial(_encode, view, scheduler, outputs=outputs))


def stage_of(scheduler: Scheduler, job_key: str) -> str | None:
    """The stage of a running job, None before its first."""
    assignment = scheduler.pool.by_job.get(job_key)
    return None if assignment is None or assignment.stage is None else str(assignment.stage)


def _entry(summary: EvaluationSummary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in EvaluationEntry.model_fields}


def _encode(view: EvaluationView, scheduler: Scheduler, *, outputs: bool) -> bytes:
    # Plain values, for the models of so many would take ten times as long as all the rest.
    answer: dict[str, Any] = {
        **_entry(view.summary),
        "builds": [_build(one, scheduler) for one in view.builds],
        "notes": view.notes,
        "truncated": view.truncated,
    }
    if outputs:
        names = tuple(OutputEntry.model_fields)
        built = {one.id for one in view.builds if one.status == BuildStatus.COMPLETED}
        answer["outputs"] = [
            {name: getattr(one, name) for name in names} for one in view.outputs if one.build in built
        ]
    return msgspec.json.encode(answer)


def _build(one: BuildView, scheduler: Scheduler) -> dict[str, Any]:
    return {
        "id": one.id,
        "name": one.name,
        "attr": one.attr,
        "status": one.status,
        "created_at": one.created_at,
        "finished_at": one.finished_at,
        "worker": one.worker,
        "stage": stage_of(scheduler, build_key(one.id)) if one.status == BuildStatus.ASSIGNED else None,
        "error": one.error,
        "attempts": one.attempts,
        "substituted": one.substituted,
    }
