"""One decision: which of the pending jobs of a kind a worker gets. Synchronous, changes nothing.

Every eligible job is ranked. What the policy holds for want of a score cannot win, whatever its
points, so it is left out before the points are counted; in a busy pool that is most of the queue.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import JobKind

from gradient_server.scheduler.decisions import Considered, Decision
from gradient_server.scheduler.selection import best, in_order
from gradient_server.scheduler.tracker import JobTable, Tracked
from gradient_server.scheduler.worker import Worker
from gradient_server.scheduler.worker_pool import WorkerPool
from gradient_server.scoring.breakdown import ScoreBreakdown
from gradient_server.scoring.columns import Field, Flags, JobColumns, Vector
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.policy import Scores, ScoringPolicy

__all__ = ["Choice", "Ranking", "Verdict"]

_RECORDED = 3
_ALL_UNKNOWN = WorkerContext()


@dataclass(frozen=True, slots=True)
class Choice:
    """The job that a worker gets, with what it reported of it, and why."""

    tracked: Tracked
    breakdown: ScoreBreakdown
    runner_up: tuple[str, float] | None
    missing_count: int | None
    missing_nar_size: int | None
    outputs_present: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision and, where one passed, the choice."""

    choice: Choice | None
    decision: Decision


class Ranking:
    """Ranks the candidates of the tables for one worker at a time."""

    def __init__(self, pool: WorkerPool, policy: ScoringPolicy) -> None:
        self._pool = pool
        self._policy = policy

    def decide(
        self, table: JobTable, worker: Worker, instance: InstanceContext, *, now: float, monotonic: float
    ) -> Verdict:
        """Ranks the whole table for `worker`. `now` is wall time."""
        allowed = self.allowed(table, worker, monotonic)
        scores, present, rows, eligible = self._score(table, worker, instance, allowed, now)
        candidates = [table.at(row) for row in rows.tolist()]
        job_ids = [one.job.job_id for one in candidates]
        wins = scores.wins
        chosen = best(scores.total, wins, job_ids)
        top = in_order(scores.total, job_ids, np.arange(len(rows)), _RECORDED)
        vetoed = 0 if scores.vetoed is None else int(np.count_nonzero(scores.vetoed))
        decision = Decision(
            at=now,
            worker_id=worker.id,
            worker_name=worker.info.name,
            kind=table.kind,
            chosen=None if chosen is None else job_ids[chosen],
            eligible=eligible,
            unscored=eligible - len(rows),
            vetoed=vetoed,
            below_floor=len(rows) - vetoed - int(np.count_nonzero(wins)),
            best=tuple(_considered(candidates[place], scores, place) for place in top),
        )
        if chosen is None:
            return Verdict(None, decision)
        reported = present.reported(chosen)
        second = next((place for place in top if place != chosen and wins[place]), None)
        choice = Choice(
            tracked=candidates[chosen],
            breakdown=scores.breakdown(chosen),
            runner_up=None if second is None else (job_ids[second], float(scores.total[second])),
            missing_count=reported[0],
            missing_nar_size=reported[1],
            outputs_present=reported[2],
        )
        return Verdict(choice, decision)

    def allowed(self, table: JobTable, worker: Worker, monotonic: float) -> Flags:
        """Which rows the worker may be given at all."""
        self._pool.intern_fresh()
        allowed: Flags = worker.eligible[table.requirement_ids]
        for job_id in list(worker.excluded):
            tracked = table.get(job_id)
            if worker.is_excluded(job_id, monotonic) and tracked is not None:
                allowed[tracked.row] = False
        if table.ram_bound_jobs:
            allowed &= self._enough_ram(table, worker)
        if table.kind is JobKind.EVAL and not worker.info.can.eval:
            self._only_halves(table, worker, allowed)
        return allowed

    def evaluator_is_idle(self, worker: Worker, tracked: Tracked) -> bool:
        """Whether another worker that evaluates and does not fetch waits for such a job."""
        for worker_id in self._pool.waiting[JobKind.EVAL]:
            other = self._pool.workers[worker_id]
            if other is not worker and other.info.can.eval and not other.info.can.fetch:
                projects = other.info.projects
                if projects is None or not projects.isdisjoint(tracked.job.projects):
                    return True
        return False

    def next_best(
        self,
        table: JobTable,
        worker: Worker,
        instance: InstanceContext,
        *,
        limit: int,
        now: float,
        monotonic: float,
    ) -> list[Tracked]:
        """The best candidates by what is the same for every worker, outside of the worker's window.

        Those in few windows go first, so that workers that ask together get different ones.
        """
        outside = self.allowed(table, worker, monotonic)
        window = worker.windows[table.kind]
        if len(window):
            outside[window.rows()] = False
        for enough in (1, 32):
            fewer = outside & (table.offer_counts < enough)
            if int(fewer.sum()) >= limit:
                outside = fewer
                break
        rows = np.flatnonzero(outside)
        if not len(rows):
            return []
        columns = JobColumns(table.matrix[:, rows], now=now)
        total = self._policy.score(columns, _ALL_UNKNOWN, instance)
        job_ids = [table.at(row).job.job_id for row in rows.tolist()]
        chosen = in_order(total, job_ids, np.arange(len(rows)), limit)
        return [table.at(int(rows[place])) for place in chosen]

    def score_one(
        self, table: JobTable, tracked: Tracked, worker: Worker, instance: InstanceContext, *, now: float
    ) -> Scores:
        """What the worker would make of one candidate: a batch of one."""
        only = np.zeros(len(table), np.bool_)
        only[tracked.row] = True
        rows = np.flatnonzero(only)
        return self._score_rows(table, worker, instance, rows, now)[0]

    def _score(
        self, table: JobTable, worker: Worker, instance: InstanceContext, allowed: Flags, now: float
    ) -> tuple[Scores, "_Reported", npt.NDArray[np.intp], int]:
        eligible = int(np.count_nonzero(allowed))
        window = worker.windows[table.kind]
        missing = np.full(len(table), np.nan)
        if len(window):
            missing[window.rows()] = window.missing_nar_size[: len(window)]
        everything = JobColumns(table.matrix, now=now, missing_nar_size=missing)
        held = self._policy.held_unscored(everything, worker.context, instance)
        rows = np.flatnonzero(allowed if held is None else allowed & ~held)
        scores, reported = self._score_rows(table, worker, instance, rows, now)
        return scores, reported, rows, eligible

    def _score_rows(
        self,
        table: JobTable,
        worker: Worker,
        instance: InstanceContext,
        rows: npt.NDArray[np.intp],
        now: float,
    ) -> tuple[Scores, "_Reported"]:
        # Fewer rows are gathered; all of them are read where they are.
        matrix: Vector = table.matrix if len(rows) == len(table) else table.matrix[:, rows]
        if table.kind is JobKind.BUILD:
            matrix = matrix if len(rows) != len(table) else matrix.copy()
            total, releasable = self._pool.ram_by_requirement()
            requirement_ids = table.requirement_ids[rows]
            matrix[Field.POOL_RAM_TOTAL_MB] = total[requirement_ids]
            matrix[Field.POOL_RAM_RELEASABLE_MB] = releasable[requirement_ids]
        reported = _Reported.of(table, worker, rows)
        columns = JobColumns(
            matrix,
            now=now,
            missing_count=reported.missing_count,
            missing_nar_size=reported.missing_nar_size,
            outputs_present=reported.outputs_present,
        )
        return self._policy.score_detailed(columns, worker.context, instance), reported

    def _enough_ram(self, table: JobTable, worker: Worker) -> Flags:
        """After an out-of-memory kill: more RAM than then, while a worker with more is here."""
        bound = table.ram_over_mb
        largest = self._pool.ram_by_requirement()[0][table.requirement_ids]
        flags: Flags = ~((worker.context.metrics.ram_total_mb <= bound) & (largest > bound))
        return flags

    def _only_halves(self, table: JobTable, worker: Worker, allowed: Flags) -> None:
        """One that fetches and does not evaluate takes a job only while it can be split."""
        for row in np.flatnonzero(allowed).tolist():
            if not self.evaluator_is_idle(worker, table.at(row)):
                allowed[row] = False


@dataclass(frozen=True, slots=True)
class _Reported:
    """The worker's scores, brought into the order of the rows that are ranked."""

    missing_count: Vector
    missing_nar_size: Vector
    outputs_present: Flags

    @classmethod
    def of(cls, table: JobTable, worker: Worker, rows: npt.NDArray[np.intp]) -> "_Reported":
        window = worker.windows[table.kind]
        places = np.full(max(len(table), 1), -1, np.intp)
        if len(window):
            places[window.rows()] = np.arange(len(window))
        at = places[rows]
        known = at >= 0
        return cls(
            np.where(known, window.missing_count[at], np.nan),
            np.where(known, window.missing_nar_size[at], np.nan),
            known & window.outputs_present[at],
        )

    def reported(self, place: int) -> tuple[int | None, int | None, bool]:
        """Missing paths, missing bytes, whether every output is there."""
        count, size = self.missing_count[place], self.missing_nar_size[place]
        return (
            None if np.isnan(count) else int(count),
            None if np.isnan(size) else int(size),
            bool(self.outputs_present[place]),
        )


def _considered(tracked: Tracked, scores: Scores, place: int) -> Considered:
    return Considered(
        job_id=tracked.job.job_id,
        name=tracked.job.name,
        total=float(scores.total[place]),
        rules=scores.points_of(place),
        vetoes=scores.vetoes_of(place),
    )
