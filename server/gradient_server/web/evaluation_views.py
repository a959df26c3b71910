"""Evaluations as JSON: the graph's views with the stages that only the scheduler knows."""

from typing import Any

from pydantic import BaseModel

from gradient_server.domain.job import build_key
from gradient_server.graph.views import EvaluationSummary, EvaluationView
from gradient_server.scheduler.scheduler import Scheduler

__all__ = [
    "BuildEntry",
    "EvaluationAnswer",
    "EvaluationEntry",
    "EvaluationSnapshot",
    "full_answer",
    "list_entry",
    "snapshot_answer",
    "stage_of",
]


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
    """An output of a build that was asked for; `nar_size` in bytes once it is held."""

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


def snapshot_answer(view: EvaluationView, scheduler: Scheduler) -> EvaluationSnapshot:
    """What a stream of events begins with."""
    return EvaluationSnapshot(**_snapshot(view, scheduler))


def full_answer(view: EvaluationView, scheduler: Scheduler) -> EvaluationAnswer:
    """What is told of one evaluation."""
    outputs = [
        OutputEntry(
            attr=one.attr,
            name=one.name,
            output=one.output,
            path=one.path,
            nar_size=one.nar_size,
            contains_store_dir=one.contains_store_dir,
        )
        for one in view.outputs
    ]
    return EvaluationAnswer(**_snapshot(view, scheduler), outputs=outputs)


def stage_of(scheduler: Scheduler, job_key: str) -> str | None:
    """The stage of a running job, None before its first."""
    assignment = scheduler.pool.by_job.get(job_key)
    return None if assignment is None or assignment.stage is None else str(assignment.stage)


def _entry(summary: EvaluationSummary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in EvaluationEntry.model_fields}


def _snapshot(view: EvaluationView, scheduler: Scheduler) -> dict[str, Any]:
    builds = [
        BuildEntry(
            id=one.id,
            name=one.name,
            attr=one.attr,
            status=one.status,
            created_at=one.created_at,
            finished_at=one.finished_at,
            worker=one.worker,
            stage=stage_of(scheduler, build_key(one.id)) if one.status == "Assigned" else None,
            error=one.error,
            attempts=one.attempts,
            substituted=one.substituted,
        )
        for one in view.builds
    ]
    notes = [NoteEntry(level=one.level, source=one.source, message=one.message) for one in view.notes]
    return {**_entry(view.summary), "builds": builds, "notes": notes, "truncated": view.truncated}
