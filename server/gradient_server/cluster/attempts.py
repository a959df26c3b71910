"""Attempts that are under way, with what is needed to speak to their members."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradient_protocol.messages.shapes import Job, RosterEntry

from gradient_server.cluster.instructions import Timer
from gradient_server.cluster.machine import AttemptMachine
from gradient_server.cluster.states import Seat
from gradient_server.domain.cluster import MemberInfo

__all__ = ["Attempt", "Attempts", "SeatRecord"]


@dataclass(slots=True)
class SeatRecord:
    """A member and the worker it sits on. Times on the monotonic clock."""

    assignment_id: str
    member: MemberInfo
    worker_id: str
    worker_name: str
    endpoint: str | None = None
    # The wire's job, from the claim until it was sent.
    wire_job: Job | None = None
    # When an abort that nobody confirmed makes it a loss.
    abort_due: float | None = None
    # Its worker has a session that goes on with it; it has its StartCluster, and signals are forwarded
    # to it, up to number `signal_n` so far.
    is_present: bool = False
    is_listening: bool = False
    signal_n: int = 0
    # Held at the worker, and StartCluster did not reach it in this session.
    owes_start: bool = False


@dataclass(slots=True)
class Attempt:
    """One attempt. `deadline` of its one timer, on the monotonic clock."""

    id: str
    cluster_id: str
    machine: AttemptMachine
    seats: dict[str, SeatRecord]
    timer: Timer | None = None
    deadline: float | None = None
    planned_at: float = 0.0
    # The worker that rejected, where one did: a reservation is planned again without it.
    rejecting: str | None = None

    def roster(self) -> list[RosterEntry]:
        """Every member with its worker, in the order of the cluster."""
        return [
            RosterEntry(
                role=seat.member.role,
                index=seat.member.index,
                worker=seat.worker_name,
                primary=seat.member.primary,
                endpoint=seat.endpoint,
            )
            for seat in self.seats.values()
        ]

    def awaited(self) -> list[SeatRecord]:
        """Whom a prepare still waits for."""
        return [self.seats[one] for one, seat in self.machine.seats.items() if seat is Seat.SENT]


class Attempts:
    """By attempt, assignment, worker and cluster."""

    def __init__(self) -> None:
        self._by_id: dict[str, Attempt] = {}
        self._by_assignment: dict[str, Attempt] = {}
        self._of_worker: dict[str, dict[str, Attempt]] = {}
        self._of_cluster: dict[str, Attempt] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(tuple(self._by_id.values()))

    def add(self, attempt: Attempt) -> None:
        """An attempt began, or is taken up again. ValueError while its cluster has another."""
        if attempt.cluster_id in self._of_cluster:
            raise ValueError(f"cluster {attempt.cluster_id} has an attempt already")
        self._by_id[attempt.id] = attempt
        self._of_cluster[attempt.cluster_id] = attempt
        for seat in attempt.seats.values():
            self._by_assignment[seat.assignment_id] = attempt
            self._of_worker.setdefault(seat.worker_id, {})[seat.assignment_id] = attempt

    def remove(self, attempt: Attempt) -> None:
        """Nothing of it is left."""
        del self._by_id[attempt.id]
        del self._of_cluster[attempt.cluster_id]
        for seat in attempt.seats.values():
            del self._by_assignment[seat.assignment_id]
            at_worker = self._of_worker[seat.worker_id]
            del at_worker[seat.assignment_id]
            if not at_worker:
                del self._of_worker[seat.worker_id]

    def get(self, attempt_id: str) -> Attempt | None:
        """The attempt of this id, while it is under way."""
        return self._by_id.get(attempt_id)

    def of_assignment(self, assignment_id: str) -> Attempt | None:
        """The attempt that the assignment is a member's of."""
        return self._by_assignment.get(assignment_id)

    def of_cluster(self, cluster_id: str) -> Attempt | None:
        """The cluster's attempt, its survivors' stopping included."""
        return self._of_cluster.get(cluster_id)

    def at_worker(self, worker_id: str) -> Sequence[tuple[Attempt, SeatRecord]]:
        """The seats at a worker."""
        found = self._of_worker.get(worker_id, {})
        return [(attempt, attempt.seats[assignment]) for assignment, attempt in found.items()]
