"""`gradient why`: the scheduler's answer where the job is its own to know, else the graph's."""

from typing import Any

from pydantic import BaseModel

from gradient_server.graph.job_views import JobView
from gradient_server.net.services import Services
from gradient_server.scheduler.why import WhyAnswer as Explained
from gradient_server.scheduler.why import WhyState, WorkerStanding, what_helps
from gradient_server.web.auth import Access
from gradient_server.web.cluster_why import ClusterWhyAnswer

__all__ = ["WhyAnswer", "why_answer"]


class WorkerVerdict(BaseModel):
    """How a connected worker stands to a job that waits: its verdict, and the points of every rule."""

    name: str
    verdict: str
    reasons: list[str]
    total: float | None
    rules: dict[str, float]
    vetoes: list[str]


class RunnerUp(BaseModel):
    """What the worker would have got instead, with the points of every rule."""

    job: str
    name: str | None
    total: float
    rules: dict[str, float]


class DecisionAnswer(BaseModel):
    """Where the job went, and with which points; `at` is wall time."""

    worker: str | None
    at: float | None
    total: float
    rules: dict[str, float]
    vetoes: list[str]
    estimate: dict[str, Any] | None
    runner_up: RunnerUp | None


class WhyAnswer(BaseModel):
    """`summary` is one line; `workers` are those that were asked about; `decision` where one was made.

    `cluster`: of a member, why its cluster waits, or where it stands.
    """

    job: str
    name: str
    status: str
    summary: str
    reasons: list[str]
    workers: list[WorkerVerdict]
    decision: DecisionAnswer | None
    cluster: ClusterWhyAnswer | None


def why_answer(
    services: Services, view: JobView, cluster: ClusterWhyAnswer | None, access: Access
) -> WhyAnswer:
    """Why the job waits, or why it went where it went."""
    explained = services.scheduler.why(view.job)
    shown = [one for one in explained.workers if _is_shown(services, one, access)]
    return WhyAnswer(
        job=view.job,
        name=view.name,
        status=view.status,
        summary=_summary(view) if explained.state is WhyState.UNKNOWN else _pending(explained, shown),
        reasons=_reasons(view),
        workers=[_verdict(one) for one in shown],
        decision=_decision(services, view, explained, access),
        cluster=cluster,
    )


def _pending(explained: Explained, shown: list[WorkerStanding]) -> str:
    """The scheduler's line, and what would help, of the workers that may be named."""
    helps = what_helps(shown)
    return explained.summary if helps is None else f"{explained.summary}; it {helps}"


def _summary(view: JobView) -> str:
    """Of a job that is not the scheduler's: it waits for others, or has ended."""
    where = view.attempts[0].worker if view.attempts else None
    if view.status == "Created":
        names = ", ".join(view.waits_for[:5]) or "its dependencies"
        more = len(view.waits_for) - 5
        return f"it waits for {names}" + (f" and {more} more" if more > 0 else "")
    if view.status == "Building":
        return "it is evaluated; its builds are under way"
    if view.status == "Assigned":
        return f"it is at {where}, which is not connected now"
    if view.status == "Queued":
        return "it is about to be queued"
    if view.status == "DependencyFailed":
        return "something it needs has failed"
    if view.error is not None:
        return view.error
    if where is not None:
        return f"it was done by {where}"
    return "its outputs were there already" if view.status == "Completed" else "it has ended"


def _reasons(view: JobView) -> list[str]:
    reasons = []
    for attempt in reversed(view.attempts):
        if attempt.finished_at is not None and attempt.outcome not in ("Completed", None):
            error = f": {attempt.error}" if attempt.error else ""
            reasons.append(f"an attempt at {attempt.worker or attempt.worker_id} {attempt.outcome}{error}")
    if view.status == "DependencyFailed" and view.error is not None:
        reasons.append(view.error)
    return reasons


def _is_shown(services: Services, standing: WorkerStanding, access: Access) -> bool:
    worker = services.scheduler.pool.workers.get(standing.worker_id)
    projects = None if worker is None else worker.info.projects
    return projects is None or access.sees(projects)


def _verdict(standing: WorkerStanding) -> WorkerVerdict:
    recorded: dict[str, Any] = standing.score_breakdown or {}
    return WorkerVerdict(
        name=standing.worker_name,
        verdict=str(standing.standing),
        reasons=[standing.text],
        total=standing.total,
        rules=recorded.get("rules") or {},
        vetoes=recorded.get("vetoes") or [],
    )


def _decision(
    services: Services, view: JobView, explained: Explained, access: Access
) -> DecisionAnswer | None:
    """The one that is in force, or the last one that was recorded."""
    taken = next((one for one in view.attempts if one.score_breakdown is not None), None)
    recorded: dict[str, Any] | None = explained.score_breakdown
    if recorded is None and taken is not None:
        recorded = taken.score_breakdown
    if recorded is None:
        return None
    return DecisionAnswer(
        worker=explained.worker_name or (None if taken is None else taken.worker),
        at=None if taken is None else taken.started_at,
        total=recorded["total"],
        rules=recorded["rules"],
        vetoes=recorded["vetoes"],
        estimate=recorded.get("estimate"),
        runner_up=_runner_up(services, explained, access),
    )


def _runner_up(services: Services, explained: Explained, access: Access) -> RunnerUp | None:
    if explained.runner_up is None:
        return None
    job_key, total, rules = explained.runner_up.job_id, explained.runner_up.total, explained.runner_up.rules
    job = services.scheduler.tracker.get(job_key)
    if access.project is not None and (job is None or not access.sees(job.projects)):
        return None
    if job is not None:
        return RunnerUp(job=job_key, name=job.name, total=total, rules=rules)
    assignment = services.scheduler.pool.by_job.get(job_key)
    name = None if assignment is None else assignment.name
    return RunnerUp(job=job_key, name=name, total=total, rules=rules)
