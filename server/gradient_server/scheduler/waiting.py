"""The waiting build: memory of one worker that is kept free until a build that was held fits
(scoring.md, "Contexts"; policies.md, ResourceSaturationRule). Pure.

Rules:

- A build waits for a worker if it was held there for want of memory alone, in a round of that worker. A
  prioritised one may at once, another once it has been ready for 60 s.
- So may one that is larger than every worker, at the largest of them while that holds reservations: it
  fits once nothing else is reserved there, and then runs alone.
- A worker waits for one build, and a build for one worker. Prioritised builds go first, then those that
  were ready first; the smaller job id breaks ties.
- What the build needs to start is kept free: every other build sees that much less memory. The build
  itself is scored without it.
- Once it fits, the build is taken before anything is ranked, and the floor does not apply to it.
- The wait ends with the build's assignment anywhere, with the worker's session, when the worker drains,
  and with a round of that worker in which the build is not held for want of memory.

| Round of the worker | no wait | waits for a build |
|---|---|---|
| some are held for want of memory | the first begins to wait; ranked again | still held: ranked |
| none is | ranked | it fits: taken; else the wait ends, and the others are ranked |
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import JobKind

from gradient_server.scheduler.ram import RamNeed
from gradient_server.scheduler.ranking import Choice, Ranking, Verdict
from gradient_server.scheduler.tracker import JobTable, Tracked
from gradient_server.scheduler.worker import Worker
from gradient_server.scoring.columns import Field
from gradient_server.scoring.contexts import InstanceContext
from gradient_server.scoring.rules import ResourceSaturationRule
from gradient_server.scoring.weights import HELD_BUILD_RESERVES_RAM_AFTER_SECS

__all__ = ["WaitingBuilds"]

_RAM_RULE: Final = ResourceSaturationRule.name


class WaitingBuilds:
    """Who waits where, and a worker's round with its wait taken into account."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._by_worker: dict[str, tuple[Worker, str]] = {}
        self._by_job: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_worker)

    def build_of(self, worker_id: str) -> str | None:
        """The job id of the build that the worker waits for."""
        entry = self._by_worker.get(worker_id)
        return None if entry is None else entry[1]

    def worker_of(self, job_id: str) -> str | None:
        """The id of the worker that keeps memory for the build."""
        return self._by_job.get(job_id)

    def end_worker(self, worker_id: str) -> None:
        """The worker waits no more: its session ended, or it drains."""
        entry = self._by_worker.pop(worker_id, None)
        if entry is not None:
            worker, job_id = entry
            del self._by_job[job_id]
            worker.keep_ram(None, 0.0)

    def end_job(self, job_id: str) -> None:
        """The build waits no more: it was assigned."""
        worker_id = self._by_job.get(job_id)
        if worker_id is not None:
            self.end_worker(worker_id)

    def decide(
        self, table: JobTable, worker: Worker, instance: InstanceContext, *, now: float, monotonic: float
    ) -> Verdict:
        """One round of a worker. `now` is wall time."""
        if table.kind is JobKind.BUILD:
            taken = self._look_at_own(table, worker, instance, now=now, monotonic=monotonic)
            if taken is not None:
                return taken
        verdict = self._ranking.decide(table, worker, instance, now=now, monotonic=monotonic)
        if not len(verdict.short_of_ram) or worker.id in self._by_worker:
            return verdict
        held = self._first(table, verdict.short_of_ram, now)
        if held is None:
            return verdict
        self._keep(worker, held, instance)
        return self._ranking.decide(table, worker, instance, now=now, monotonic=monotonic)

    def _look_at_own(
        self, table: JobTable, worker: Worker, instance: InstanceContext, *, now: float, monotonic: float
    ) -> Verdict | None:
        """The verdict for the worker's own waiting build once it fits; else None, its wait up to date."""
        job_id = self.build_of(worker.id)
        if job_id is None:
            return None
        tracked = table.get(job_id)
        if tracked is None or not self._ranking.allowed(table, worker, np.array([tracked.row]), monotonic)[0]:
            self.end_worker(worker.id)
            return None
        verdict = self._ranking.decide_one(table, tracked, worker, instance, now=now)
        if len(verdict.short_of_ram):
            self._keep(worker, tracked, instance)
            return None
        choice = verdict.choice
        if choice is None or not self._fits(choice, worker, instance):
            self.end_worker(worker.id)
            return None
        return verdict

    def _first(self, table: JobTable, rows: npt.NDArray[np.intp], now: float) -> Tracked | None:
        """The one that waits, of builds that were held for want of memory; None where none may."""
        prioritized = table.matrix[Field.PRIORITIZED, rows] > 0.0
        ready_at = table.matrix[Field.READY_AT, rows]
        qualified = prioritized | (now - ready_at >= HELD_BUILD_RESERVES_RAM_AFTER_SECS)
        rows, prioritized, ready_at = rows[qualified], prioritized[qualified], ready_at[qualified]
        best: tuple[bool, float, str] | None = None
        for place in np.lexsort((ready_at, ~prioritized)).tolist():
            order = (not prioritized[place], float(ready_at[place]))
            if best is not None and order > best[:2]:
                break
            job_id = table.at(int(rows[place])).job.job_id
            if job_id not in self._by_job and (best is None or job_id < best[2]):
                best = (*order, job_id)
        return None if best is None else table.get(best[2])

    def _keep(self, worker: Worker, tracked: Tracked, instance: InstanceContext) -> None:
        job_id = tracked.job.job_id
        need_mb = _needed_to_start_mb(tracked, instance, outputs_present=False)
        self._by_worker[worker.id] = worker, job_id
        self._by_job[job_id] = worker.id
        worker.keep_ram(job_id, need_mb)

    def _fits(self, choice: Choice, worker: Worker, instance: InstanceContext) -> bool:
        """Whether the memory is there: what is not held may be short of memory that nobody gives back."""
        metrics = worker.context_for(choice.tracked.job.job_id).metrics
        need_mb = _needed_to_start_mb(choice.tracked, instance, outputs_present=choice.outputs_present)
        if math.isnan(metrics.ram_available_mb) or need_mb <= max(metrics.ram_available_mb, 0.0):
            return True
        return not metrics.will_release_ram and self._ranking.is_outsized(choice.tracked, worker, need_mb)


def _needed_to_start_mb(tracked: Tracked, instance: InstanceContext, *, outputs_present: bool) -> float:
    return RamNeed.of(
        tracked.job,
        tracked.history,
        outputs_present=outputs_present,
        unmeasured_mb=instance.unmeasured_build_ram_mb,
    ).needed_to_start_mb
