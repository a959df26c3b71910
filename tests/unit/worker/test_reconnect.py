"""Where and when to connect next."""

from gradient_protocol.address import parse_address
from gradient_worker.reconnect import MAX_HOPS, Reconnect
from gradient_worker.timing import KNOCKS

HOME = parse_address("tls://home:1")


def made(jitter: float = 1.0) -> Reconnect:
    return Reconnect(HOME, lambda: jitter)


def test_the_wait_doubles_to_a_minute() -> None:
    reconnect = made()
    waits = [reconnect.failed(has_jobs=False) for _ in range(8)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    reconnect.established()
    assert reconnect.failed(has_jobs=False) == 1


def test_jobs_keep_the_wait_short() -> None:
    reconnect = made()
    assert max(reconnect.failed(has_jobs=True) for _ in range(8)) == 15


def test_jitter_takes_half_the_wait_at_most() -> None:
    assert made(jitter=0).failed(has_jobs=False) == 0.5


def test_where_nobody_listens_it_knocks_every_second_for_a_minute_before_it_backs_off() -> None:
    reconnect = made()
    knocks = [reconnect.failed(has_jobs=False, nobody_listens=True) for _ in range(KNOCKS)]
    assert set(knocks) == {1}
    assert [reconnect.failed(has_jobs=False, nobody_listens=True) for _ in range(3)] == [1, 2, 4]
    assert sum(knocks) * 0.75 == 60
    reconnect.established()
    assert [reconnect.failed(has_jobs=False, nobody_listens=True) for _ in range(3)] == [1, 1, 1]


def test_a_server_that_turns_it_away_is_spared_whatever_it_knocked() -> None:
    reconnect = made()
    turned_away = [reconnect.failed(has_jobs=False, nobody_listens=knock) for knock in (False, True, False)]
    assert turned_away == [1, 1, 2]


def test_a_redirect_is_tried_once_and_given_up() -> None:
    reconnect = made()
    assert reconnect.redirect("tls://other:2") is None
    assert reconnect.failed(has_jobs=False, redirected=True) == 0
    assert str(reconnect.address) == "tls://other:2"
    assert reconnect.failed(has_jobs=False) == 1
    assert reconnect.address == HOME


def test_a_redirect_never_lowers_security() -> None:
    reconnect = made()
    assert reconnect.redirect("tcp://other:2")
    assert reconnect.redirect("nonsense")
    assert reconnect.redirect(None)
    assert reconnect.address == HOME


def test_redirects_in_a_circle_end() -> None:
    reconnect = made()
    for _ in range(MAX_HOPS):
        assert reconnect.redirect("tls://other:2") is None
    assert reconnect.redirect("tls://other:2")
    reconnect.established()
    assert reconnect.redirect("tls://other:2") is None
