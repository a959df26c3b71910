"""One pass of the planner over the book: who starts where, and who reserves (cluster-jobs.md, Placement,
Aging Reservations). Decides alone; the runner takes the seats, and may find one gone.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gradient_protocol.kinds import JobKind

from gradient_server.cluster.book import ClusterBook, Entry
from gradient_server.cluster.floor import Floor
from gradient_server.cluster.planner import Flags, Placement, Request, place
from gradient_server.cluster.reservation import Release, ReservationDesk, ReservedSeat
from gradient_server.domain.cluster import MemberInfo
from gradient_server.domain.job import PendingJob

__all__ = ["PassOutcome", "PlannedAttempt", "PlannedSeat", "plan_pass"]


@dataclass(frozen=True, slots=True)
class PlannedSeat:
    """A member and its worker."""

    member: MemberInfo
    job: PendingJob
    worker_id: str


@dataclass(frozen=True, slots=True)
class PlannedAttempt:
    """A full placement of a cluster over idle workers."""

    cluster_id: str
    seats: tuple[PlannedSeat, ...]


@dataclass(slots=True)
class PassOutcome:
    """What one pass decided. `reserved`: a reservation was granted (or moved) at the desk."""

    attempts: list[PlannedAttempt]
    released: Release | None = None
    reserved: str | None = None
    # Those that can start and found no seats.
    unseated: tuple[str, ...] = ()


def plan_pass(
    book: ClusterBook,
    floor: Floor,
    desk: ReservationDesk,
    *,
    idle_slots: Collection[tuple[str, JobKind]],
    excluded: Mapping[str, Collection[str]],
    now: float,
    may_reserve: bool = True,
) -> PassOutcome:
    """Plans all clusters able to start. `idle_slots`: fresh ones alone; `excluded`: workers by job key.

    The desk is changed by it: a reservation that has ended is released, and one that is due granted.
    """
    outcome = PassOutcome([])
    outcome.released = _ended(book, floor, desk, now)
    if outcome.released is not None:
        desk.release()
    waiting = book.waiting(now)
    if not waiting or not len(floor):
        outcome.unseated = tuple(entry.info.id for entry in waiting)
        return outcome
    idle = floor.idle(idle_slots)
    requests = _Requests(floor, excluded)
    holder = _commit_reservation(book, floor, desk, requests=requests, idle=idle, now=now)
    if holder is not None:
        outcome.attempts.append(holder)
    held_by = None if desk.held is None else desk.held.cluster_id
    unreserved = ~floor.flags(desk.workers)
    free = {kind: flags & unreserved for kind, flags in idle.items()}
    for entry in waiting:
        if entry.info.id == held_by:
            continue
        placement = _seat(entry, requests, free, floor)
        if placement is not None:
            outcome.attempts.append(_planned(entry, floor, placement))
            for flags in (*free.values(), *idle.values()):
                flags[list(placement.columns)] = False
    started = {attempt.cluster_id for attempt in outcome.attempts}
    unseated = [entry for entry in waiting if entry.info.id not in started]
    outcome.unseated = tuple(entry.info.id for entry in unseated)
    if desk.held is None and may_reserve:
        outcome.reserved = _reserve(floor, desk, requests=requests, unseated=unseated, idle=idle, now=now)
    return outcome


class _Requests:
    """What the planner is asked for each cluster, made where it is needed."""

    def __init__(self, floor: Floor, excluded: Mapping[str, Collection[str]]) -> None:
        self._floor = floor
        self._excluded = excluded
        self._made: dict[str, Request] = {}

    def of(self, entry: Entry) -> Request:
        """The request of a cluster that can start."""
        request = self._made.get(entry.info.id)
        if request is None:
            request = self._made[entry.info.id] = _request(entry, self._floor, self._excluded)
        return request


def _seat(entry: Entry, requests: _Requests, free: Mapping[JobKind, Flags], floor: Floor) -> Placement | None:
    """A full placement over the free seats. Most clusters of a full pool are passed over by a count."""
    wanted = Counter(job.kind for job in entry.arrived.values())
    if any(np.count_nonzero(free[kind]) < count for kind, count in wanted.items()):
        return None
    request = requests.of(entry)
    usable = _usable(request, free)
    return place(usable, request.missing_bytes, floor.zones, same_zone=request.same_zone)


def _ended(book: ClusterBook, floor: Floor, desk: ReservationDesk, now: float) -> Release | None:
    """Whether, and why, the reservation has ended."""
    held = desk.held
    if held is None:
        return None
    if desk.expired(now):
        return Release.TIMEOUT
    if any(seat.worker_id not in floor for seat in held.seats):
        return Release.WORKER_LEFT
    entry = book.get(held.cluster_id)
    if entry is None or (entry.attempt_id is None and not entry.is_complete and entry.startable_at <= now):
        return Release.LEFT_QUEUE
    if entry.attempt_id is None and entry.is_complete and not _still_able(entry, floor, held.seats):
        return Release.WORKER_LEFT
    return None


def _still_able(entry: Entry, floor: Floor, seats: Sequence[ReservedSeat]) -> bool:
    pins = {member.job_key: member.pin for member in entry.info.members}
    return all(
        floor.able(entry.arrived[seat.job_key], pins[seat.job_key])[floor.column(seat.worker_id)]
        for seat in seats
        if seat.job_key in entry.arrived
    )


def _request(entry: Entry, floor: Floor, excluded: Mapping[str, Collection[str]]) -> Request:
    jobs = entry.jobs()
    able = np.stack(
        [floor.able(job, member.pin) for job, member in zip(jobs, entry.info.members, strict=True)]
    )
    for row, job in enumerate(jobs):
        if excluded.get(job.job_id):
            able[row] &= ~floor.flags(excluded[job.job_id])
    return Request(
        cluster_id=entry.info.id,
        same_zone=entry.info.same_zone,
        kinds=tuple(job.kind for job in jobs),
        able=able,
        missing_bytes=np.stack([floor.missing_bytes(job) for job in jobs]),
    )


def _planned(entry: Entry, floor: Floor, placement: Placement) -> PlannedAttempt:
    members = zip(entry.info.members, entry.jobs(), placement.columns, strict=True)
    seats = [PlannedSeat(member, job, floor.worker_at(column)) for member, job, column in members]
    return PlannedAttempt(entry.info.id, tuple(seats))


def _usable(request: Request, idle: Mapping[JobKind, Flags]) -> Flags:
    usable: Flags = request.able & np.stack([idle[kind] for kind in request.kinds])
    return usable


def _commit_reservation(
    book: ClusterBook,
    floor: Floor,
    desk: ReservationDesk,
    *,
    requests: _Requests,
    idle: Mapping[JobKind, Flags],
    now: float,
) -> PlannedAttempt | None:
    """The holder's attempt once its seats are idle, or others line up before them."""
    held = desk.held
    entry = None if held is None else book.get(held.cluster_id)
    if held is None or entry is None or not entry.can_start(now):
        return None
    request = requests.of(entry)
    if held.replan:
        placement = _best_seats(floor, desk, request, idle, now)
        if placement is not None:
            desk.move(_reserved_seats(entry, floor, placement))
    seat_of = {seat.job_key: seat.worker_id for seat in held.seats}
    columns = [
        floor.column(seat_of[member.job_key]) for member in entry.info.members if member.job_key in seat_of
    ]
    usable = _usable(request, idle)
    usable &= ~floor.flags(desk.avoided(now))
    if len(columns) == len(usable) and all(usable[row, column] for row, column in enumerate(columns)):
        return _planned(entry, floor, Placement(-1, tuple(columns), 0.0))
    placement = place(usable, request.missing_bytes, floor.zones, same_zone=request.same_zone)
    if placement is None:
        return None
    for flags in idle.values():
        flags[list(placement.columns)] = False
    return _planned(entry, floor, placement)


def _reserve(
    floor: Floor,
    desk: ReservationDesk,
    *,
    requests: _Requests,
    unseated: Sequence[Entry],
    idle: Mapping[JobKind, Flags],
    now: float,
) -> str | None:
    """Grants the reservation to the first that has waited long enough and could be seated at all."""
    for entry in unseated:
        if not desk.has_aged(entry.ready_since, now):
            continue
        placement = _best_seats(floor, desk, requests.of(entry), idle, now)
        if placement is not None:
            desk.grant(entry.info.id, _reserved_seats(entry, floor, placement), now)
            return entry.info.id
    return None


def _best_seats(
    floor: Floor, desk: ReservationDesk, request: Request, idle: Mapping[JobKind, Flags], now: float
) -> Placement | None:
    """The match over every connected eligible worker: the most idle seats first, then missing bytes."""
    usable = request.able & ~floor.flags(desk.avoided(now))
    # More than all missing bytes of any match together, so that one busy seat less always wins.
    weight = 1.0 + float(request.missing_bytes.max(initial=0.0)) * len(request.kinds)
    busy = ~np.stack([idle[kind] for kind in request.kinds])
    cost = request.missing_bytes + weight * busy
    return place(usable, cost, floor.zones, same_zone=request.same_zone)


def _reserved_seats(entry: Entry, floor: Floor, placement: Placement) -> tuple[ReservedSeat, ...]:
    return tuple(
        ReservedSeat(job.job_id, floor.worker_at(column), job.kind)
        for job, column in zip(entry.jobs(), placement.columns, strict=True)
    )
