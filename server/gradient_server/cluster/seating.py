"""A planned attempt takes its seats: cluster, members and slots, in one step or not at all
(cluster-jobs.md, Prepare and Start).
"""

from gradient_protocol.ids import IdSource

from gradient_server.cluster.attempts import Attempt, SeatRecord
from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.dispatch import PlannedAttempt, PlannedSeat
from gradient_server.cluster.executor import Executor
from gradient_server.cluster.floor import Floor
from gradient_server.cluster.machine import AttemptMachine
from gradient_server.cluster.offers import MemberOffers
from gradient_server.scheduler.model import Assignment, AssignmentState
from gradient_server.scheduler.scheduler import Scheduler

__all__ = ["Seating"]


class Seating:
    """Makes attempts of what a pass planned. Times on the monotonic clock."""

    def __init__(
        self,
        *,
        book: ClusterBook,
        floor: Floor,
        offers: MemberOffers,
        executor: Executor,
        scheduler: Scheduler,
        ids: IdSource,
    ) -> None:
        self._book = book
        self._floor = floor
        self._offers = offers
        self._executor = executor
        self._scheduler = scheduler
        self._ids = ids

    def excluded(self, now: float) -> dict[str, list[str]]:
        """The workers that rejected a member just now, by job key."""
        found: dict[str, list[str]] = {}
        for worker in self._scheduler.pool:
            for job_key, until in worker.excluded.items():
                if until > now and job_key in self._book:
                    found.setdefault(job_key, []).append(worker.id)
        return found

    def take(self, planned: PlannedAttempt, now: float) -> None:
        """The cluster and its seats, in one step; nothing, where a seat went busy since."""
        attempt_id = self._ids.new()
        assignments = [self._assignment(seat, attempt_id, now) for seat in planned.seats]
        if not self._scheduler.take_seats(assignments):
            return
        for job in self._book.take(planned.cluster_id, attempt_id, now):
            self._offers.withdraw(job.job_id)
        seats = {
            assignment.assignment_id: SeatRecord(
                assignment_id=assignment.assignment_id,
                member=seat.member,
                worker_id=seat.worker_id,
                worker_name=assignment.worker_name,
                endpoint=self._floor.info(seat.worker_id).capabilities.endpoint,
            )
            for seat, assignment in zip(planned.seats, assignments, strict=True)
        }
        attempt = Attempt(
            attempt_id, planned.cluster_id, AttemptMachine(attempt_id, seats), seats, planned_at=now
        )
        self._executor.begin(attempt, attempt.machine.begin())

    def _assignment(self, seat: PlannedSeat, attempt_id: str, now: float) -> Assignment:
        return Assignment(
            assignment_id=self._ids.new(),
            job_id=seat.job.job_id,
            kind=seat.job.kind,
            name=seat.job.name,
            worker_id=seat.worker_id,
            worker_name=self._floor.info(seat.worker_id).name,
            state=AssignmentState.CLAIMING,
            assigned_at=now,
            job=seat.job,
            steps=seat.job.steps,
            missing_nar_size=self._floor.reported_bytes(seat.job.job_id, seat.worker_id),
            cluster_attempt=attempt_id,
        )
