"""Every row of the table in `holds`, and what the table does not allow."""

import pytest
from gradient_worker.holds import Abort, Drop, HoldRefusal, Holds, IllegalHoldError, Release, Run
from gradient_worker.timing import ATTEMPT_TOMBSTONE_SECS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule


def held() -> Holds:
    holds = Holds()
    assert holds.hold("a", "attempt", 40, now=100) is None
    return holds


def test_a_held_job_runs_once() -> None:
    holds = held()
    assert holds.is_held("a")
    assert holds.start_cluster("attempt") == Run("a")
    assert holds.start_cluster("attempt") is None
    assert not holds.is_held("a")
    assert holds.next_deadline() is None


def test_an_abort_drops_what_is_held_and_aborts_what_runs() -> None:
    assert held().abort_cluster("attempt", "why", now=101) == Drop("a")
    holds = held()
    holds.start_cluster("attempt")
    assert holds.abort_cluster("attempt", "why", now=101) == Abort("a", "why")


def test_abort_job_releases_what_is_held_and_leaves_what_runs_to_the_executor() -> None:
    assert held().abort_job("a", "revoked") == Release("a", "revoked")
    holds = held()
    holds.start_cluster("attempt")
    assert holds.abort_job("a", "revoked") is None


def test_a_hold_expires_at_its_deadline_and_not_before() -> None:
    holds = held()
    assert holds.next_deadline() == 140
    assert holds.expire(139.9) == []
    assert holds.expire(140) == [Release("a", "cluster start timed out")]
    assert holds.expire(141) == []


def test_a_drain_releases_what_is_held_only() -> None:
    holds = held()
    holds.hold("b", "other", 40, now=100)
    holds.start_cluster("other")
    assert holds.drain() == [Release("a", "worker draining")]


def test_one_member_of_an_attempt_on_a_worker() -> None:
    holds = held()
    assert holds.hold("b", "attempt", 40, now=101) is HoldRefusal.SECOND_MEMBER
    assert holds.hold("a", "attempt", 40, now=101) is None
    holds.start_cluster("attempt")
    assert holds.hold("b", "attempt", 40, now=101) is HoldRefusal.SECOND_MEMBER
    holds.ended("a")
    assert holds.hold("b", "attempt", 40, now=101) is None


def test_an_attempt_that_was_aborted_first_is_remembered_for_a_while() -> None:
    holds = Holds()
    assert holds.abort_cluster("attempt", "why", now=0) is None
    assert holds.hold("a", "attempt", 40, now=ATTEMPT_TOMBSTONE_SECS - 1) is HoldRefusal.ATTEMPT_ABORTED
    assert holds.hold("a", "attempt", 40, now=ATTEMPT_TOMBSTONE_SECS) is None


def test_what_is_forgotten_is_gone() -> None:
    holds = held()
    holds.forget("a")
    assert holds.start_cluster("attempt") is None
    assert holds.next_deadline() is None


def test_what_an_earlier_agent_started_counts_as_running() -> None:
    holds = Holds()
    holds.take_up("a", "attempt")
    assert holds.member_of("attempt") == "a"
    assert holds.next_deadline() is None
    assert holds.hold("b", "attempt", 40, now=0) is HoldRefusal.SECOND_MEMBER
    with pytest.raises(IllegalHoldError):
        holds.take_up("c", "attempt")
    assert holds.abort_cluster("attempt", "why", now=0) == Abort("a", "why")


def test_a_held_job_cannot_end() -> None:
    holds = held()
    with pytest.raises(IllegalHoldError):
        holds.ended("a")
    assert holds.is_held("a")


ATTEMPTS = st.sampled_from(["x", "y", "z"])
NAMES = st.sampled_from(["a", "b", "c", "d"])


class HoldsMachine(RuleBasedStateMachine):
    """Whatever comes in whatever order, each assignment gets at most one end, and attempts one member."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds()
        self.now = 0.0
        self.held: dict[str, str] = {}
        self.deadlines: dict[str, float] = {}
        self.running: dict[str, str] = {}

    @rule(name=NAMES, attempt=ATTEMPTS, secs=st.floats(0.1, 100))
    def hold(self, name: str, attempt: str, secs: float) -> None:
        known = name in self.held or name in self.running
        members = {**self.held, **self.running}
        refusal = self.holds.hold(name, attempt, secs, self.now)
        if refusal is None and not known:
            assert attempt not in members.values()
            self.held[name] = attempt
            self.deadlines[name] = self.now + secs

    @rule(attempt=ATTEMPTS)
    def start(self, attempt: str) -> None:
        run = self.holds.start_cluster(attempt)
        expected = [name for name, other in self.held.items() if other == attempt]
        assert [run.assignment_id] == expected if run else not expected
        for name in expected:
            self.running[name] = self.held.pop(name)

    @rule(attempt=ATTEMPTS)
    def abort(self, attempt: str) -> None:
        instruction = self.holds.abort_cluster(attempt, "why", self.now)
        expected = [name for name, other in self.held.items() if other == attempt]
        assert isinstance(instruction, Drop) == bool(expected)
        for name in expected:
            del self.held[name]

    @rule(name=NAMES)
    def end(self, name: str) -> None:
        if name not in self.held:
            self.holds.ended(name)
            self.running.pop(name, None)

    @rule(secs=st.floats(0, 500))
    def wait(self, secs: float) -> None:
        self.now += secs
        for release in self.holds.expire(self.now):
            del self.held[release.assignment_id]
        assert all(self.deadlines[name] > self.now for name in self.held), "a hold always ends"

    @invariant()
    def agrees(self) -> None:
        assert all(self.holds.is_held(name) for name in self.held)
        assert not any(self.holds.is_held(name) for name in self.running)
        assert (self.holds.next_deadline() is None) == (not self.held)


TestHolds = HoldsMachine.TestCase
TestHolds.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
