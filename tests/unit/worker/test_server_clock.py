"""The server's clock from heartbeats."""

import pytest
from gradient_worker.server_clock import ServerClock
from hypothesis import given
from hypothesis import strategies as st


class Host:
    """A host's two clocks."""

    def __init__(self) -> None:
        self.wall = 1_000_000.0
        self.steady = 100.0

    def advance(self, secs: float) -> None:
        self.wall += secs
        self.steady += secs

    def clock(self) -> ServerClock:
        return ServerClock(lambda: self.wall, lambda: self.steady)


def standing() -> ServerClock:
    """Both clocks of its host stand at 0."""
    return ServerClock(lambda: 0.0, lambda: 0.0)


def test_before_the_first_sample_the_wall_clock_serves() -> None:
    host = Host()
    clock = host.clock()
    assert not clock.measured
    host.advance(5)
    assert clock.now() == 1_000_005


def test_half_the_round_trip_is_taken_off() -> None:
    clock = standing()
    clock.sample(100.0, 102.0, 151.0)
    assert clock.measured
    assert clock.now() == 50


def test_the_shortest_of_the_last_eight_decides() -> None:
    clock = standing()
    clock.sample(0, 0.1, 10.05)
    for number in range(1, 8):
        clock.sample(number, number + 5, number + 12.6)
    assert clock.now() == pytest.approx(10)
    clock.sample(8, 9, 18.9)
    assert clock.now() == pytest.approx(10.4)


@pytest.mark.parametrize("hours", [1, -1])
def test_a_host_whose_wall_clock_is_set_notices_nothing(hours: int) -> None:
    host = Host()
    clock = host.clock()
    clock.sample(host.steady, host.steady, 5_000.0)
    ended_at = host.wall
    host.advance(10)
    assert clock.at(clock.of_wall(ended_at)) == pytest.approx(5_000)
    host.wall += hours * 3600
    assert clock.now() == pytest.approx(5_010)
    # What was noted before the wall clock was set back lies in its future: it is now at the latest.
    assert clock.at(clock.of_wall(host.wall + 60)) == pytest.approx(5_010)


@pytest.mark.parametrize("hours", [1, -1])
def test_a_server_whose_clock_is_set_is_followed_at_the_next_answer(hours: int) -> None:
    clock = standing()
    clock.sample(0, 0.1, 10.05)
    clock.sample(10, 10.5, 20.3 + hours * 3600)
    assert clock.now() == pytest.approx(10.05 + hours * 3600)


@given(
    offset=st.floats(-1e6, 1e6),
    trips=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=8),
)
def test_the_error_is_within_half_the_shortest_round_trip(
    offset: float, trips: list[tuple[float, float]]
) -> None:
    clock = standing()
    now = 0.0
    for there, back in trips:
        clock.sample(now, now + there + back, now + there + offset)
        now += 10
    shortest = min(there + back for there, back in trips)
    assert abs(clock.now() - offset) <= shortest / 2 + 1e-6
