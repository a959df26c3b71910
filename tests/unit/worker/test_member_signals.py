"""What a member has heard, said and passed: every signal once, in order, whoever asks and dies."""

import pytest
from gradient_protocol.limits import MAX_SIGNAL_PAYLOAD, MAX_SIGNALS
from gradient_protocol.messages.server import ClusterSignal
from gradient_protocol.messages.shapes import MemberAddress, RosterEntry, SignalTarget
from gradient_worker.member_signals import (
    BARRIER_TOPIC,
    MAX_KNOWN_TAKES,
    MemberSignals,
    Receipt,
    Remembered,
    Taken,
    barrier_send_id,
)
from gradient_worker.runner.journal import TAKES_KEPT
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

ROSTER = [
    RosterEntry(role="server", index=0, worker="w0", primary=False),
    RosterEntry(role="client", index=0, worker="w1", primary=True),
    RosterEntry(role="client", index=1, worker="w2", primary=False),
]


def signal(
    n: int, topic: str = "t", role: str = "client", index: int = 0, payload: bytes = b""
) -> ClusterSignal:
    return ClusterSignal(
        attempt="a", n=n, sender=MemberAddress(role=role, index=index), topic=topic, payload=payload
    )


def server_member(remembered: Remembered | None = None) -> MemberSignals:
    return MemberSignals("server", 0, ROSTER, remembered)


def test_a_signal_that_comes_again_is_ignored() -> None:
    member = server_member()
    assert member.receive(signal(3)) is Receipt.KEPT
    assert member.receive(signal(3)) is Receipt.KNOWN
    assert member.receive(signal(2)) is Receipt.KNOWN
    assert member.last_n == 3


def test_recv_chooses_by_topic_and_sender() -> None:
    member = server_member()
    for one in (signal(1, "a"), signal(2, "b", index=1), signal(3, "a", index=1)):
        member.receive(one)
    assert member.offer("x", "b", None) == signal(2, "b", index=1)
    assert member.offer("x", None, SignalTarget(role="client", index=1)) == signal(3, "a", index=1)
    assert member.offer("x", None, SignalTarget(role="client")) == signal(1, "a")
    assert member.offer("x", None, None) is None


def test_a_take_asked_again_is_answered_and_another_is_not() -> None:
    member = server_member()
    member.receive(signal(1))
    assert member.offer("x", None, None) is not None
    assert member.take("y", 1, "other") is Taken.GONE
    assert member.take("x", 1, "id") is Taken.NOW
    assert member.take("z", 1, "id") is Taken.BEFORE
    assert member.take("z", 1, "other") is Taken.GONE


def test_what_the_journal_and_the_agent_know_of_takes_is_bounded_alike() -> None:
    assert MAX_KNOWN_TAKES == TAKES_KEPT


def test_more_than_an_attempt_may_have_is_told() -> None:
    member = server_member()
    for n in range(1, MAX_SIGNALS + 1):
        assert member.receive(signal(n)) is Receipt.KEPT
    assert member.receive(signal(MAX_SIGNALS + 1)) is Receipt.TOO_MANY
    member = server_member()
    big = bytes(MAX_SIGNAL_PAYLOAD)
    receipts = [member.receive(signal(n, payload=big)) for n in range(1, 130)]
    assert receipts == [Receipt.KEPT] * 128 + [Receipt.TOO_MANY]


@pytest.mark.parametrize(
    ("topic", "to", "size", "says"),
    [
        ("gradient.barrier", None, 0, "reserved"),
        ("", None, 0, "a topic has"),
        ("ü" * 128, None, 0, "a topic has"),
        ("t", SignalTarget(role="client", index=2), 0, "no member client:2"),
        ("t", SignalTarget(role="clients"), 0, "no member clients"),
        ("t", None, MAX_SIGNAL_PAYLOAD + 1, "at most 65536 bytes"),
    ],
)
def test_what_cannot_be_sent_is_refused_here(
    topic: str, to: SignalTarget | None, size: int, says: str
) -> None:
    assert says in (server_member().refuse_send(topic, to, bytes(size)) or "")


def test_what_can_be_sent_is_not_refused() -> None:
    assert server_member().refuse_send("t", SignalTarget(role="client"), bytes(MAX_SIGNAL_PAYLOAD)) is None
    full = server_member(Remembered(sends={str(n): n for n in range(MAX_SIGNALS)}))
    assert "at most 10000 signals" in (full.refuse_send("t", None, b"") or "")


def arrive(member: MemberSignals, n: int, index: int, name: str = "b") -> None:
    member.receive(signal(n, BARRIER_TOPIC, index=index, payload=name.encode()))


def test_the_kth_barrier_passes_once_k_came_from_every_other() -> None:
    member = server_member()
    arrive(member, 1, 0)
    arrive(member, 2, 0)
    assert not member.have_all_come("b", 1)
    assert member.missing_at("b", 1) == [MemberAddress(role="client", index=1)]
    arrive(member, 3, 1)
    assert member.have_all_come("b", 1)
    assert not member.have_all_come("b", 2)
    assert not member.have_all_come("other", 1)
    assert member.offer("x", None, None) is None, "a barrier is no signal for recv"


def test_an_abandoned_barrier_is_taken_up_by_the_next_to_enter() -> None:
    member = server_member()
    assert member.enter("x", "b") == 1
    member.note_sent(barrier_send_id("b", 1), 1)
    assert member.enter("y", "b") == 2, "somebody waits for the first"
    member.note_sent(barrier_send_id("b", 2), 2)
    member.leave_barriers("x")
    assert member.enter("z", "b") == 1
    assert member.passed("b", 2)
    assert not member.passed("b", 1)
    member.leave_barriers("y")
    assert member.enter("y", "b") == 3


def test_a_barrier_is_waited_for_by_who_entered_it() -> None:
    member = server_member()
    assert member.wait("x", "b", 1) is not None
    member.enter("x", "b")
    member.note_sent(barrier_send_id("b", 1), 1)
    assert member.wait("y", "b", 1) is not None
    assert member.wait("x", "b", 1) is None


class TakesMachine(RuleBasedStateMachine):
    """Programs and agents die at any moment; each signal reaches exactly one program, in order for each."""

    holders = st.sampled_from(["x", "y", "z"])

    def __init__(self) -> None:
        super().__init__()
        self.member = server_member()
        self.sent: dict[int, ClusterSignal] = {}
        self.offered: dict[str, int] = {}
        self.takes: dict[int, str] = {}

    @rule()
    def receive(self) -> None:
        n = len(self.sent) + 1
        self.sent[n] = signal(n, payload=str(n).encode())
        assert self.member.receive(self.sent[n]) is Receipt.KEPT

    @rule(holder=holders)
    def recv(self, holder: str) -> None:
        self.member.put_back(holder)
        self.offered.pop(holder, None)
        free = [n for n in self.sent if n not in self.takes and n not in self.offered.values()]
        found = self.member.offer(holder, None, None)
        assert (found.n if found else None) == min(free, default=None)
        if found is not None:
            self.offered[holder] = found.n

    @rule(holder=holders, again=st.booleans())
    def take(self, holder: str, again: bool) -> None:
        n = self.offered.pop(holder, None)
        if n is None:
            return
        assert self.member.take(holder, n, f"{holder}{n}") is Taken.NOW
        self.takes[n] = f"{holder}{n}"
        if again:
            assert self.member.take("new", n, f"{holder}{n}") is Taken.BEFORE

    @rule(holder=holders)
    def die(self, holder: str) -> None:
        assert self.member.put_back(holder) == (self.offered.pop(holder, None) is not None)

    @rule()
    def restart_agent(self) -> None:
        untaken = [one for n, one in self.sent.items() if n not in self.takes]
        last_n = len(self.sent) or None
        self.member = server_member(Remembered(signals=untaken, last_n=last_n, takes=self.takes))
        self.offered.clear()

    @invariant()
    def knows_what_came(self) -> None:
        assert self.member.last_n == (len(self.sent) or None)


TestTakes = TakesMachine.TestCase
TestTakes.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
