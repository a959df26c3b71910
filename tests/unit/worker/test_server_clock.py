"""The server's clock from heartbeats."""

import pytest
from gradient_worker.server_clock import ServerClock
from hypothesis import given
from hypothesis import strategies as st


def test_half_the_round_trip_is_taken_off() -> None:
    clock = ServerClock(lambda: 1000.0)
    assert not clock.measured
    clock.sample(100.0, 102.0, 151.0)
    assert clock.offset_secs == 50
    assert clock.now() == 1050


def test_the_shortest_of_the_last_eight_decides() -> None:
    clock = ServerClock(lambda: 0.0)
    clock.sample(0, 0.1, 10.05)
    for number in range(1, 8):
        clock.sample(number, number + 5, number + 100)
    assert clock.offset_secs == pytest.approx(10)
    clock.sample(8, 9, 28.5)
    assert clock.offset_secs == pytest.approx(20)


def test_a_clock_that_was_set_back_voids_what_was_learnt() -> None:
    clock = ServerClock(lambda: 0.0)
    clock.sample(0, 0.1, 10.05)
    clock.sample(1000, 500, 20)
    clock.sample(500, 501, 100.5)
    assert clock.offset_secs == pytest.approx(-400)


@given(
    offset=st.floats(-1e6, 1e6),
    trips=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=8),
)
def test_the_error_is_within_half_the_shortest_round_trip(
    offset: float, trips: list[tuple[float, float]]
) -> None:
    clock = ServerClock(lambda: 0.0)
    now = 0.0
    for there, back in trips:
        clock.sample(now, now + there + back, now + there + offset)
        now += 10
    shortest = min(there + back for there, back in trips)
    assert abs(clock.offset_secs - offset) <= shortest / 2 + 1e-6
