"""All connected workers, and every open assignment that this instance owns.

An assignment outlives its worker's session: while the worker is away, for the grace, it stays here
without a slot. Counts that decisions need are kept, not computed.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from gradient_protocol.kinds import JobKind, JobStage

from gradient_server.scheduler.eligibility import Requirements, refusal
from gradient_server.scheduler.model import (
    IDLE_SLOT_FRESH_SECS,
    Assignment,
    AssignmentState,
    SchedulerSettings,
    WorkerInfo,
)
from gradient_server.scheduler.worker import Worker
from gradient_server.scoring.columns import Vector
from gradient_server.scoring.contexts import NAN, InstanceContext

__all__ = ["IdleSlot", "WorkerPool"]

# An idle slot: worker id, kind, since when, last confirmed (monotonic seconds).
IdleSlot = tuple[str, JobKind, float, float]


class WorkerPool:
    """Who is connected, what is assigned, who waits."""

    def __init__(self, requirements: Requirements, settings: SchedulerSettings) -> None:
        self._requirements = requirements
        self._settings = settings
        self.workers: dict[str, Worker] = {}
        self.assignments: dict[str, Assignment] = {}
        self.by_job: dict[str, Assignment] = {}
        # Workers that can be given a job of the kind now, in the order of their asking.
        self.waiting: dict[JobKind, dict[str, None]] = {kind: {} for kind in JobKind}
        # All workers, the one whose last assignment is the oldest first: its slot is expected next.
        self.by_expected: dict[JobKind, OrderedDict[str, None]] = {kind: OrderedDict() for kind in JobKind}
        self._active_builds = 0
        self._in_stage = dict.fromkeys(JobStage, 0)
        self._without_jobs = 0
        self._instance = InstanceContext()
        self._means: tuple[float, float, float] | None = None
        self._ram: tuple[Vector, Vector] | None = None

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())

    # Workers

    def connect(self, worker: Worker) -> None:
        """A session has resumed. What it goes on with is added by `add` afterwards."""
        if worker.id in self.workers:
            raise ValueError(f"{worker.id} is connected already")
        worker.eligible = self._requirements.flags_for(worker.info)
        self.workers[worker.id] = worker
        self._without_jobs += 1
        for order in self.by_expected.values():
            order[worker.id] = None
            order.move_to_end(worker.id, last=False)
        self._pool_changed()

    def disconnect(self, worker_id: str) -> Worker | None:
        """The session ended; its assignments stay until they are adopted or lost."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return None
        self._without_jobs -= not worker.assigned
        for order in self.by_expected.values():
            del order[worker_id]
        for waiting in self.waiting.values():
            waiting.pop(worker_id, None)
        self._pool_changed()
        return worker

    def update(self, worker: Worker, info: WorkerInfo) -> None:
        """Capabilities or projects changed."""
        worker.set_info(info)
        worker.eligible = self._requirements.flags_for(info)
        for kind in JobKind:
            self.settle(worker, kind)
        self._pool_changed()

    def sampled(self) -> None:
        """A heartbeat came: means over the fleet may have moved."""
        self._means = None

    def intern_fresh(self) -> None:
        """Decides, for requirements that are new, which workers can take such jobs."""
        for requirement_id in self._requirements.fresh:
            requirement = self._requirements.get(requirement_id)
            for worker in self:
                if requirement_id >= len(worker.eligible):
                    room = np.zeros(max(16, 2 * requirement_id), np.bool_)
                    room[: len(worker.eligible)] = worker.eligible
                    worker.eligible = room
                worker.eligible[requirement_id] = refusal(requirement, worker.info) is None
        if self._requirements.fresh:
            self._requirements.fresh.clear()
            self._ram = None

    # Wishes and idle slots

    def settle(self, worker: Worker, kind: JobKind) -> None:
        """Keeps the list of waiting workers and the idle slot in step with the worker's slots."""
        slots = worker.slots[kind]
        if slots.ready:
            self.waiting[kind].setdefault(worker.id)
        else:
            self.waiting[kind].pop(worker.id, None)
            slots.clear_idle()

    def idle_slots(self, now: float) -> list[IdleSlot]:
        """The slots that were found idle, and confirmed within the last 25 s."""
        found: list[IdleSlot] = []
        for worker in self:
            for kind, slots in worker.slots.items():
                since, seen = slots.idle_since, slots.idle_seen
                if since is not None and seen is not None and now - seen <= IDLE_SLOT_FRESH_SECS:
                    found.append((worker.id, kind, since, seen))
        return found

    # Assignments

    def add(self, assignment: Assignment) -> None:
        """A job was decided for, or is adopted by, its worker."""
        if assignment.assignment_id in self.assignments:
            raise ValueError(f"{assignment.assignment_id} is there already")
        if assignment.job_id in self.by_job:
            raise ValueError(f"{assignment.job_id} is assigned already")
        self.assignments[assignment.assignment_id] = assignment
        self.by_job[assignment.job_id] = assignment
        self._count(assignment, 1)
        self._attach(assignment)

    def adopt(self, assignment: Assignment) -> None:
        """An assignment that was kept while its worker was away has a slot again."""
        self._attach(assignment)

    def _attach(self, assignment: Assignment) -> None:
        worker = self.workers.get(assignment.worker_id)
        if worker is None or assignment.assignment_id in worker.assigned:
            return
        self._without_jobs -= not worker.assigned
        worker.assign(assignment)
        if assignment.state is not AssignmentState.ACCEPTED:
            slots = worker.slots[assignment.kind]
            slots.wish = False
            slots.outstanding = assignment.assignment_id
        self.by_expected[assignment.kind].move_to_end(worker.id)
        self.settle(worker, assignment.kind)

    def remove(self, assignment_id: str) -> Assignment | None:
        """The assignment ended, however. None if it is not (any more) here."""
        assignment = self.assignments.pop(assignment_id, None)
        if assignment is None:
            return None
        del self.by_job[assignment.job_id]
        self._count(assignment, -1)
        worker = self.workers.get(assignment.worker_id)
        if worker is not None and assignment_id in worker.assigned:
            worker.release(assignment_id)
            self._without_jobs += not worker.assigned
            self.settle(worker, assignment.kind)
        return assignment

    def set_stage(self, assignment_id: str, stage: JobStage) -> None:
        """A build job entered a stage; a stage of an assignment that is gone is ignored."""
        assignment = self.assignments.get(assignment_id)
        if assignment is None or assignment.kind is not JobKind.BUILD:
            return
        self._count(assignment, -1)
        assignment.stage = stage
        self._count(assignment, 1)
        worker = self.workers.get(assignment.worker_id)
        if worker is not None:
            worker.stage_changed()

    def of_worker(self, worker_id: str) -> list[Assignment]:
        """Every open assignment of a worker, connected or not."""
        return [one for one in self.assignments.values() if one.worker_id == worker_id]

    def _count(self, assignment: Assignment, change: int) -> None:
        self._active_builds += change * (assignment.kind is JobKind.BUILD)
        if assignment.stage is not None:
            self._in_stage[assignment.stage] += change

    # What decisions read

    def set_windows(self, windows: InstanceContext) -> None:
        """Swaps in what the instance has measured; the live counts in it are not read."""
        self._instance = replace(windows)

    def instance(self, pending_builds: int) -> InstanceContext:
        """The instance as rules read it now; the same object, brought up to date, each time."""
        if self._means is None:
            self._means = self._fleet_means()
        instance = self._instance
        instance.active_builds = self._active_builds
        instance.pending_builds = pending_builds
        instance.total_workers = len(self.workers)
        instance.idle_workers = self._without_jobs
        core, up, down = self._means
        instance.cpu_core_score_mean = core
        instance.upload_speed_mean_mbps = up
        instance.download_speed_mean_mbps = down
        instance.download_slots = self._settings.download_slots
        instance.upload_slots = self._settings.upload_slots
        instance.downloads_in_flight = self._in_stage[JobStage.PREFETCH]
        instance.uploads_in_flight = self._in_stage[JobStage.UPLOAD]
        return instance

    def ram_by_requirement(self) -> tuple[Vector, Vector]:
        """For each requirement, the largest total RAM and releasable RAM of a worker for it, in MB.

        NaN where no worker is there for it, or one of them did not say. Figures of at most one tick
        ago: they only tell builds that no worker could ever fit from those that should wait.
        """
        if self._ram is None:
            size = max(len(self._requirements), 1)
            total, releasable = np.full(size, NAN), np.full(size, NAN)
            for requirement_id, _ in self._requirements.known():
                able = [worker for worker in self if worker.eligible[requirement_id]]
                total[requirement_id] = _largest(w.context.metrics.ram_total_mb for w in able)
                releasable[requirement_id] = _largest(w.ram_releasable_mb for w in able)
            self._ram = total, releasable
        return self._ram

    def refresh_ram(self) -> None:
        """The next decision looks at the pool's RAM anew."""
        self._ram = None

    def _fleet_means(self) -> tuple[float, float, float]:
        # Not from the workers' contexts: each assignment outdates one, and each heartbeat asks for the means.
        return (
            _mean(worker.cpu_core_score for worker in self),
            _mean(worker.live.upload_speed_mbps for worker in self),
            _mean(worker.live.download_speed_mbps for worker in self),
        )

    def _pool_changed(self) -> None:
        self._means = None
        self._ram = None


def _mean(values: Iterable[float]) -> float:
    """The mean of the known values; NaN for none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else NAN


def _largest(values: Iterable[float]) -> float:
    """The largest; NaN for none, or where one is unknown."""
    largest = NAN
    for value in values:
        if math.isnan(value):
            return NAN
        largest = value if math.isnan(largest) else max(largest, value)
    return largest
