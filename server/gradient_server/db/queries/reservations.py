"""The one reservation of the pool (cluster-jobs.md, "Aging Reservations"): whoever inserts the row has it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from gradient_server.db.hot import HotStatement, execute_text

__all__ = [
    "Reservation",
    "clear_reservation",
    "find_reservation",
    "release_reservation",
    "take_reservation",
    "update_reservation",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """`seats`: the worker that is kept for each member, by job key. `reserved_at` is wall time."""

    cluster_id: str
    instance_id: str
    reserved_at: float
    seats: Mapping[str, str]


_TAKE = HotStatement(
    """
INSERT INTO cluster_reservation (id, cluster_job, instance, reserved_at, seats)
SELECT 1, job.id, :instance, :reserved_at, :seats FROM cluster_job AS job
WHERE job.id = :cluster AND job.status = 'Queued'
ON CONFLICT DO NOTHING RETURNING id
""",
    """
INSERT INTO cluster_reservation (id, cluster_job, instance, reserved_at, seats)
SELECT 1, job.id, CAST(:instance AS TEXT), CAST(:reserved_at AS DOUBLE PRECISION), CAST(:seats AS JSON)
FROM cluster_job AS job WHERE job.id = :cluster AND job.status = 'Queued'
ON CONFLICT DO NOTHING RETURNING id
""",
)
_UPDATE = HotStatement(
    "UPDATE cluster_reservation SET seats = :seats WHERE cluster_job = :cluster AND instance = :instance"
    " RETURNING id",
    "UPDATE cluster_reservation SET seats = CAST(:seats AS JSON) WHERE cluster_job = :cluster"
    " AND instance = :instance RETURNING id",
)
_RELEASE = HotStatement(
    "DELETE FROM cluster_reservation WHERE cluster_job = :cluster AND instance = :instance RETURNING id"
)
_CLEAR = HotStatement("DELETE FROM cluster_reservation WHERE instance = :instance")
_FIND = HotStatement("SELECT cluster_job, instance, reserved_at, seats FROM cluster_reservation")


def take_reservation(connection: sa.Connection, reservation: Reservation) -> bool:
    """False where the pool's reservation is taken, or the cluster is not Queued any more."""
    parameters = {
        "cluster": reservation.cluster_id,
        "instance": reservation.instance_id,
        "reserved_at": reservation.reserved_at,
        "seats": json.dumps(dict(reservation.seats)),
    }
    return bool(execute_text(connection, _TAKE, parameters))


def update_reservation(
    connection: sa.Connection, cluster_id: str, instance_id: str, seats: Mapping[str, str]
) -> bool:
    """Other seats, the same clock. False where this instance's reservation for the cluster is gone."""
    parameters = {"cluster": cluster_id, "instance": instance_id, "seats": json.dumps(dict(seats))}
    return bool(execute_text(connection, _UPDATE, parameters))


def release_reservation(connection: sa.Connection, cluster_id: str, instance_id: str) -> bool:
    """The seats are free. False where there was nothing of this instance's to release."""
    return bool(execute_text(connection, _RELEASE, {"cluster": cluster_id, "instance": instance_id}))


def clear_reservation(connection: sa.Connection, instance_id: str) -> None:
    """Whatever this instance had reserved is free: at its start, its clock is gone."""
    execute_text(connection, _CLEAR, {"instance": instance_id})


def find_reservation(connection: sa.Connection) -> Reservation | None:
    """The reservation of the pool, whoever holds it."""
    rows = execute_text(connection, _FIND, {})
    if not rows:
        return None
    cluster, instance, reserved_at, seats = rows[0]
    loaded = json.loads(seats) if isinstance(seats, str) else seats
    return Reservation(cluster_id=cluster, instance_id=instance, reserved_at=reserved_at, seats=loaded)
