"""What must hold after every event, checked by tests: the figures that are kept agree with the facts."""

import math
from collections.abc import Iterator

import numpy as np
from gradient_protocol.kinds import JobKind, JobStage
from gradient_protocol.limits import MAX_WINDOW_CANDIDATES

from gradient_server.scheduler.model import AssignmentState
from gradient_server.scheduler.offers import Offers
from gradient_server.scheduler.tracker import JobTable, JobTracker
from gradient_server.scheduler.waiting import WaitingBuilds
from gradient_server.scheduler.worker import Worker
from gradient_server.scheduler.worker_pool import WorkerPool
from gradient_server.scoring.columns import Field

__all__ = ["violations", "waiting_violations"]


def violations(tracker: JobTracker, pool: WorkerPool, offers: Offers) -> list[str]:
    """One line for each thing that does not hold; empty when all is well."""
    found = [line for table in tracker.tables.values() for line in _table(table, pool)]
    found += [line for worker in pool for line in _worker(worker, pool, tracker)]
    found += _assignments(tracker, pool)
    found += _counts(pool)
    known = {*offers.urgent, *offers.gathered}
    found += [f"{name} is gone and has messages waiting" for name in known if name not in pool.workers]
    return found


def waiting_violations(waiting: WaitingBuilds, pool: WorkerPool) -> list[str]:
    """The same of the builds that wait for a worker's memory."""
    found: list[str] = []
    for worker in pool:
        job_id = waiting.build_of(worker.id)
        if worker.waits_for != job_id:
            found.append(f"{worker.id} keeps memory for {worker.waits_for} and waits for {job_id}")
        if (worker.context.metrics.ram_reserved_for_waiting_build_mb > 0) and job_id is None:
            found.append(f"{worker.id} keeps memory for nobody")
        if job_id is not None and waiting.worker_of(job_id) != worker.id:
            found.append(f"{job_id} waits for another worker than {worker.id}")
        if job_id is not None and (worker.draining is not None or job_id in pool.by_job):
            found.append(f"{job_id} waits for {worker.id}, which drains, or is assigned")
    if len(waiting) != sum(waiting.build_of(worker.id) is not None for worker in pool):
        found.append("a build waits for a worker that is not connected")
    return found


def _table(table: JobTable, pool: WorkerPool) -> Iterator[str]:
    for row, tracked in enumerate(table):
        job_id = tracked.job.job_id
        if tracked.row != row or table.get(job_id) is not tracked:
            yield f"{job_id} is not in its row"
        if table.requirement_ids[row] != tracked.requirement_id:
            yield f"{job_id} has another's requirement"
        if table.matrix[Field.READY_AT, row] != tracked.job.ready_at:
            yield f"{job_id} has another's columns"
        if table.offer_counts[row] != len(tracked.offered_to):
            yield f"{job_id} is offered to {len(tracked.offered_to)} and counted otherwise"
        for worker_id in tracked.offered_to:
            worker = pool.workers.get(worker_id)
            if worker is None or job_id not in worker.windows[table.kind]:
                yield f"{job_id} is in no window of {worker_id}"
    if table.ram_bound_jobs != np.count_nonzero(~np.isnan(table.ram_over_mb)):
        yield "jobs bound to RAM are miscounted"
    if table.unpredicted_jobs != np.count_nonzero(table.unpredicted):
        yield "jobs whose history is being loaded are miscounted"
    if table.ripe_jobs != np.count_nonzero(table.ripe):
        yield "jobs that may be assigned unscored are miscounted"


def _worker(worker: Worker, pool: WorkerPool, tracker: JobTracker) -> Iterator[str]:
    for kind, slots in worker.slots.items():
        assigned = [one for one in worker.assigned.values() if one.kind is kind]
        if slots.open != len(assigned) or slots.open < 0:
            yield f"{worker.id} has {len(assigned)} {kind} jobs and counts {slots.open}"
        if slots.outstanding is not None and slots.outstanding not in worker.assigned:
            yield f"{worker.id} waits for an answer to an assignment that is gone"
        if (worker.id in pool.waiting[kind]) != slots.ready:
            yield f"{worker.id} and the list of those that wait for {kind} disagree"
        if slots.idle_since is not None and not slots.ready:
            yield f"{worker.id} has an idle {kind} slot and no free one"
        window = worker.windows[kind]
        for entry in window.entries:
            if tracker.tables[kind].get(entry.job.job_id) is not entry or worker.id not in entry.offered_to:
                yield f"{entry.job.job_id} is in the window of {worker.id} and not pending"
        scores = window.missing_nar_size[: len(window)]
        if window.unscored != np.count_nonzero(np.isnan(scores)):
            yield f"{worker.id} has unscored candidates miscounted"
    if sum(map(len, worker.windows.values())) + len(worker.to_revoke) > MAX_WINDOW_CANDIDATES:
        yield f"{worker.id} was offered too much"
    reserved = math.fsum(
        max(one.ram_reserved_mb, one.ram_observed_mb or 0.0) for one in worker.assigned.values()
    )
    if not math.isclose(reserved, worker.context.metrics.ram_reserved_mb, abs_tol=1e-6):
        yield f"{worker.id} reserves another amount of RAM than its jobs"


def _assignments(tracker: JobTracker, pool: WorkerPool) -> Iterator[str]:
    if len(pool.by_job) != len(pool.assignments):
        yield "a job is assigned twice"
    for assignment_id, one in pool.assignments.items():
        if pool.by_job.get(one.job_id) is not one:
            yield f"{one.job_id} does not lead to its assignment {assignment_id}"
        if one.job_id in tracker:
            yield f"{one.job_id} is pending and assigned"
    for worker in pool:
        for assignment_id, one in worker.assigned.items():
            if pool.assignments.get(assignment_id) is not one or one.worker_id != worker.id:
                yield f"{worker.id} has {assignment_id}, which is not its own"


def _counts(pool: WorkerPool) -> Iterator[str]:
    instance = pool.instance(0)
    stages = [one.stage for one in pool.assignments.values()]
    builds = sum(one.kind is JobKind.BUILD for one in pool.assignments.values())
    if instance.active_builds != builds:
        yield "active builds are miscounted"
    if instance.idle_workers != sum(not worker.assigned for worker in pool):
        yield "workers without jobs are miscounted"
    if instance.downloads_in_flight != stages.count(JobStage.PREFETCH):
        yield "downloads are miscounted"
    if instance.uploads_in_flight != stages.count(JobStage.UPLOAD):
        yield "uploads are miscounted"
    sent = [one for one in pool.assignments.values() if one.state is AssignmentState.SENT]
    if any(one.sent_at is None for one in sent):
        yield "an assignment was sent at no time"
