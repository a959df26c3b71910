"""Server instances: their heartbeats, and what a successor takes over (protocol.md, "Several
instances on one database").

Whose turn it is to succeed a silent instance is decided elsewhere; here is the compare-and-set that
lets one win, with everything that must happen in the same transaction.
"""

from dataclasses import dataclass

import sqlalchemy as sa

from gradient_server.db.queries.claims import ClosedAssignment, close_abandoned
from gradient_server.db.tables import cluster_attempt, cluster_reservation, dispatched_job, instance
from gradient_server.domain.status import AttemptOutcome

__all__ = [
    "Instance",
    "OtherOwner",
    "TakeOver",
    "beat_instance",
    "database_now",
    "dead_instances",
    "list_instances",
    "living_elsewhere",
    "other_owner",
    "register_instance",
    "stop_instance",
    "take_over",
]


@dataclass(frozen=True, slots=True)
class Instance:
    """A row of `instance`. Times in seconds since the epoch, by the database's clock."""

    id: str
    advertise_url: str | None
    started_at: float
    heartbeat_at: float
    stopped_at: float | None
    succeeded_by: str | None


@dataclass(frozen=True, slots=True)
class TakeOver:
    """What the successor has of the dead one: assignments, and the ends of attempts that had not started.

    `attempts` were closed as PrepareFailed; `abandoned` are their members' assignments.
    """

    assignments: tuple[str, ...]
    attempts: tuple[str, ...]
    abandoned: tuple[ClosedAssignment, ...]


def database_now(connection: sa.Connection) -> float:
    """Seconds since the epoch by the clock that all instances share."""
    if connection.dialect.name == "postgresql":
        statement = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"
    else:
        statement = "SELECT (julianday('now') - 2440587.5) * 86400.0"
    return float(connection.exec_driver_sql(statement).scalar_one())


def register_instance(
    connection: sa.Connection, instance_id: str, *, advertise_url: str | None, now: float
) -> bool:
    """Enters the instance, or enters it again after a restart under its own id.

    False if another one succeeded it in the meantime: it must register under a new id.
    """
    row = instance.c
    again = connection.execute(
        instance.update()
        .where(row.id == instance_id, row.succeeded_by.is_(None))
        .values(advertise_url=advertise_url, started_at=now, heartbeat_at=now, stopped_at=None)
        .returning(row.id)
    ).first()
    if again is not None:
        return True
    if connection.scalar(sa.select(row.id).where(row.id == instance_id)) is not None:
        return False
    connection.execute(
        instance.insert().values(
            id=instance_id, advertise_url=advertise_url, started_at=now, heartbeat_at=now
        )
    )
    return True


def beat_instance(connection: sa.Connection, instance_id: str, *, now: float) -> bool:
    """The instance lives. False if it was succeeded: it owns nothing any more."""
    row = instance.c
    return (
        connection.execute(
            instance.update()
            .where(row.id == instance_id, row.succeeded_by.is_(None))
            .values(heartbeat_at=now)
            .returning(row.id)
        ).first()
        is not None
    )


def stop_instance(connection: sa.Connection, instance_id: str, *, now: float) -> None:
    """The instance ends cleanly; its successor need not wait for its silence."""
    connection.execute(instance.update().where(instance.c.id == instance_id).values(stopped_at=now))


def dead_instances(connection: sa.Connection, *, but: str, silent_since: float) -> list[str]:
    """The others that stopped, or did not beat after `silent_since`, and that nobody succeeded."""
    row = instance.c
    query = sa.select(row.id).where(
        row.id != but,
        row.succeeded_by.is_(None),
        row.stopped_at.is_not(None) | (row.heartbeat_at <= silent_since),
    )
    return list(connection.scalars(query.order_by(row.started_at, row.id)))


def living_elsewhere(connection: sa.Connection, *, but: str, silent_since: float) -> list[str]:
    """Where workers reach the others that beat after `silent_since`, in the order of their starts."""
    row = instance.c
    query = sa.select(row.advertise_url).where(
        row.id != but,
        row.advertise_url.is_not(None),
        row.succeeded_by.is_(None),
        row.stopped_at.is_(None),
        row.heartbeat_at > silent_since,
    )
    return list(connection.scalars(query.order_by(row.started_at, row.id)))


@dataclass(frozen=True, slots=True)
class OtherOwner:
    """Another instance that owns open assignments of a worker. `is_alive`: it beats, nobody succeeded it."""

    instance_id: str
    advertise_url: str | None
    is_alive: bool


def other_owner(
    connection: sa.Connection, worker_id: str, *, but: str, silent_since: float
) -> OtherOwner | None:
    """Who else has jobs of this worker; the one whose jobs are the oldest."""
    row, job = instance.c, dispatched_job.c
    query = (
        sa.select(row.id, row.advertise_url, row.stopped_at, row.heartbeat_at, row.succeeded_by)
        .select_from(sa.join(dispatched_job, instance, row.id == job.instance))
        .where(job.worker == worker_id, job.finished_at.is_(None), job.instance != but)
        .order_by(job.id)
        .limit(1)
    )
    found = connection.execute(query).first()
    if found is None:
        return None
    alive = found.stopped_at is None and found.succeeded_by is None and found.heartbeat_at > silent_since
    return OtherOwner(found.id, found.advertise_url, alive)


def list_instances(connection: sa.Connection) -> list[Instance]:
    """Every instance that was ever entered, the oldest first."""
    row = instance.c
    query = sa.select(
        row.id, row.advertise_url, row.started_at, row.heartbeat_at, row.stopped_at, row.succeeded_by
    )
    return [Instance(*found) for found in connection.execute(query.order_by(row.started_at, row.id))]


def take_over(
    connection: sa.Connection, dead_id: str, successor_id: str, *, silent_since: float, now: float
) -> TakeOver | None:
    """Makes `successor_id` the owner of all that `dead_id` had, in one transaction. None if it may not.

    It may if the dead one stopped or did not beat after `silent_since`, and nobody succeeded it. An
    instance that restarts under its own id takes itself over (`dead_id == successor_id`).
    """
    row = instance.c
    if dead_id != successor_id:
        won = connection.execute(
            instance.update()
            .where(
                row.id == dead_id,
                row.succeeded_by.is_(None),
                row.stopped_at.is_not(None) | (row.heartbeat_at <= silent_since),
            )
            .values(succeeded_by=successor_id)
            .returning(row.id)
        ).first()
        if won is None:
            return None
    # While they still name the dead one: what a living successor prepares itself is not touched.
    attempts, abandoned = _close_unstarted(connection, dead_id, now=now)
    # Its clock ran in the memory of who held it: the next planning pass reserves again.
    connection.execute(cluster_reservation.delete().where(cluster_reservation.c.instance == dead_id))
    moved = connection.scalars(
        dispatched_job.update()
        .where(dispatched_job.c.instance == dead_id, dispatched_job.c.finished_at.is_(None))
        .values(instance=successor_id)
        .returning(dispatched_job.c.id)
    ).all()
    attempt = cluster_attempt.c
    # With those that are closed and whose survivors somebody has to wait for.
    connection.execute(
        cluster_attempt.update()
        .where(
            attempt.instance == dead_id, attempt.finished_at.is_(None) | attempt.survivors_until.is_not(None)
        )
        .values(instance=successor_id)
    )
    return TakeOver(tuple(sorted(moved)), attempts, abandoned)


def _close_unstarted(
    connection: sa.Connection, owner: str, *, now: float
) -> tuple[tuple[str, ...], tuple[ClosedAssignment, ...]]:
    attempt = cluster_attempt.c
    closed = connection.scalars(
        cluster_attempt.update()
        .where(attempt.instance == owner, attempt.finished_at.is_(None), attempt.started_at.is_(None))
        .values(
            finished_at=now,
            outcome=AttemptOutcome.PREPARE_FAILED,
            reason="the server stopped before the start",
        )
        .returning(attempt.id)
    ).all()
    if not closed:
        return (), ()
    row = dispatched_job.c
    members = connection.scalars(
        sa.select(row.id).where(row.cluster_attempt.in_(closed), row.finished_at.is_(None)).order_by(row.id)
    ).all()
    abandoned = [close_abandoned(connection, member, now=now) for member in members]
    return tuple(sorted(closed)), tuple(entry for entry in abandoned if entry is not None)
