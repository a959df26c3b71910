"""Why a cluster waits, or where it stands: what its runner has in memory, joined with what is stored."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from gradient_server.cluster.reservation import ReservedSeat
from gradient_server.cluster.why import ClusterStage, ClusterWhy, MemberStanding, ReservationStanding
from gradient_server.domain.job import split_job_key
from gradient_server.domain.status import ClusterStatus
from gradient_server.graph.cluster_views import ClusterSummary, MemberView, usual_build_secs
from gradient_server.net.services import Services
from gradient_server.scheduler.model import Assignment
from gradient_server.web.auth import Access
from gradient_server.web.live import live_of_job

__all__ = ["FINAL", "ClusterWhyAnswer", "cluster_why", "with_expected_start"]

FINAL = frozenset(status for status in ClusterStatus if status.is_final)
SHOWN_WAITS = 3


class MemberWhy(BaseModel):
    """A member. `able`: connected workers that could take it, `idle`: those that could now.

    `lacking` says why it cannot start, where that is its own affair. `worker` and `seat` are its place
    in the try that is under way, `stage` what its job does there.
    """

    job: str
    name: str
    role: str
    index: int
    primary: bool
    pin: str | None
    status: str
    error: str | None
    arrived: bool
    able: int
    idle: int
    lacking: str | None
    worker: str | None
    seat: str | None
    stage: str | None


class ZoneWhy(BaseModel):
    """The zone that seats the most, of `size` members: with its idle workers, and with all of them.

    `zone` is None for the whole pool, or for workers without a zone.
    """

    zone: str | None
    seats_idle: int
    seats_able: int
    size: int


class SeatWhy(BaseModel):
    """A reserved seat and what runs on its worker."""

    role: str
    index: int
    worker: str
    is_idle: bool
    running: list[str]


class ReservationWhy(BaseModel):
    """The cluster's reservation, in seconds from now."""

    held_secs: float
    left_secs: float
    seats: list[SeatWhy]


class ClusterWhyAnswer(BaseModel):
    """`summary` is one line. `stage` is what it waits for, or does; lengths of time from now.

    `expected_start_secs` is None where nothing tells it; from a reservation it is a guess, from how
    long what runs on the seats usually takes. `reason` is how the last try ended.
    """

    cluster: str
    name: str
    project: str
    status: str
    stage: str
    summary: str
    attempts: int
    retry_budget: int
    members: list[MemberWhy]
    best_zone: ZoneWhy | None
    reservation: ReservationWhy | None
    reserved_by_other: str | None
    waiting_secs: float | None
    retry_secs: float | None
    expected_start_secs: float | None
    attempt: str | None
    last_failure: str | None
    reason: str | None


def cluster_why(
    services: Services, summary: ClusterSummary, members: Sequence[MemberView], access: Access
) -> ClusterWhyAnswer:
    """What is known at once; see `with_expected_start` for a guess at the rest."""
    known = services.clusters.explain(summary.id)
    standings = {one.job_key: one for one in known.members}
    best = known.best_zone
    return ClusterWhyAnswer(
        cluster=summary.id,
        name=summary.name,
        project=summary.project,
        status=summary.status,
        stage=_stage(summary, known),
        summary=_summary(summary, members, known),
        attempts=summary.attempts,
        retry_budget=summary.retry_budget,
        members=[_member(services, one, standings.get(one.job)) for one in members],
        best_zone=None
        if best is None
        else ZoneWhy(
            zone=best.zone, seats_idle=best.seats_idle, seats_able=best.seats_able, size=len(members)
        ),
        reservation=None if known.reservation is None else _reservation(known.reservation, access),
        reserved_by_other=_other(known, access),
        waiting_secs=known.waiting_secs,
        retry_secs=known.retry_secs,
        expected_start_secs=known.retry_secs,
        attempt=known.attempt_id,
        last_failure=known.last_failure,
        reason=summary.reason,
    )


async def with_expected_start(services: Services, answer: ClusterWhyAnswer) -> ClusterWhyAnswer:
    """The same with the time by which the seats of its reservation should all be idle, where it is known."""
    held = services.clusters.desk.held
    if answer.reservation is None or held is None or held.cluster_id != answer.cluster:
        return answer
    busy = [_running_on(services, seat) for seat in held.seats]
    builds = {split_job_key(one.job_id)[1] for running in busy for one in running}
    now = services.clock.monotonic()
    usual = await services.database.read(lambda connection: usual_build_secs(connection, sorted(builds)))
    left = [_left_secs(running, usual, now) for running in busy if running]
    if any(secs is None for secs in left):
        return answer
    expected = max([secs for secs in left if secs is not None], default=0.0)
    return answer.model_copy(update={"expected_start_secs": max(expected, answer.retry_secs or 0.0)})


def _running_on(services: Services, seat: ReservedSeat) -> list[Assignment]:
    """What keeps a reserved seat from being idle; nothing, where it is."""
    idle = services.scheduler.pool.idle_slots(services.clock.monotonic())
    waiting = {(worker, kind) for worker, kind, *_ in idle}
    if (seat.worker_id, seat.kind) in waiting:
        return []
    return [one for one in services.scheduler.pool.of_worker(seat.worker_id) if one.kind is seat.kind]


def _left_secs(running: Sequence[Assignment], usual: Mapping[str, float], now: float) -> float | None:
    """Until the first of them ends and its slot is free."""
    left = []
    for one in running:
        usual_secs = usual.get(split_job_key(one.job_id)[1])
        if usual_secs is not None:
            left.append(max(usual_secs - (now - one.assigned_at), 0.0))
    return min(left, default=None)


def _stage(summary: ClusterSummary, known: ClusterWhy) -> str:
    if summary.status in FINAL and known.stage is not ClusterStage.SURVIVORS:
        return "ended"
    return str(known.stage)


def _summary(summary: ClusterSummary, members: Sequence[MemberView], known: ClusterWhy) -> str:
    if summary.status in FINAL:
        stopping = "; members of the last try are stopping" if known.stage is ClusterStage.SURVIVORS else ""
        return (summary.reason or "it was ended before a try of it had started") + stopping
    if known.stage is ClusterStage.UNKNOWN:
        return "another server has it, or it has changed just now"
    if known.stage is not ClusterStage.MEMBERS:
        return known.summary
    absent = {one.job_key for one in known.members if not one.arrived}
    waits = [f"{one.role} {one.index}{_waits(one)}" for one in members if one.job in absent]
    return f"waits for {', '.join(waits)}" if waits else known.summary


def _waits(member: MemberView) -> str:
    if not member.waits_for:
        return f", which is {member.status}"
    names = ", ".join(member.waits_for[:SHOWN_WAITS])
    more = len(member.waits_for) - SHOWN_WAITS
    return f", which waits for {names}" + (f" and {more} more" if more > 0 else "")


def _member(services: Services, member: MemberView, standing: MemberStanding | None) -> MemberWhy:
    lacking = None if standing is None else standing.lacking
    if lacking is None and standing is not None and not standing.arrived:
        lacking = f"{member.role} {member.index}{_waits(member)}"
    return MemberWhy(
        job=member.job,
        name=member.name,
        role=member.role,
        index=member.index,
        primary=member.primary,
        pin=member.pin,
        status=member.status,
        error=member.error,
        arrived=standing is not None and standing.arrived,
        able=0 if standing is None else standing.able,
        idle=0 if standing is None else standing.idle,
        lacking=lacking,
        worker=None if standing is None else standing.worker,
        seat=None if standing is None else standing.seat,
        stage=live_of_job(services, member.job).stage,
    )


def _reservation(standing: ReservationStanding, access: Access) -> ReservationWhy:
    """To a key that is bound to a project, the jobs of others have no names."""
    seats = [
        SeatWhy(
            role=seat.role,
            index=seat.index,
            worker=seat.worker,
            is_idle=seat.is_idle,
            running=list(seat.running) if access.project is None else ["a job" for _ in seat.running],
        )
        for seat in standing.seats
    ]
    return ReservationWhy(held_secs=standing.held_secs, left_secs=standing.left_secs, seats=seats)


def _other(known: ClusterWhy, access: Access) -> str | None:
    if known.reserved_by_other is None or access.project is None:
        return known.reserved_by_other
    return "a cluster of another project"
