"""Placement against a search through every possibility."""

from itertools import permutations

import numpy as np
from gradient_protocol.kinds import JobKind
from gradient_server.cluster.planner import Request, Zones, place, plan, seatable
from hypothesis import given
from hypothesis import strategies as st


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


@given(st.lists(st.tuples(floors(), st.booleans()), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_no_seat_is_offered_twice_and_every_seat_was_idle(
    wanted: list[tuple[tuple[np.ndarray, np.ndarray, np.ndarray], bool]], seed: int
) -> None:
    workers = max(floor[0].shape[1] for floor, _ in wanted)
    random = np.random.default_rng(seed)
    idle = {kind: random.random(workers) < 0.7 for kind in JobKind}
    requests = []
    for number, (floor, same_zone) in enumerate(wanted):
        able = np.zeros((len(floor[0]), workers), np.bool_)
        able[:, : floor[0].shape[1]] = floor[0]
        kinds = tuple(JobKind.BUILD if random.random() < 0.7 else JobKind.EVAL for _ in able)
        requests.append(Request(str(number), same_zone, kinds, able, np.zeros(able.shape)))
    placed = plan(requests, idle, Zones.of(random.integers(0, 2, workers)))
    seats = [column for placement in placed.values() for column in placement.columns]
    assert len(seats) == len(set(seats))
    for request in requests:
        if request.cluster_id in placed:
            for row, column in enumerate(placed[request.cluster_id].columns):
                assert idle[request.kinds[row]][column]
                assert request.able[row, column]


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
