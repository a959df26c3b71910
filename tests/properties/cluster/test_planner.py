"""Placement against a search through every possibility."""

from itertools import permutations

import numpy as np
from gradient_protocol.kinds import JobKind
from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.dispatch import plan_pass
from gradient_server.cluster.floor import Floor
from gradient_server.cluster.planner import Zones, place, seatable
from gradient_server.cluster.reservation import ReservationDesk
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.cluster import cluster_info
from tests.fakes.scheduler import build, worker


@st.composite
def floors(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(usable, cost, zone codes): up to 4 members over up to 6 workers in up to 3 zones."""
    members = draw(st.integers(1, 4))
    workers = draw(st.integers(1, 6))
    cells = members * workers
    usable = draw(st.lists(st.booleans(), min_size=cells, max_size=cells))
    cost = draw(st.lists(st.integers(0, 5), min_size=cells, max_size=cells))
    codes = draw(st.lists(st.integers(-1, 2), min_size=workers, max_size=workers))
    shape = (members, workers)
    flags = np.array(usable).reshape(shape)
    flags[:, np.array(codes) < 0] = False  # nobody there
    return flags, np.array(cost, float).reshape(shape), np.array(codes)


def cheapest(usable: np.ndarray, cost: np.ndarray, columns: list[int]) -> float | None:
    totals = [
        sum(cost[row, column] for row, column in enumerate(chosen))
        for chosen in permutations(columns, len(usable))
        if all(usable[row, column] for row, column in enumerate(chosen))
    ]
    return min(totals, default=None)


@given(floors(), st.booleans())
def test_a_placement_is_full_feasible_in_one_zone_and_the_cheapest(
    floor: tuple[np.ndarray, np.ndarray, np.ndarray], same_zone: bool
) -> None:
    usable, cost, codes = floor
    found = place(usable, cost, Zones.of(codes), same_zone=same_zone)
    everyone = [column for column in range(len(codes)) if codes[column] >= 0]
    zones = [[c for c in everyone if codes[c] == code] for code in sorted(set(codes[codes >= 0].tolist()))]
    costs = [cheapest(usable, cost, columns) for columns in (zones if same_zone else [everyone])]
    best = min((one for one in costs if one is not None), default=None)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.cost == best
    assert len(set(found.columns)) == len(usable)
    assert all(usable[row, column] for row, column in enumerate(found.columns))
    assert sum(cost[row, column] for row, column in enumerate(found.columns)) == best
    if same_zone:
        assert {codes[column] for column in found.columns} == {found.zone}


@given(st.integers(2, 4), st.integers(40, 80), st.integers(0, 2**32 - 1))
def test_leaving_out_columns_that_cannot_matter_costs_nothing(members: int, workers: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    usable = random.random((members, workers)) < 0.5
    cost = random.integers(0, 20, (members, workers)).astype(float)
    found = place(usable, cost, Zones.one(np.arange(workers)), same_zone=True)
    by_hand = place(usable, cost, Zones.of(np.zeros(workers, np.intp)), same_zone=False)
    assert (found is None) == (by_hand is None)
    if found is not None and by_hand is not None:
        assert found.cost == by_hand.cost
    # One worker at a time: no exchange of one seat makes it cheaper.
    if found is not None:
        for row, column in enumerate(found.columns):
            for other in np.flatnonzero(usable[row]).tolist():
                assert other in found.columns or cost[row, other] >= cost[row, column]


SLOT = st.tuples(st.integers(0, 7), st.sampled_from(JobKind))
MEMBER = st.tuples(st.sampled_from(JobKind), st.sampled_from([(), ("kvm",)]))


@given(
    hosts=st.lists(st.tuples(st.sampled_from([None, "x", "y"]), st.booleans()), min_size=1, max_size=8),
    slots=st.sets(SLOT),
    wanted=st.lists(st.tuples(st.lists(MEMBER, min_size=1, max_size=3), st.booleans()), max_size=4),
    ages=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_no_seat_is_offered_twice_and_every_seat_is_idle_able_and_unreserved(
    hosts: list[tuple[str | None, bool]],
    slots: set[tuple[int, JobKind]],
    wanted: list[tuple[list[tuple[JobKind, tuple[str, ...]]], bool]],
    ages: list[bool],
) -> None:
    floor, book = Floor(), ClusterBook()
    for number, (zone, kvm) in enumerate(hosts):
        floor.connect(worker(f"w{number}", zone=zone, system_features=["kvm"] if kvm else []))
    for number, (members, same_zone) in enumerate(wanted):
        info = cluster_info(f"k{number}", members=len(members), same_zone=same_zone, created_at=number)
        book.learn(info, 0.0)
        for member, (kind, features) in zip(info.members, members, strict=True):
            job = build(
                member.job_key.removeprefix("build:"),
                cluster=info.id,
                kind=kind,
                features=frozenset(features),
            )
            book.arrive(job, 0.0 if ages[number] else 900.0)
    desk = ReservationDesk(after_secs=600.0, timeout_secs=1800.0)
    idle = {(f"w{number}", kind) for number, kind in slots if number < len(hosts)}
    outcome = plan_pass(book, floor, desk, idle_slots=idle, excluded={}, now=1000.0)
    seats = [seat for attempt in outcome.attempts for seat in attempt.seats]
    assert len({seat.worker_id for seat in seats}) == len(seats)
    for attempt in outcome.attempts:
        info = book.clusters[attempt.cluster_id].info
        assert [seat.member for seat in attempt.seats] == list(info.members)
        zones = {floor.info(seat.worker_id).capabilities.zone for seat in attempt.seats}
        assert len(zones) == 1 or not info.same_zone
    for seat in seats:
        assert (seat.worker_id, seat.job.kind) in idle
        assert seat.job.features <= set(floor.info(seat.worker_id).capabilities.system_features)
    assert {attempt.cluster_id for attempt in outcome.attempts}.isdisjoint(outcome.unseated)
    if desk.held is not None:
        assert ages[int(desk.held.cluster_id[1:])]
        # With every slot idle again, the holder starts, and the others keep off its seats.
        reserved = desk.workers
        again = plan_pass(book, floor, desk, idle_slots=idle, excluded={}, now=1001.0)
        for attempt in again.attempts:
            if desk.held is not None and attempt.cluster_id != desk.held.cluster_id:
                assert reserved.isdisjoint(seat.worker_id for seat in attempt.seats)


@given(floors())
def test_as_many_members_are_seated_as_possible_where_not_all_can_be(
    floor: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    usable = floor[0]
    found = seatable(usable)
    seats = [column for column in found if column is not None]
    assert len(seats) == len(set(seats))
    assert all(usable[row, column] for row, column in enumerate(found) if column is not None)
    columns = [*range(usable.shape[1]), *[None] * len(usable)]
    most = max(
        sum(column is not None and usable[row, column] for row, column in enumerate(chosen))
        for chosen in permutations(columns[: usable.shape[1] + len(usable)], len(usable))
    )
    assert len(seats) == most
