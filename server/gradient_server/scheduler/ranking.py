"""One decision: which of the pending jobs of a kind a worker gets. Synchronous, changes nothing.

Every eligible job that can win is ranked. What the policy holds for want of a score cannot, whatever
its points, so it is left out beforehand; in a busy pool that is most of the queue.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import JobKind

from gradient_server.scheduler.decisions import Decision, DecisionDetail
from gradient_server.scheduler.selection import best, in_order
from gradient_server.scheduler.tracker import JobTable, Tracked
from gradient_server.scheduler.window import Window
from gradient_server.scheduler.worker import Worker
from gradient_server.scheduler.worker_pool import WorkerPool
from gradient_server.scoring.breakdown import RunnerUp, ScoreBreakdown
from gradient_server.scoring.columns import Field, Flags, JobColumns, Vector
from gradient_server.scoring.contexts import InstanceContext, WorkerContext
from gradient_server.scoring.policy import Scores, ScoringPolicy
from gradient_server.scoring.rules import ResourceSaturationRule
from gradient_server.scoring.weights import RESCORE_MAX_ROUNDS

__all__ = ["Choice", "Ranking", "Verdict"]

Rows: TypeAlias = npt.NDArray[np.intp]
_ALL_UNKNOWN = WorkerContext()
# Candidates for a worker that finds nothing: those in fewer windows than this, while there are enough.
_FEW_OFFERS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_NO_ROWS: Rows = np.zeros(0, np.intp)


@dataclass(frozen=True, slots=True)
class Choice:
    """The job that a worker gets, with what it reported of it, and why."""

    tracked: Tracked
    breakdown: ScoreBreakdown
    runner_up: RunnerUp | None
    missing_count: int | None
    missing_nar_size: int | None
    outputs_present: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision and, where one passed, the choice.

    `short_of_ram`: rows of the table that are held for want of memory and for nothing else, or are to be
    waited for as if they were.
    """

    choice: Choice | None
    decision: Decision
    short_of_ram: Rows


class Ranking:
    """Ranks the candidates of the tables for one worker at a time."""

    def __init__(self, pool: WorkerPool, policy: ScoringPolicy) -> None:
        self._pool = pool
        self._policy = policy
        self._holds_unscored: dict[JobKind, bool] = {}

    def holds_unscored(self, kind: JobKind) -> bool:
        """Whether the policy holds all jobs of the kind that a worker has not scored, at first."""
        if kind not in self._holds_unscored:
            probe = np.zeros((len(Field), 1))
            probe[Field.IS_BUILD] = kind is JobKind.BUILD
            probe[Field.RESCORE_COUNT] = RESCORE_MAX_ROUNDS - 1
            held = self._policy.held_unscored(JobColumns(probe, now=0.0), _ALL_UNKNOWN, InstanceContext())
            self._holds_unscored[kind] = held is not None and bool(held.all())
        return self._holds_unscored[kind]

    def any_can_win(self, table: JobTable, worker: Worker) -> bool:
        """False where all that wait are held for want of the worker's score: nothing need be ranked."""
        window = worker.windows[table.kind]
        return len(window) > window.unscored or table.ripe_jobs > 0 or not self.holds_unscored(table.kind)

    def decide(
        self, table: JobTable, worker: Worker, instance: InstanceContext, *, now: float, monotonic: float
    ) -> Verdict:
        """Ranks what waits in `table` for `worker`. `now` is wall time."""
        candidates = self._candidates(table, worker, monotonic)
        scores, reported = self._score(table, worker.context, worker, instance, candidates, now)
        return self._verdict(table, worker, candidates, scores, reported, scores.wins, now)

    def decide_one(
        self, table: JobTable, tracked: Tracked, worker: Worker, instance: InstanceContext, *, now: float
    ) -> Verdict:
        """The worker's waiting build alone: chosen unless it is held, for the floor does not apply to it."""
        only = self._only(table, tracked, worker)
        context = worker.context_for(tracked.job.job_id)
        scores, reported = self._score(table, context, worker, instance, only, now)
        passes = np.ones(1, np.bool_) if scores.vetoed is None else ~scores.vetoed
        return self._verdict(table, worker, only, scores, reported, passes, now)

    def _verdict(  # noqa: PLR0917 - what one decision consists of
        self,
        table: JobTable,
        worker: Worker,
        candidates: "_Candidates",
        scores: Scores,
        reported: "_Reported",
        wins: Flags,
        now: float,
    ) -> Verdict:
        rows = candidates.rows.tolist()
        job_ids = [table.at(row).job.job_id for row in rows]
        chosen = best(scores.total, wins, job_ids)
        vetoed = 0 if scores.vetoed is None else int(np.count_nonzero(scores.vetoed))
        decision = Decision(
            at=now,
            worker_id=worker.id,
            worker_name=worker.info.name,
            kind=table.kind,
            chosen=None if chosen is None else job_ids[chosen],
            pending=len(table),
            considered=len(rows),
            vetoed=vetoed,
            below_floor=len(rows) - vetoed - int(np.count_nonzero(wins)),
            detail=DecisionDetail(scores, job_ids),
        )
        short_of_ram = _NO_ROWS
        if scores.holds or scores.waits is not None:
            short_of_ram = candidates.rows[_short_of_ram(scores)]
        if chosen is None:
            return Verdict(None, decision, short_of_ram)
        wins[chosen] = False
        second = best(scores.total, wins, job_ids)
        missing_count, missing_nar_size, outputs_present = reported.at(chosen)
        choice = Choice(
            tracked=table.at(rows[chosen]),
            breakdown=scores.breakdown(chosen),
            runner_up=None if second is None else _runner_up(scores, second, job_ids[second]),
            missing_count=missing_count,
            missing_nar_size=missing_nar_size,
            outputs_present=outputs_present,
        )
        return Verdict(choice, decision, short_of_ram)

    def may_take(self, table: JobTable, tracked: Tracked, worker: Worker, monotonic: float) -> bool:
        """Whether the worker may be given this one at all."""
        return bool(self.allowed(table, worker, np.array([tracked.row]), monotonic)[0])

    def allowed(self, table: JobTable, worker: Worker, rows: Rows, monotonic: float) -> Flags:
        """Which of the rows the worker may be given now."""
        allowed = self._offerable(table, worker, rows, monotonic)
        if table.unpredicted_jobs:
            allowed &= ~table.unpredicted[rows]
        return allowed

    def _offerable(self, table: JobTable, worker: Worker, rows: Rows, monotonic: float) -> Flags:
        """Which of the rows the worker may be given once their history is loaded, and scores meanwhile."""
        self._pool.intern_fresh()
        allowed: Flags = worker.eligible[table.requirement_ids[rows]]
        for job_id in list(worker.excluded):
            tracked = table.get(job_id)
            if worker.is_excluded(job_id, monotonic) and tracked is not None:
                allowed &= rows != tracked.row
        if table.ram_bound_jobs:
            allowed &= self._enough_ram(table, worker, rows)
        if table.kind is JobKind.EVAL and not worker.info.can.eval:
            self._only_halves(table, worker, rows, allowed)
        return allowed

    def is_outsized(self, tracked: Tracked, worker: Worker, need_mb: float) -> bool:
        """Whether the job needs more MB than any worker for it has, and this one has the most."""
        largest = float(self._pool.ram_by_requirement()[0][tracked.requirement_id])
        return need_mb > largest and worker.context.metrics.ram_total_mb >= largest

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
        outside = self._offerable(table, worker, np.arange(len(table)), monotonic)
        window = worker.windows[table.kind]
        if len(window):
            outside[window.rows()] = False
        for enough in _FEW_OFFERS:
            fewer = outside & (table.offer_counts < enough)
            if np.count_nonzero(fewer) >= limit:
                outside = fewer
                break
        rows = np.flatnonzero(outside)
        if not len(rows):
            return []
        columns = JobColumns(table.matrix[:, rows], now=now)
        total = self._policy.score(columns, _ALL_UNKNOWN, instance)
        if len(rows) > limit:
            kept = total >= np.partition(total, len(rows) - limit)[len(rows) - limit]
            rows, total = rows[kept], total[kept]
        job_ids = [table.at(row).job.job_id for row in rows.tolist()]
        chosen = in_order(total, job_ids, np.arange(len(rows)), limit)
        return [table.at(int(rows[place])) for place in chosen]

    def score_one(
        self, table: JobTable, tracked: Tracked, worker: Worker, instance: InstanceContext, *, now: float
    ) -> Scores:
        """What the worker would make of one candidate: a batch of one."""
        context = worker.context_for(tracked.job.job_id)
        only = self._only(table, tracked, worker)
        return self._score(table, context, worker, instance, only, now)[0]

    @staticmethod
    def _only(table: JobTable, tracked: Tracked, worker: Worker) -> "_Candidates":
        place = worker.windows[table.kind].place(tracked.job.job_id)
        return _Candidates(np.array([tracked.row]), np.array([place]))

    def _candidates(self, table: JobTable, worker: Worker, monotonic: float) -> "_Candidates":
        """What can win at all: the window, and what the policy lets pass unscored.

        The whole table is looked at only where something in it can pass unscored. NumPy gives the
        interpreter up for each operation on more than 500 elements, and under load waits to get it back.
        """
        rows = worker.windows[table.kind].rows()
        places = np.arange(len(rows))
        unscored_pass = not self.holds_unscored(table.kind)
        if unscored_pass or table.ripe_jobs:
            others = np.ones(len(table), np.bool_) if unscored_pass else table.ripe
            others[rows] = False
            more = np.flatnonzero(others)
            rows = np.concatenate([rows, more])
            places = np.concatenate([places, np.full(len(more), -1, np.intp)])
        allowed = self.allowed(table, worker, rows, monotonic)
        if np.count_nonzero(allowed) != len(allowed):
            rows, places = rows[allowed], places[allowed]
        return _Candidates(rows, places)

    def _score(  # noqa: PLR0917 - what scoring needs to know
        self,
        table: JobTable,
        context: WorkerContext,
        worker: Worker,
        instance: InstanceContext,
        candidates: "_Candidates",
        now: float,
    ) -> tuple[Scores, "_Reported"]:
        rows = candidates.rows
        matrix: Vector = table.matrix[:, rows]
        if table.kind is JobKind.BUILD:
            total, releasable = self._pool.ram_by_requirement()
            requirement_ids = table.requirement_ids[rows]
            matrix[Field.POOL_RAM_TOTAL_MB] = total[requirement_ids]
            matrix[Field.POOL_RAM_RELEASABLE_MB] = releasable[requirement_ids]
        reported = _Reported.of(worker.windows[table.kind], candidates.places)
        columns = JobColumns(
            matrix,
            now=now,
            missing_count=reported.missing_count,
            missing_nar_size=reported.missing_nar_size,
            outputs_present=reported.outputs_present,
        )
        return self._policy.score_detailed(columns, context, instance), reported

    def _enough_ram(self, table: JobTable, worker: Worker, rows: Rows) -> Flags:
        """After an out-of-memory kill: more RAM than then, while a worker with more is here."""
        bound = table.ram_over_mb[rows]
        largest = self._pool.ram_by_requirement()[0][table.requirement_ids[rows]]
        flags: Flags = ~((worker.context.metrics.ram_total_mb <= bound) & (largest > bound))
        return flags

    def _only_halves(self, table: JobTable, worker: Worker, rows: Rows, allowed: Flags) -> None:
        """One that fetches and does not evaluate takes a job only while it can be split."""
        for place in np.flatnonzero(allowed).tolist():
            if not self.evaluator_is_idle(worker, table.at(rows[place])):
                allowed[place] = False


def _runner_up(scores: Scores, place: int, job_id: str) -> RunnerUp:
    return RunnerUp(job_id, float(scores.total[place]), scores.points_of(place))


def _short_of_ram(scores: Scores) -> Flags:
    """Whom the memory rule holds and no other, and whom it makes wait without holding."""
    held = np.zeros(len(scores.total), np.bool_)
    otherwise = held.copy()
    for name, flags in scores.holds:
        if name == ResourceSaturationRule.name:
            held |= flags
        else:
            otherwise |= flags
    if scores.waits is not None:
        held |= scores.waits
    flags_alone: Flags = held & ~otherwise
    return flags_alone


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Rows of the table, and the place of each in the worker's window, -1 for none."""

    rows: Rows
    places: Rows


@dataclass(frozen=True, slots=True)
class _Reported:
    """The worker's scores, brought into the order of the rows that are ranked."""

    missing_count: Vector
    missing_nar_size: Vector
    outputs_present: Flags

    @classmethod
    def of(cls, window: Window, places: Rows) -> "_Reported":
        count, size = window.missing_count[places], window.missing_nar_size[places]
        present = window.outputs_present[places]
        outside = places < 0
        if np.count_nonzero(outside):
            count[outside] = size[outside] = np.nan
            present[outside] = False
        return cls(count, size, present)

    def at(self, place: int) -> tuple[int | None, int | None, bool]:
        """Missing paths, missing bytes, whether every output is there."""
        count, size = self.missing_count[place], self.missing_nar_size[place]
        return (
            None if np.isnan(count) else int(count),
            None if np.isnan(size) else int(size),
            bool(self.outputs_present[place]),
        )
