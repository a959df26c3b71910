"""Attempts that were under way before this instance began, as the database has them.

One that had not started was closed as PrepareFailed when the instance took (itself) over. The members
of a started one keep their grace, and reports that are stored are weighed at once. Of one that was closed
to be repeated, the survivors are waited for, as if nothing had been between.
"""

from collections.abc import Mapping, Sequence

from gradient_server.cluster import instructions as i
from gradient_server.cluster.attempts import Attempt, SeatRecord
from gradient_server.cluster.machine import AttemptMachine
from gradient_server.cluster.settings import UNCONFIRMED_ABORT_SECS
from gradient_server.cluster.states import Seat
from gradient_server.domain.cluster import ClusterInfo, MemberInfo, OpenAttempt, OpenMember, StoppingAttempt

__all__ = ["goes_on", "recover", "recover_stopping", "stops_at"]


def goes_on(info: ClusterInfo, instance_id: str) -> bool:
    """Whether the cluster has a started attempt of this instance."""
    attempt = info.open_attempt
    return attempt is not None and attempt.started_at is not None and attempt.instance_id == instance_id


def stops_at(info: ClusterInfo, now: float) -> str | None:
    """The instance that waits for survivors of the cluster's last try; None for none. `now`: wall time."""
    attempt = info.stopping_attempt
    return None if attempt is None or attempt.until <= now else attempt.instance_id


def recover(
    info: ClusterInfo, found: OpenAttempt, names: Mapping[str, str], *, wall_ahead_secs: float
) -> tuple[Attempt, Sequence[i.Instruction]]:
    """The attempt, and what its machine wants first. `wall_ahead_secs`: wall less monotonic clock."""
    rows = {row.job_key: row for row in found.members}
    seats: dict[str, SeatRecord] = {}
    states: dict[str, Seat] = {}
    for member in info.members:
        row = rows.get(member.job_key)
        if row is None:
            # Rows stay open until the verdict closes all of them.
            raise ValueError(f"member {member.job_key} of attempt {found.id} has no open assignment")
        seat = seats[row.assignment_id] = _record(member, row, names)
        if row.abort_requested_at is not None:
            seat.abort_due = row.abort_requested_at - wall_ahead_secs + UNCONFIRMED_ABORT_SECS
        states[row.assignment_id] = Seat.REPORTED if row.report_stored else Seat.RUNNING
    machine, instructions = AttemptMachine.recovered(found.id, states)
    return Attempt(found.id, info.id, machine, seats), instructions


def recover_stopping(
    info: ClusterInfo, found: StoppingAttempt, names: Mapping[str, str]
) -> tuple[Attempt, Sequence[i.Instruction]]:
    """The same of a try that is closed: its survivors alone are of interest."""
    members = {member.job_key: member for member in info.members}
    seats = {row.assignment_id: _record(members[row.job_key], row, names) for row in found.members}
    states = {row.assignment_id: Seat.ENDED if row.report_stored else Seat.STOPPING for row in found.members}
    machine, instructions = AttemptMachine.stopping(found.id, states)
    return Attempt(found.id, info.id, machine, seats), instructions


def _record(member: MemberInfo, row: OpenMember, names: Mapping[str, str]) -> SeatRecord:
    return SeatRecord(
        assignment_id=row.assignment_id,
        member=member,
        worker_id=row.worker_id,
        worker_name=names.get(row.worker_id, row.worker_id),
    )
