"""Why a job waits, or why it went where it went: `gradient why` (operations.md).

Answers from what is in memory; what waits for dependencies is not the scheduler's to know, and is
answered as `unknown` for the caller to complete from the graph.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from gradient_protocol.counting import counted
from gradient_protocol.kinds import JobKind

from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.eligibility import Refusal, RefusalCode, Requirement, refusal
from gradient_server.scheduler.model import Assignment
from gradient_server.scheduler.ram import RamNeed
from gradient_server.scheduler.ranking import Ranking
from gradient_server.scheduler.tracker import JobTracker, Tracked
from gradient_server.scheduler.worker import Worker
from gradient_server.scheduler.worker_pool import WorkerPool
from gradient_server.scoring.breakdown import RunnerUp
from gradient_server.scoring.columns import Field
from gradient_server.scoring.contexts import InstanceContext, WorkerMetricsView
from gradient_server.scoring.policy import Scores
from gradient_server.scoring.rules import RescoreWaitRule, ResourceSaturationRule
from gradient_server.scoring.weights import ASSIGN_FLOOR, RESCORE_MAX_ROUNDS

__all__ = ["Standing", "WhyAnswer", "WhyState", "WorkerStanding", "explain", "what_helps"]


class WhyState(enum.StrEnum):
    """Where the job is, as far as the scheduler knows."""

    ASSIGNED = "assigned"
    CLAIMING = "claiming"
    PENDING = "pending"
    HELD_BACK = "held-back"
    CLUSTER = "cluster"
    UNKNOWN = "unknown"


class Standing(enum.StrEnum):
    """How a worker stands to a pending job."""

    INELIGIBLE = "ineligible"
    DRAINING = "draining"
    REJECTED = "rejected"
    BUSY = "busy"
    VETOED = "vetoed"
    BELOW_FLOOR = "below-floor"
    WOULD_TAKE = "would-take"
    NOT_ASKING = "not-asking"


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """One worker's answer. `score_breakdown` as it is recorded, where the worker is eligible.

    `missing_ram_mb`: MB that must be released there before it fits; None where that is not what it lacks.
    """

    worker_id: str
    worker_name: str
    standing: Standing
    text: str
    total: float | None = None
    score_breakdown: dict[str, object] | None = None
    missing_ram_mb: float | None = None


@dataclass(frozen=True, slots=True)
class WhyAnswer:
    """`summary` is one line for people. `runner_up`: what the worker took this before."""

    job_id: str
    state: WhyState
    summary: str
    not_before: float | None = None
    workers: tuple[WorkerStanding, ...] = ()
    worker_id: str | None = None
    worker_name: str | None = None
    stage: str | None = None
    score_breakdown: dict[str, object] | None = None
    runner_up: RunnerUp | None = None


def what_helps(workers: Iterable[WorkerStanding]) -> str | None:
    """What would let a job start that is held for want of memory: where the least has to be released."""
    short = [one for one in workers if one.missing_ram_mb is not None and one.standing in _SCORED_NO]
    least = min(short, key=lambda one: (one.missing_ram_mb or 0.0, one.worker_name), default=None)
    if least is None or least.missing_ram_mb is None:
        return None
    return f"fits once {_gib(least.missing_ram_mb)} are released on {least.worker_name}"


def explain(
    job_id: str,
    *,
    tracker: JobTracker,
    pool: WorkerPool,
    ranking: Ranking,
    instance: InstanceContext,
    now: float,
    monotonic: float,
) -> WhyAnswer:
    """`now` is wall time."""
    assignment = pool.by_job.get(job_id)
    if assignment is not None:
        return _assigned(assignment)
    job = tracker.get(job_id)
    if job is None:
        return WhyAnswer(job_id, WhyState.UNKNOWN, "it is not in the queue")
    pool.intern_fresh()
    tracked = tracker.candidate(job_id)
    if tracked is None:
        return _not_yet(job, pool, now)
    table = tracker.tables[job.kind]
    row = np.array([tracked.row])
    rounds = int(table.matrix[Field.RESCORE_COUNT, tracked.row])
    allowed = {worker.id: bool(ranking.allowed(table, worker, row, monotonic)[0]) for worker in pool}

    def standing(worker: Worker) -> WorkerStanding:
        no = refusal_now(tracked, worker, monotonic)
        if no is not None:
            return _no(worker, no)
        if not allowed[worker.id]:
            return _no(worker, Refusal(RefusalCode.RAM, "has too little memory, or cannot take it whole"))
        scores = ranking.score_one(table, tracked, worker, instance, now=now)
        return _scored(worker, tracked, scores, rounds=rounds, ram=_ram(worker, tracked, ranking, instance))

    workers = tuple(standing(worker) for worker in pool)
    return WhyAnswer(job_id, WhyState.PENDING, _summary(job, workers), workers=workers)


def refusal_now(tracked: Tracked, worker: Worker, monotonic: float) -> Refusal | None:
    """Why the worker cannot be given the job at this moment; None if it can."""
    never = refusal(Requirement.of(tracked.job), worker.info)
    if never is not None:
        return never
    if worker.draining is not None:
        return Refusal(RefusalCode.DRAINING, f"is draining: {worker.draining}")
    if worker.is_excluded(tracked.job.job_id, monotonic):
        left = worker.excluded[tracked.job.job_id] - monotonic
        return Refusal(RefusalCode.REJECTED, f"rejected it, and is not asked again for {left:.0f} s")
    slots = worker.slots[tracked.job.kind]
    if not slots.free:
        return Refusal(RefusalCode.BUSY, f"has {counted(slots.maximum, 'slot')}, all in use")
    return None


_SCORED_NO = (Standing.VETOED, Standing.BELOW_FLOOR)
_STANDINGS = {
    RefusalCode.DRAINING: Standing.DRAINING,
    RefusalCode.REJECTED: Standing.REJECTED,
    RefusalCode.BUSY: Standing.BUSY,
}


def _no(worker: Worker, no: Refusal) -> WorkerStanding:
    standing = _STANDINGS.get(no.code, Standing.INELIGIBLE)
    return WorkerStanding(worker.id, worker.info.name, standing, no.text)


@dataclass(frozen=True, slots=True)
class _Ram:
    """MB that the job needs to start, and what the worker has for it; NaN unknown."""

    need: float
    metrics: WorkerMetricsView
    kept: bool
    outsized: bool

    @property
    def available(self) -> float:
        """MB for the job now, and nothing where more is spoken for than there is."""
        return max(self.metrics.ram_available_mb, 0.0)

    @property
    def missing_mb(self) -> float | None:
        """What has to be released before it fits; None where it fits, never will, or nobody can tell."""
        if self.need > self.metrics.ram_total_mb or not self.need > self.available:
            return None
        return self.need - self.available

    @property
    def figures(self) -> str:
        """What is needed and what there is."""
        metrics = self.metrics
        parts = [
            f"it needs {_gib(self.need)}",
            f"{_gib(self.available)} of {_gib(metrics.ram_total_mb)} are left",
        ]
        if metrics.ram_reserved_mb:
            parts.append(f"{_gib(metrics.ram_reserved_mb)} are reserved by what runs there")
        if metrics.ram_reserved_for_waiting_build_mb:
            parts.append(
                f"{_gib(metrics.ram_reserved_for_waiting_build_mb)} are kept for a build that waits longer"
            )
        return ", ".join(parts)

    @property
    def note(self) -> str:
        """What there is to say about it, to be put after the verdict; empty for nothing."""
        if self.need > self.metrics.ram_total_mb:
            text = f"; it needs {_gib(self.need)} of {_gib(self.metrics.ram_total_mb)}, so it may not fit"
            if self.outsized and self.metrics.will_release_ram:
                text += "; no worker has more, and it starts alone there once what runs has ended"
            return text
        if self.missing_mb is not None:
            kept = ", and what is released is kept for it" if self.kept else ""
            return f"; it fits once {_gib(self.missing_mb)} are released there{kept}"
        return ""


def _ram(worker: Worker, tracked: Tracked, ranking: Ranking, instance: InstanceContext) -> _Ram:
    place = worker.windows[tracked.job.kind].place(tracked.job.job_id)
    need = RamNeed.of(
        tracked.job,
        tracked.history,
        outputs_present=place >= 0 and bool(worker.windows[tracked.job.kind].outputs_present[place]),
        unmeasured_mb=instance.unmeasured_build_ram_mb,
    )
    need_mb = need.needed_to_start_mb
    return _Ram(
        need=need_mb,
        metrics=worker.context_for(tracked.job.job_id).metrics,
        kept=worker.waits_for == tracked.job.job_id,
        outsized=ranking.is_outsized(tracked, worker, need_mb),
    )


def _gib(megabytes: float) -> str:
    return "an unknown amount" if math.isnan(megabytes) else f"{megabytes / 1024:.1f} GiB"


def _scored(worker: Worker, tracked: Tracked, scores: Scores, *, rounds: int, ram: _Ram) -> WorkerStanding:
    breakdown, total = scores.breakdown(0).as_json(), float(scores.total[0])
    vetoes = breakdown["vetoes"]
    if isinstance(vetoes, list) and vetoes:
        held = [_held_by(str(name), worker, tracked, rounds, ram) for name in vetoes]
        standing, text = Standing.VETOED, f"is held by {' and '.join(held)}"
    elif total < ASSIGN_FLOOR:
        standing = Standing.BELOW_FLOOR
        text = f"scores {total:.0f}, {ASSIGN_FLOOR - total:.0f} points below the floor"
        text += _what_lowers_it(breakdown, worker)
    elif worker.slots[tracked.job.kind].ready:
        standing, text = Standing.WOULD_TAKE, f"would take it, with {total:.0f} points"
    else:
        standing, text = Standing.NOT_ASKING, f"scores {total:.0f} and has not asked for work"
    return WorkerStanding(
        worker.id, worker.info.name, standing, text + ram.note, total, breakdown, ram.missing_mb
    )


def _held_by(rule: str, worker: Worker, tracked: Tracked, rounds: int, ram: _Ram) -> str:
    """The rule, with the figures that it holds the job for."""
    if rule == RescoreWaitRule.name:
        offered = (
            "it has not said yet what it lacks" if worker.id in tracked.offered_to else "not offered to it"
        )
        left = f"considered unscored after {RESCORE_MAX_ROUNDS} rounds, of which {rounds} passed"
        return f"{rule} ({offered}; {left})"
    if rule == ResourceSaturationRule.name:
        return f"{rule} ({ram.figures})"
    return rule


def _what_lowers_it(breakdown: dict[str, object], worker: Worker) -> str:
    """The rules that take points, and the host's load where that is one of them."""
    rules = breakdown["rules"]
    taken = {name: points for name, points in rules.items() if points < 0} if isinstance(rules, dict) else {}
    text = ": " + ", ".join(f"{name} {points:.0f}" for name, points in taken.items()) if taken else ""
    if ResourceSaturationRule.name in taken:
        metrics = worker.context.metrics
        cpu = "unknown" if math.isnan(metrics.cpu_usage_pct) else f"at {metrics.cpu_usage_pct:.0f} %"
        text += f" (its CPU is {cpu}, {_gib(metrics.ram_free_mb)} of {_gib(metrics.ram_total_mb)} are free)"
    return text


def _assigned(assignment: Assignment) -> WhyAnswer:
    claiming = assignment.sent_at is None and not assignment.answered
    return WhyAnswer(
        assignment.job_id,
        WhyState.CLAIMING if claiming else WhyState.ASSIGNED,
        f"it is at {assignment.worker_name}" if not claiming else f"it goes to {assignment.worker_name}",
        worker_id=assignment.worker_id,
        worker_name=assignment.worker_name,
        stage=None if assignment.stage is None else str(assignment.stage),
        score_breakdown=assignment.score_breakdown,
        runner_up=assignment.runner_up,
    )


def _not_yet(job: PendingJob, pool: WorkerPool, now: float) -> WhyAnswer:
    requirement = Requirement.of(job)
    workers = tuple(
        _no(worker, no) for worker in pool if (no := refusal(requirement, worker.info)) is not None
    )
    if job.cluster is not None:
        text = f"it starts together with the other members of cluster {job.cluster}"
        return WhyAnswer(job.job_id, WhyState.CLUSTER, text, workers=workers)
    left = max((job.not_before or now) - now, 0.0)
    text = f"it waits {left:.0f} s more after a failed attempt"
    return WhyAnswer(job.job_id, WhyState.HELD_BACK, text, not_before=job.not_before, workers=workers)


def _summary(job: PendingJob, workers: tuple[WorkerStanding, ...]) -> str:
    if not workers:
        return "no worker is connected"
    eligible = [one for one in workers if one.standing is not Standing.INELIGIBLE]
    if not eligible:
        if len(workers) == 1:
            return f"the one connected worker cannot take it: it {workers[0].text}"
        return f"none of {len(workers)} connected workers can take it: {_common_reason(job, workers)}"
    for standing, text in _SUMMARIES.items():
        count = sum(one.standing is standing for one in eligible)
        if count:
            able = f"{counted(len(eligible), 'worker')} that could take it"
            return text.format(count=count, able=able)
    return "it waits for a worker"


_SUMMARIES = {
    Standing.WOULD_TAKE: "it is about to be assigned: {count} of {able} would have it now",
    Standing.VETOED: "a rule holds it at {count} of {able}",
    Standing.BELOW_FLOOR: "it scores below the floor at {count} of {able}",
    Standing.NOT_ASKING: "it has not been asked for yet by {count} of {able}",
    Standing.BUSY: "it waits for a slot at {count} of {able}",
    Standing.REJECTED: "it was rejected just now by {count} of {able}",
    Standing.DRAINING: "it waits for the end of a drain at {count} of {able}",
}


def _common_reason(job: PendingJob, workers: tuple[WorkerStanding, ...]) -> str:
    reasons = {one.text for one in workers}
    if len(reasons) == 1:
        return f"each {reasons.pop()}"
    wanted = [str(job.kind.value).lower(), job.system, *sorted(job.features)]
    return f"it needs {' + '.join(wanted)}" if job.kind is JobKind.BUILD else "see each worker"
