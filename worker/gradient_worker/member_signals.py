"""What one running member has heard, said and passed (protocol.md, "Signals").

The rules:

- A signal that comes again is ignored: `n` only grows. What comes is kept until a local `recv` has
  taken it, in the order of `n`.
- A `recv` is answered in two steps, so that neither the death of a program nor that of the agent loses
  a signal or gives it twice: a signal is offered to one connection (`offer`), and is taken once the
  program says so (`take`). A connection that ends puts back what it was offered. A take is known by
  its id, so that one asked again after a restart of the agent is answered and not repeated.
- A local `send` has an id; asked again it is the same report. It has failed if the acknowledgement
  says so.
- A barrier is entered with one signal to all under the topic `gradient.barrier`, its name as payload.
  The k-th barrier of a name is passed once k of them have come from every other member of the roster
  and the server has this member's own. One that was entered, but that nobody waits for any more (its
  program timed out or died), is taken up by the next to enter the name; it is no further barrier.

Everything here is pure; the socket is in `cluster_socket`, the journal in `journal_keeper`.
"""

import enum
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gradient_protocol.limits import MAX_SIGNAL_BYTES, MAX_SIGNAL_PAYLOAD, MAX_SIGNALS
from gradient_protocol.messages.server import ClusterSignal
from gradient_protocol.messages.shapes import MemberAddress, RosterEntry, SignalTarget

__all__ = ["BARRIER_TOPIC", "MemberSignals", "Receipt", "Remembered", "Taken", "barrier_send_id"]

RESERVED_PREFIX: Final = "gradient."
BARRIER_TOPIC: Final = "gradient.barrier"
MAX_NAME_BYTES: Final = 255
"""Of a topic and of a barrier's name."""

MAX_KNOWN_TAKES: Final = 1024
"""Takes that a program may still ask about; there are far fewer connections."""


class Receipt(enum.Enum):
    """What became of a signal from the server."""

    KEPT = "kept"
    KNOWN = "came before"
    TOO_MANY = "more than an attempt may have"


class Taken(enum.Enum):
    """The answer to a take."""

    NOW = "taken"
    BEFORE = "taken by this very request"
    GONE = "not here, or another's"


@dataclass(frozen=True, slots=True)
class Remembered:
    """What an earlier agent knew. `sends`: seq by send id; `refused`: reasons by seq."""

    signals: Sequence[ClusterSignal] = ()
    last_n: int | None = None
    sends: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)
    takes: Mapping[int, str] = field(default_factory=dict)
    barriers: Mapping[str, int] = field(default_factory=dict)


def barrier_send_id(name: str, k: int) -> str:
    """The send id of the k-th barrier of a name, which makes it one report whatever happens."""
    return f"barrier {k} {name}"


class MemberSignals:
    """The conversation of the member `role`, `index`. `remembered`: from an earlier agent."""

    def __init__(
        self, role: str, index: int, roster: Sequence[RosterEntry], remembered: Remembered | None = None
    ) -> None:
        known = remembered or Remembered()
        self.role, self.index = role, index
        self.roster = tuple(roster)
        self._others = [(m.role, m.index) for m in roster if (m.role, m.index) != (role, index)]
        self._inbox: dict[int, ClusterSignal] = {}
        self._inbox_bytes = 0
        self._offered: dict[int, Hashable] = {}
        self._takes: dict[int, str] = dict(known.takes)
        self._sends: dict[str, int] = dict(known.sends)
        self._refused: dict[int, str] = dict(known.refused)
        self._arrived: dict[str, Counter[tuple[str, int]]] = {}
        self._barriers_bytes = self._barriers = 0
        self._passed: dict[str, int] = dict(known.barriers)
        self._waits: dict[tuple[str, int], Hashable] = {}
        self.last_n: int | None = None
        for signal in sorted(known.signals, key=lambda one: one.n):
            self.receive(signal)
        self.last_n = known.last_n

    # From the server

    def receive(self, signal: ClusterSignal) -> Receipt:
        """Keep a signal. Bounded by what an attempt may have in all."""
        if self.last_n is not None and signal.n <= self.last_n:
            return Receipt.KNOWN
        count = len(self._inbox) + self._barriers
        size = self._inbox_bytes + self._barriers_bytes + len(signal.payload)
        if count >= MAX_SIGNALS or size > MAX_SIGNAL_BYTES:
            return Receipt.TOO_MANY
        self.last_n = signal.n
        if signal.topic == BARRIER_TOPIC:
            name = signal.payload.decode(errors="replace")
            sender = (signal.sender.role, signal.sender.index)
            self._arrived.setdefault(name, Counter())[sender] += 1
            self._barriers += 1
            self._barriers_bytes += len(signal.payload)
        else:
            self._inbox[signal.n] = signal
            self._inbox_bytes += len(signal.payload)
        return Receipt.KEPT

    # recv

    def refuse_recv(self, topic: str | None, sender: SignalTarget | None) -> str | None:
        """Why a `recv` could never be answered; None where it could."""
        if topic is not None and (problem := _bad_topic(topic)) is not None:
            return problem
        return None if sender is None else self._unknown(sender)

    def offer(self, holder: Hashable, topic: str | None, sender: SignalTarget | None) -> ClusterSignal | None:
        """The next signal that nobody has taken or is being offered; now it is offered to `holder`."""
        for n, signal in self._inbox.items():
            if n not in self._offered and _matches(signal, topic, sender):
                self._offered[n] = holder
                return signal
        return None

    def take(self, holder: Hashable, n: int, take_id: str) -> Taken:
        """The program has the signal `n`. NOW: to be journalled before it is answered."""
        if self._takes.get(n) == take_id:
            return Taken.BEFORE
        if n not in self._inbox or self._offered.get(n, holder) is not holder:
            return Taken.GONE
        self._inbox_bytes -= len(self._inbox.pop(n).payload)
        self._offered.pop(n, None)
        self._takes[n] = take_id
        while len(self._takes) > MAX_KNOWN_TAKES:
            del self._takes[next(iter(self._takes))]
        return Taken.NOW

    def put_back(self, holder: Hashable) -> bool:
        """The connection ended or asks for something else. True where it left what it was offered."""
        offered = [n for n, other in self._offered.items() if other is holder]
        for n in offered:
            del self._offered[n]
        return bool(offered)

    # send

    def refuse_send(self, topic: str, to: SignalTarget | None, payload: bytes) -> str | None:
        """Why a `send` is refused before it becomes a report; None where it is not."""
        if (problem := _bad_topic(topic)) is not None:
            return problem
        if to is not None and (problem := self._unknown(to)) is not None:
            return problem
        if len(payload) > MAX_SIGNAL_PAYLOAD:
            return f"a payload has at most {MAX_SIGNAL_PAYLOAD} bytes, not {len(payload)}"
        return self._refuse_another()

    def sent(self, send_id: str) -> int | None:
        """The seq of the report that this `send` became; None where it is new."""
        return self._sends.get(send_id)

    def note_sent(self, send_id: str, seq: int) -> None:
        """The `send` became a report, which is journalled."""
        self._sends[send_id] = seq

    def note_refused(self, seq: int, reason: str) -> bool:
        """The server refused the signal `seq`. False where it is no signal of this member."""
        if seq not in self._sends.values():
            return False
        self._refused[seq] = reason
        return True

    def refusal(self, seq: int) -> str | None:
        """Why the server refused the signal `seq`, if it did."""
        return self._refused.get(seq)

    # barrier

    def refuse_barrier(self, name: str) -> str | None:
        """Why a barrier cannot have this name; None where it can."""
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            return f"the name of a barrier has 1 to {MAX_NAME_BYTES} bytes"
        return self._refuse_another()

    def enter(self, holder: Hashable, name: str) -> int:
        """Which barrier of this name `holder` waits for from here on: an abandoned one, else the next.

        It has to be sent unless `sent(barrier_send_id(name, k))` says that it was.
        """
        k = self._passed.get(name, 0) + 1
        while (name, k) in self._waits:
            k += 1
        self._waits[name, k] = holder
        return k

    def wait(self, holder: Hashable, name: str, k: int) -> str | None:
        """`holder` waits for the k-th barrier of a name. Returns why it cannot, None where it can."""
        if self.sent(barrier_send_id(name, k)) is None:
            return f"barrier {name} was not entered {k} times"
        if self._waits.get((name, k), holder) is not holder:
            return f"barrier {k} of {name} is waited for already"
        self._waits[name, k] = holder
        return None

    def leave_barriers(self, holder: Hashable) -> None:
        """The connection waits for no barrier any more."""
        for barrier in [one for one, other in self._waits.items() if other is holder]:
            del self._waits[barrier]

    def have_all_come(self, name: str, k: int) -> bool:
        """Whether every other member has entered the k-th barrier of this name."""
        arrived = self._arrived.get(name, Counter())
        return all(arrived[other] >= k for other in self._others)

    def missing_at(self, name: str, k: int) -> list[MemberAddress]:
        """The members that have not entered the k-th barrier of this name."""
        arrived = self._arrived.get(name, Counter())
        return [MemberAddress(role=role, index=i) for role, i in self._others if arrived[role, i] < k]

    def passed(self, name: str, k: int) -> bool:
        """The program is about to be told. True where that is news, to be journalled."""
        if self._passed.get(name, 0) >= k:
            return False
        self._passed[name] = k
        return True

    def _refuse_another(self) -> str | None:
        if len(self._sends) >= MAX_SIGNALS:
            return f"an attempt has at most {MAX_SIGNALS} signals"
        return None

    def _unknown(self, target: SignalTarget) -> str | None:
        for member in self.roster:
            if member.role == target.role and target.index in {None, member.index}:
                return None
        name = target.role if target.index is None else f"{target.role}:{target.index}"
        return f"the roster has no member {name}"


def _matches(signal: ClusterSignal, topic: str | None, sender: SignalTarget | None) -> bool:
    if topic is not None and signal.topic != topic:
        return False
    if sender is None:
        return True
    return signal.sender.role == sender.role and sender.index in {None, signal.sender.index}


def _bad_topic(topic: str) -> str | None:
    if not 0 < len(topic.encode()) <= MAX_NAME_BYTES:
        return f"a topic has 1 to {MAX_NAME_BYTES} bytes"
    if topic.startswith(RESERVED_PREFIX):
        return f"topics that begin with {RESERVED_PREFIX} are reserved"
    return None
