"""The server's wall time where somebody sets the host's clock."""

import pytest
import structlog
from gradient_server.clock import FOLLOW_RATE, TOO_FAR_SECS, SystemClock
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.times import FakeClock

HOUR_SECS = 3600.0


def clock_of(host: FakeClock) -> SystemClock:
    return SystemClock(host.now, host.monotonic)


def test_it_is_the_hosts_time_where_nobody_sets_it() -> None:
    host = FakeClock()
    clock = clock_of(host)
    for _ in range(100):
        host.advance(60)
        assert clock.now() == pytest.approx(host.now(), abs=1e-3)


@pytest.mark.parametrize("step_secs", [HOUR_SECS, -HOUR_SECS, 2.0])
def test_a_step_is_followed_slowly_and_told_once(step_secs: float) -> None:
    host = FakeClock()
    clock = clock_of(host)
    before = clock.now()
    host.step(step_secs)
    with structlog.testing.capture_logs() as told:
        assert clock.now() == before
        host.advance(300)
        assert clock.now() == pytest.approx(before + 300, abs=300 * FOLLOW_RATE)
        for _ in range(3 * 24 * 60):
            host.advance(60)
            clock.now()
    assert clock.now() == pytest.approx(host.now(), abs=1e-3)
    assert [line["step_secs"] for line in told] == [step_secs]


def test_a_host_that_was_far_off_is_followed_at_once() -> None:
    host = FakeClock(now=0.0)  # it has no clock of its own, and its time service comes late
    clock = clock_of(host)
    host.step(1_700_000_000)
    assert clock.now() == host.now()
    host.step(-TOO_FAR_SECS - 1)
    assert clock.now() == host.now()


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(-HOUR_SECS, HOUR_SECS)), max_size=10))
def test_it_neither_goes_back_nor_hastens(moves: list[tuple[float, float]]) -> None:
    host = FakeClock()
    clock = clock_of(host)
    for passed, step in moves:
        before = clock.now()
        host.step(step)
        host.advance(passed)
        assert passed * (1 - FOLLOW_RATE) - 1e-6 <= clock.now() - before <= passed * (1 + FOLLOW_RATE) + 1e-6
