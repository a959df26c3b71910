"""Why a cluster waits, or where its attempt stands: `gradient why --cluster` (operations.md).

From what is in memory alone; a cluster that is not in the book is `unknown` here, and the database
has the rest. Lengths of time in seconds from now; None is unknown.
"""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gradient_protocol.kinds import JobKind

from gradient_server.cluster.attempts import Attempt
from gradient_server.cluster.book import ClusterBook, Entry
from gradient_server.cluster.floor import Floor
from gradient_server.cluster.planner import Flags, seatable
from gradient_server.cluster.reservation import Reservation, ReservationDesk
from gradient_server.cluster.states import AttemptState
from gradient_server.domain.cluster import MemberInfo
from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.eligibility import Requirement, refusal
from gradient_server.scheduler.worker_pool import WorkerPool

__all__ = [
    "ClusterStage",
    "ClusterWhy",
    "MemberStanding",
    "ReservationStanding",
    "SeatStanding",
    "ZoneStanding",
    "explain_cluster",
]


class ClusterStage(enum.StrEnum):
    """What the cluster waits for, or does."""

    MEMBERS = "members"
    BACKOFF = "backoff"
    SEATS = "seats"
    RESERVED = "reserved"
    PREPARING = "preparing"
    RUNNING = "running"
    SURVIVORS = "survivors"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStanding:
    """One member. `able`: connected workers that could take it, `idle`: those that could now.

    `lacking`: why nobody could, in words. `worker` and `seat` (states.Seat) within an attempt.
    """

    job_key: str
    role: str
    index: int
    primary: bool
    pin: str | None
    arrived: bool
    able: int = 0
    idle: int = 0
    lacking: str | None = None
    worker: str | None = None
    seat: str | None = None


@dataclass(frozen=True, slots=True)
class ZoneStanding:
    """How many members the workers of a zone could seat: with those that wait, and with all."""

    zone: str | None
    seats_idle: int
    seats_able: int


@dataclass(frozen=True, slots=True)
class SeatStanding:
    """A reserved seat and what runs on its worker (names of jobs)."""

    role: str
    index: int
    worker: str
    is_idle: bool
    running: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReservationStanding:
    """The cluster's reservation."""

    held_secs: float
    left_secs: float
    seats: tuple[SeatStanding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWhy:
    """`summary` is one line for people; `best_zone` is all workers together without `same_zone`.

    `waiting_secs` since the last member's arrival, `retry_secs` until a backoff is over.
    """

    cluster_id: str
    stage: ClusterStage
    summary: str
    members: tuple[MemberStanding, ...] = ()
    best_zone: ZoneStanding | None = None
    reservation: ReservationStanding | None = None
    reserved_by_other: str | None = None
    waiting_secs: float | None = None
    retry_secs: float | None = None
    attempt_id: str | None = None
    last_failure: str | None = None


def explain_cluster(
    cluster_id: str,
    *,
    book: ClusterBook,
    floor: Floor,
    desk: ReservationDesk,
    attempt: Attempt | None,
    pool: WorkerPool,
    now: float,
) -> ClusterWhy:
    """`attempt`: the cluster's, if one is under way. `now` on the monotonic clock."""
    entry = book.get(cluster_id)
    if attempt is not None and (entry is None or entry.attempt_id == attempt.id):
        return _attempt(cluster_id, attempt)
    if entry is None:
        return ClusterWhy(
            cluster_id=cluster_id, stage=ClusterStage.UNKNOWN, summary="it is not waiting on this server"
        )
    idle = floor.idle([(worker, kind) for worker, kind, *_ in pool.idle_slots(now)])
    members = tuple(
        _member(member, entry.arrived.get(member.job_key), floor, idle) for member in entry.info.members
    )
    waiting_secs = None if entry.ready_since is None else now - entry.ready_since
    if not entry.is_complete:
        names = ", ".join(f"{member.role} {member.index}" for member in entry.absent())
        return ClusterWhy(
            cluster_id=cluster_id,
            stage=ClusterStage.MEMBERS,
            summary=f"waits for {names} to be able to start",
            members=members,
            last_failure=entry.last_failure,
        )
    best = _best_zone(entry, floor, idle)
    reservation = _reservation(entry, floor, desk, pool, idle=idle, now=now)
    retry_secs = max(entry.startable_at - now, 0.0) or None
    stage = _stage(retry_secs, reservation)
    holder = desk.held.cluster_id if desk.held is not None and reservation is None else None
    return ClusterWhy(
        cluster_id=cluster_id,
        stage=stage,
        summary=_summary(stage, best, members, retry_secs, reservation),
        members=members,
        best_zone=best,
        reservation=reservation,
        reserved_by_other=holder,
        waiting_secs=waiting_secs,
        retry_secs=retry_secs,
        last_failure=entry.last_failure,
    )


def _stage(retry_secs: float | None, reservation: ReservationStanding | None) -> ClusterStage:
    if retry_secs is not None:
        return ClusterStage.BACKOFF
    return ClusterStage.SEATS if reservation is None else ClusterStage.RESERVED


def _summary(
    stage: ClusterStage,
    best: ZoneStanding,
    members: Sequence[MemberStanding],
    retry_secs: float | None,
    reservation: ReservationStanding | None,
) -> str:
    where = "the pool" if best.zone is None else f"zone {best.zone}"
    text = f"{where} seats {best.seats_idle} of {len(members)} now, {best.seats_able} once all are idle"
    if stage is ClusterStage.BACKOFF:
        text = f"tries again in {retry_secs:.0f} s; {text}"
    if reservation is not None:
        busy = sum(not seat.is_idle for seat in reservation.seats)
        text += f"; its seats are reserved since {reservation.held_secs:.0f} s, {busy} still busy"
    lacking = list(dict.fromkeys(one.lacking for one in members if one.lacking is not None))
    return "; ".join([text, *lacking])


def _attempt(cluster_id: str, attempt: Attempt) -> ClusterWhy:
    machine = attempt.machine
    members = tuple(
        MemberStanding(
            job_key=seat.member.job_key,
            role=seat.member.role,
            index=seat.member.index,
            primary=seat.member.primary,
            pin=seat.member.pin,
            arrived=True,
            worker=seat.worker_name,
            seat=str(machine.seats[assignment]),
        )
        for assignment, seat in attempt.seats.items()
    )
    if not machine.is_open:
        stage, doing = ClusterStage.SURVIVORS, "waits for members of the last try to stop"
    elif machine.state in (AttemptState.RUNNING, AttemptState.SETTLING):
        stage, doing = ClusterStage.RUNNING, "its members are running"
    else:
        late = ", ".join(f"{seat.worker_name} ({seat.member.role})" for seat in attempt.awaited())
        stage, doing = ClusterStage.PREPARING, f"waits for {late or 'the start'} to hold its job"
    return ClusterWhy(
        cluster_id=cluster_id, stage=stage, summary=doing, members=members, attempt_id=attempt.id
    )


def _member(
    member: MemberInfo, job: PendingJob | None, floor: Floor, idle: dict[JobKind, Flags]
) -> MemberStanding:
    able: Flags = np.zeros(0, np.bool_) if job is None else floor.able(job, member.pin)
    return MemberStanding(
        job_key=member.job_key,
        role=member.role,
        index=member.index,
        primary=member.primary,
        pin=member.pin,
        arrived=job is not None,
        able=int(able.sum()),
        idle=0 if job is None else int((able & idle[job.kind]).sum()),
        lacking=None if job is None or able.any() else _lacking(member, job, floor),
    )


def _lacking(member: MemberInfo, job: PendingJob, floor: Floor) -> str:
    """The most frequent reason why nobody takes it."""
    who = f"{member.role} {member.index}"
    candidates = [floor.info(worker) for worker in floor.workers()]
    if member.pin is not None:
        candidates = [info for info in candidates if member.pin in (info.id, info.name)]
        if not candidates:
            return f"{who} is pinned to {member.pin}, which is not connected"
    requirement = Requirement.of(job)
    found = Counter(no.text for no in (refusal(requirement, info) for info in candidates) if no is not None)
    if not found:
        return (
            f"{who}: every worker that could take it is draining" if candidates else "no worker is connected"
        )
    text, count = found.most_common(1)[0]
    return f"{who}: no worker can take it ({count} of {len(candidates)}: {text})"


def _best_zone(entry: Entry, floor: Floor, idle: dict[JobKind, Flags]) -> ZoneStanding:
    jobs = entry.jobs()
    able = np.stack(
        [floor.able(job, member.pin) for job, member in zip(jobs, entry.info.members, strict=True)]
    )
    waiting = able & np.stack([idle[job.kind] for job in jobs])
    if not entry.info.same_zone:
        return ZoneStanding(None, _seated(waiting), _seated(able))
    zones = floor.zones
    standings = [
        ZoneStanding(
            floor.zone_name(code),
            _seated(waiting[:, zones.columns(place)]),
            _seated(able[:, zones.columns(place)]),
        )
        for place, code in enumerate(zones.codes)
    ]
    return max(standings, key=lambda one: (one.seats_able, one.seats_idle), default=ZoneStanding(None, 0, 0))


def _seated(usable: Flags) -> int:
    return sum(column is not None for column in seatable(usable))


def _reservation(
    entry: Entry,
    floor: Floor,
    desk: ReservationDesk,
    pool: WorkerPool,
    *,
    idle: dict[JobKind, Flags],
    now: float,
) -> ReservationStanding | None:
    held: Reservation | None = desk.held
    if held is None or held.cluster_id != entry.info.id:
        return None
    members = {member.job_key: member for member in entry.info.members}
    seats = tuple(
        SeatStanding(
            role=members[seat.job_key].role,
            index=members[seat.job_key].index,
            worker=floor.info(seat.worker_id).name,
            is_idle=bool(idle[seat.kind][floor.column(seat.worker_id)]),
            running=tuple(one.name for one in pool.of_worker(seat.worker_id) if one.kind is seat.kind),
        )
        for seat in held.seats
        if seat.worker_id in floor
    )
    held_secs = now - held.reserved_at
    return ReservationStanding(held_secs, max(desk.timeout_secs - held_secs, 0.0), seats)
