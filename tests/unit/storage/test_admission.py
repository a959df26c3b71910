"""Examples of upload admission; what must always hold is in the property tests."""

import pytest
from gradient_server.storage import admission
from gradient_server.storage.admission import AdmissionError, Expired, Grant, Skip, UploadAdmission

LEASE = 300.0


def make(concurrency: int = 2, budget: int = 100) -> UploadAdmission:
    return UploadAdmission(concurrency=concurrency, bytes_budget=budget, lease_idle_secs=LEASE)


def test_sessions_are_served_in_turn() -> None:
    uploads = make(concurrency=1)
    assert uploads.request("a", "a1", "p1", 1, 0.0) == [Grant("a", "a1")]
    for number in (2, 3):
        assert uploads.request("a", f"a{number}", f"pa{number}", 1, 0.0) == []
    assert uploads.request("b", "b1", "pb", 1, 0.0) == []
    order = []
    last = "a1"
    for _ in range(3):
        [decision] = uploads.finished(last, 1.0, committed=True)
        last = decision.request_id
        order.append(last)
    assert order == ["a2", "b1", "a3"]


def test_a_large_upload_is_not_overtaken_by_small_ones() -> None:
    uploads = make(concurrency=8, budget=100)
    assert uploads.request("a", "a1", "p1", 60, 0.0) == [Grant("a", "a1")]
    assert uploads.request("b", "large", "p2", 90, 0.0) == []
    assert uploads.request("c", "small", "p3", 1, 0.0) == []
    assert uploads.finished("a1", 1.0, committed=True) == [Grant("b", "large"), Grant("c", "small")]


def test_one_larger_than_the_budget_runs_alone() -> None:
    uploads = make(budget=10)
    assert uploads.request("a", "small", "p1", 1, 0.0) == [Grant("a", "small")]
    assert uploads.request("a", "huge", "p2", 1000, 0.0) == []
    assert uploads.finished("small", 1.0, committed=True) == [Grant("a", "huge")]
    assert uploads.request("b", "other", "p3", 1, 1.0) == []


def test_equal_paths_wait_for_the_first_and_skip_once_it_is_committed() -> None:
    uploads = make(concurrency=3)
    assert uploads.request("a", "a1", "p", 1, 0.0) == [Grant("a", "a1")]
    assert uploads.request("b", "b1", "p", 1, 0.0) == []
    assert uploads.request("b", "b2", "other", 1, 0.0) == [Grant("b", "b2")]
    assert uploads.finished("a1", 1.0, committed=True) == [Skip("b", "b1")]
    assert uploads.waiting == 0


def test_the_next_goes_on_when_the_first_fails() -> None:
    uploads = make()
    uploads.request("a", "a1", "p", 1, 0.0)
    uploads.request("b", "b1", "p", 1, 0.0)
    uploads.request("c", "c1", "p", 1, 0.0)
    assert uploads.finished("a1", 1.0, committed=False) == [Grant("b", "b1")]
    assert uploads.session_ended("b", 2.0) == [Grant("c", "c1")]


def test_a_members_upload_is_never_skipped_and_holds_nobody_up() -> None:
    uploads = make(concurrency=3)
    assert uploads.request("a", "a1", "p", 1, 0.0, may_skip=False) == [Grant("a", "a1")]
    assert uploads.request("b", "b1", "p", 1, 0.0) == [Grant("b", "b1")]
    assert uploads.request("c", "c1", "p", 1, 0.0, may_skip=False) == [Grant("c", "c1")]
    assert uploads.finished("b1", 1.0, committed=True) == []


def test_a_session_that_comes_back_finds_its_request() -> None:
    uploads = make(concurrency=1)
    uploads.request("a", "a1", "p", 1, 0.0)
    assert uploads.session_ended("a", 10.0) == []
    assert uploads.granted == 0
    assert uploads.request("b", "b1", "q", 1, 20.0) == [Grant("b", "b1")]
    assert uploads.request("a again", "a1", "p", 1, 30.0) == []
    assert uploads.finished("b1", 40.0, committed=True) == [Grant("a again", "a1")]
    assert uploads.expire(40.0 + LEASE - 1) == []
    assert uploads.expire(40.0 + LEASE) == [Expired("a again", "a1")]


def test_a_lease_runs_out_unless_bytes_arrive() -> None:
    uploads = make(concurrency=1)
    uploads.request("a", "a1", "p", 1, 0.0)
    uploads.request("b", "b1", "q", 1, 0.0)
    uploads.progress("a1", 200.0)
    assert uploads.expire(LEASE) == []
    assert uploads.next_expiry() == 200.0 + LEASE
    assert uploads.expire(200.0 + LEASE) == [Expired("a", "a1"), Grant("b", "b1")]


def test_what_was_kept_for_a_lost_session_expires_too() -> None:
    uploads = make()
    uploads.request("a", "a1", "p", 1, 0.0)
    uploads.session_ended("a", 5.0)
    assert uploads.expire(LEASE) == [Expired(None, "a1")]
    assert uploads.next_expiry() is None


def test_asking_again_is_answered_again_and_changes_nothing() -> None:
    uploads = make(concurrency=1)
    uploads.request("a", "a1", "p", 1, 0.0)
    assert uploads.request("a", "a1", "p", 1, 0.0) == [Grant("a", "a1")]
    uploads.request("a", "a2", "q", 1, 0.0)
    assert uploads.request("a", "a2", "q", 1, 0.0) == []
    assert uploads.waiting == 1
    assert uploads.cancel("a2", 1.0) == []
    assert uploads.waiting == 0


def test_a_session_cannot_wait_for_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_WAITING_PER_SESSION", 2)
    uploads = make(concurrency=1)
    for number in range(3):
        uploads.request("a", str(number), f"p{number}", 1, 0.0)
    with pytest.raises(AdmissionError, match="more than 2"):
        uploads.request("a", "3", "p3", 1, 0.0)
    assert uploads.waiting == 2


def test_a_refusal_takes_no_upload_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_WAITING_PER_SESSION", 1)
    uploads = make(concurrency=1)
    assert uploads.request("a", "a1", "p1", 1, 0.0) == [Grant("a", "a1")]
    assert uploads.request("b", "b1", "p2", 1, 0.0) == []
    with pytest.raises(AdmissionError):
        uploads.request("b", "a1", "p1", 1, 0.0)
    assert uploads.granted == 1
    assert uploads.finished("a1", 1.0, committed=True) == [Grant("b", "b1")]
