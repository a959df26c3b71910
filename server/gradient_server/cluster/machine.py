"""One attempt: events in, instructions out (the rules and the tables are in states.py).

An event that the tables do not allow raises, with the story of what came before, and changes
nothing. What comes from a worker may always come late, and then does nothing.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from gradient_server.cluster import events as e
from gradient_server.cluster import instructions as i
from gradient_server.cluster.states import (
    ATTEMPT_MOVES,
    GROUP_MOVES,
    LATE_RESULTS,
    MEMBER_MOVES,
    AttemptState,
    Seat,
    Trigger,
)
from gradient_server.cluster.verdict import Verdict

__all__ = ["AttemptMachine", "IllegalEventError"]

_STORY_LENGTH: Final = 64
_MEMBER_EVENTS: Final = (e.Accepted, e.Rejected, e.ReportStored, e.Disconnected, e.MemberLost)
_MAY_BE_LATE: Final = (
    e.StartCommitted,
    e.StartLost,
    e.PrepareClosed,
    e.Settled,
    e.Undecided,
    e.ClosedElsewhere,
)
_TO_WEIGH: Final = frozenset({Seat.REPORTED, Seat.LOST})
# Members that know of the attempt and have not ended in it: they are told of its end.
_TO_BE_TOLD: Final = frozenset({Seat.SENT, Seat.HELD, Seat.STARTING, Seat.RUNNING, Seat.SPOILED})


class IllegalEventError(Exception):
    """The tables do not allow the event: a bug of whoever fed it."""


class AttemptMachine:
    """The state of one attempt. `members` are assignment ids, in the order of the cluster."""

    def __init__(self, attempt_id: str, members: Iterable[str]) -> None:
        self.attempt_id = attempt_id
        self.state = AttemptState.CLAIMING
        self.seats: dict[str, Seat] = dict.fromkeys(members, Seat.SEATED)
        self.started = False
        self.verdict: Verdict | None = None
        self.reason = ""
        self._told = False
        self._survivors = False
        self._losses: dict[str, str] = {}
        self._weighed: frozenset[tuple[str, Seat]] = frozenset()
        self._ending = i.Ending.FINAL
        self._story: deque[str] = deque(maxlen=_STORY_LENGTH)

    @classmethod
    def recovered(
        cls, attempt_id: str, seats: Mapping[str, Seat]
    ) -> tuple["AttemptMachine", list[i.Instruction]]:
        """A started attempt as the database has it: members are Running or Reported."""
        machine = cls(attempt_id, seats)
        machine.seats = dict(seats)
        machine.state = AttemptState.RUNNING
        machine.started = machine._told = True
        out: list[i.Instruction] = []
        machine._follow(out)
        return machine, out

    @classmethod
    def stopping(
        cls, attempt_id: str, seats: Mapping[str, Seat]
    ) -> tuple["AttemptMachine", list[i.Instruction]]:
        """An attempt that was closed to be repeated, as the database has it: Stopping or Ended members.

        Whoever has them is told at its resume, which drops what is closed.
        """
        machine = cls(attempt_id, seats)
        machine.seats = dict(seats)
        machine.state = AttemptState.ENDING
        machine.started = machine._told = True
        machine.verdict, machine._ending = Verdict.RETRY, i.Ending.RETRY
        machine.reason = f"the attempt was decided: {Verdict.RETRY}"
        machine._survivors = True
        out: list[i.Instruction] = [i.StartTimer(i.Timer.SURVIVORS)]
        machine._follow(out)
        return machine, out

    def begin(self) -> list[i.Instruction]:
        """The first instruction of a new attempt."""
        return [i.PersistClaim()]

    @property
    def is_open(self) -> bool:
        """Whether nothing has closed the attempt yet."""
        return self.state not in LATE_RESULTS

    def handle(self, event: e.Event) -> list[i.Instruction]:
        """Takes one event; what is to be done about it, in this order."""
        if isinstance(event, _MEMBER_EVENTS):
            return self._member_event(event)
        if self.state in LATE_RESULTS and isinstance(event, _MAY_BE_LATE):
            self._tell(event, "late")
            return []
        after = ATTEMPT_MOVES[self.state].get(type(event))
        if after is None:
            raise IllegalEventError(f"{event} in {self.state} of {self.attempt_id}: {'; '.join(self._story)}")
        self._tell(event, after)
        out: list[i.Instruction] = []
        self._note(event)
        self._move(after, out)
        self._follow(out)
        return out

    def _member_event(self, event: e.MemberEvent) -> list[i.Instruction]:
        seat = self.seats.get(event.assignment_id)
        if seat is None:
            raise IllegalEventError(f"{event} is of no member of {self.attempt_id}")
        after = MEMBER_MOVES[seat].get(type(event))
        if after is None:
            self._tell(event, "late")
            return []
        self._tell(event, after)
        self.seats[event.assignment_id] = after
        if isinstance(event, e.MemberLost):
            self._losses[event.assignment_id] = event.reason
        if after is Seat.SPOILED and not self.reason:
            self.reason = _why_spoiled(event)
        out: list[i.Instruction] = []
        self._follow(out)
        return out

    def _note(self, event: e.Event) -> None:
        """What an event says beside its move."""
        if isinstance(event, e.PrepareTimedOut):
            self.reason = self.reason or "not every member was accepted in time"
        elif isinstance(event, e.StartLost):
            self.reason = self.reason or "the start was not committed"
        elif isinstance(event, e.ClosedElsewhere):
            self.reason = event.reason
            self._ending = i.Ending.FINAL
        elif isinstance(event, e.PrepareClosed):
            self._ending = i.Ending.PREPARE_FAILED
        elif isinstance(event, e.Settled):
            self.verdict = event.verdict
            self.reason = f"the attempt was decided: {event.verdict}"
            self._ending = i.Ending.RETRY if event.verdict is Verdict.RETRY else i.Ending.FINAL
        elif isinstance(event, e.ClaimLost) and self.state is AttemptState.CLAIMING:
            self.reason = "the claim was lost"
            self._ending = i.Ending.CLAIM_LOST

    def _follow(self, out: list[i.Instruction]) -> None:
        """Moves on for as long as what the members are together moves the attempt."""
        while (trigger := self._trigger()) is not None:
            after = ATTEMPT_MOVES[self.state][trigger]
            self._story.append(f"{trigger} -> {after}")
            self._move(after, out)

    def _trigger(self) -> Trigger | None:
        seats = self.seats.values()
        if self.state is AttemptState.PREPARING:
            if Seat.SPOILED in seats:
                return Trigger.ONE_SPOILED
            return Trigger.ALL_HELD if all(seat is Seat.HELD for seat in seats) else None
        if self.state is AttemptState.RUNNING:
            to_weigh = self._to_weigh()
            return Trigger.TO_WEIGH if to_weigh != self._weighed else None
        if self.state is AttemptState.ENDING and all(seat is Seat.ENDED for seat in seats):
            return Trigger.ALL_ENDED
        return None

    def _to_weigh(self) -> frozenset[tuple[str, Seat]]:
        return frozenset((member, seat) for member, seat in self.seats.items() if seat in _TO_WEIGH)

    def _move(self, after: AttemptState, out: list[i.Instruction]) -> None:
        before, self.state = self.state, after
        known = dict(self.seats)
        moves = GROUP_MOVES.get((before, after), {})
        self.seats = {member: moves.get(seat, seat) for member, seat in known.items()}
        if after is not before:
            self._instruct(before, known, out)

    def _instruct(self, before: AttemptState, known: dict[str, Seat], out: list[i.Instruction]) -> None:
        state = self.state
        if before is AttemptState.PREPARING:
            out.append(i.StopTimer())
        if state is AttemptState.PREPARING:
            self._prepare(known, out)
        elif state is AttemptState.STARTING:
            out.append(i.PersistStart())
        elif state is AttemptState.FAILING:
            out.append(i.PersistPrepareFailed(self.reason))
        elif state is AttemptState.RUNNING and before is AttemptState.STARTING:
            self.started = True
            out += [i.SendStart(member) for member, seat in self.seats.items() if seat is Seat.RUNNING]
        elif state is AttemptState.SETTLING:
            self._weighed = self._to_weigh()
            lost = [member for member, seat in self.seats.items() if seat is Seat.LOST]
            out.append(i.PersistVerdict(tuple((member, self._losses[member]) for member in lost)))
        elif state is AttemptState.ENDING:
            self._close(known, out)
        elif state is AttemptState.OVER:
            self._finish(before, out)

    def _prepare(self, known: dict[str, Seat], out: list[i.Instruction]) -> None:
        # Where one fell out while the claim was written, nobody is told at all.
        if Seat.SPOILED in known.values():
            return
        self._told = True
        out += [i.SendAssign(member) for member in known]
        out.append(i.StartTimer(i.Timer.PREPARE))

    def _close(self, known: dict[str, Seat], out: list[i.Instruction]) -> None:
        """Tells every member that may hold or run it, at once; a reply is not waited for by any seat."""
        if self._told:
            out += [i.SendAbort(member, self.reason) for member, seat in known.items() if seat in _TO_BE_TOLD]
        out += [i.Release(member, unsent=not self._told) for member in known]
        self._survivors = Seat.STOPPING in self.seats.values()
        if self._survivors:
            out.append(i.StartTimer(i.Timer.SURVIVORS))

    def _finish(self, before: AttemptState, out: list[i.Instruction]) -> None:
        if before is AttemptState.ENDING:
            out.append(i.StopTimer())
        else:
            out += [i.Release(member, unsent=True) for member in self.seats]
        if self._survivors and self._ending is i.Ending.RETRY:
            out.append(i.PersistSurvivorsEnded())
        out.append(i.Finish(self._ending, self.reason))

    def _tell(self, event: e.Event, outcome: str) -> None:
        self._story.append(f"{event} -> {outcome}")


def _why_spoiled(event: e.MemberEvent) -> str:
    if isinstance(event, e.Disconnected):
        return "a member's worker lost its connection"
    if isinstance(event, e.Accepted):
        raise ValueError("an acceptance spoils nothing")
    return event.reason
