"""Evaluations as JSON: the graph's views, and how far their running jobs are."""

from functools import partial
from typing import Any, Final

import msgspec
import trio
from pydantic import BaseModel

from gradient_server.domain.job import build_key, eval_key
from gradient_server.domain.status import BuildStatus
from gradient_server.graph.views import BuildView, EvaluationSummary, EvaluationView
from gradient_server.net.services import Services
from gradient_server.web.live import Live, live_of_assignment, live_of_job

__all__ = [
    "BuildEntry",
    "EvaluationAnswer",
    "EvaluationEntry",
    "EvaluationSnapshot",
    "evaluation_json",
    "list_entry",
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
    """A build that the evaluation wants. `worker` is the name of the host that has it, or had it last.

    `done` of `total` inputs are fetched (stage Prefetch) or outputs uploaded (Upload); null while unknown.
    """

    id: str
    name: str
    attr: str | None
    status: str
    created_at: float
    finished_at: float | None
    worker: str | None
    stage: str | None
    done: int | None
    total: int | None
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


class Evaluating(BaseModel):
    """The evaluation's own job: who has it, and how many of the `total` builds found are `done`."""

    worker: str
    stage: str | None
    done: int | None
    total: int | None


class EvaluationSnapshot(EvaluationEntry):
    """An evaluation with its builds, at most 20,000 (`truncated` where there are more), and its notes.

    `evaluating` is null where no worker has it (any more).
    """

    evaluating: Evaluating | None

    builds: list[BuildEntry]
    notes: list[NoteEntry]
    truncated: bool


class EvaluationAnswer(EvaluationSnapshot):
    """All of it, with the outputs that were asked for."""

    outputs: list[OutputEntry]


def list_entry(summary: EvaluationSummary) -> EvaluationEntry:
    """One of a list."""
    return EvaluationEntry(**_entry(summary))


async def evaluation_json(view: EvaluationView, services: Services, *, outputs: bool) -> bytes:
    """An EvaluationAnswer, or, without outputs, an EvaluationSnapshot.

    Of many builds in a thread: 20,000 of them take longer than anybody may wait for the event loop.
    """
    if len(view.builds) <= MAX_ENCODED_AT_ONCE:
        return _encode(view, services, outputs=outputs)
    return await trio.to_thread.run_sync(partial(_encode, view, services, outputs=outputs))


def _entry(summary: EvaluationSummary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in EvaluationEntry.model_fields}


def _encode(view: EvaluationView, services: Services, *, outputs: bool) -> bytes:
    # Plain values, for the models of so many would take ten times as long as all the rest.
    answer: dict[str, Any] = {
        **_entry(view.summary),
        "evaluating": _evaluating(view.summary.id, services),
        "builds": [_build(one, services) for one in view.builds],
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


def _evaluating(evaluation: str, services: Services) -> dict[str, Any] | None:
    assignment = services.scheduler.pool.by_job.get(eval_key(evaluation))
    if assignment is None:
        return None
    live = live_of_assignment(services, assignment)
    return {"worker": assignment.worker_name, "stage": live.stage, "done": live.done, "total": live.total}


def _build(one: BuildView, services: Services) -> dict[str, Any]:
    live = live_of_job(services, build_key(one.id)) if one.status == BuildStatus.ASSIGNED else Live()
    return {
        "id": one.id,
        "name": one.name,
        "attr": one.attr,
        "status": one.status,
        "created_at": one.created_at,
        "finished_at": one.finished_at,
        "worker": one.worker,
        "stage": live.stage,
        "done": live.done,
        "total": live.total,
        "error": one.error,
        "attempts": one.attempts,
        "substituted": one.substituted,
    }
