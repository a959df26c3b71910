"""Assignments that wait for the joint start of their cluster (protocol.md, "Jobs and holds at the worker").

The rules:

- An assignment with `cluster` is held: it has taken its slot and does nothing else. One attempt has
  at most one assignment here; a second is rejected, and so is one of an attempt whose AbortCluster
  came first (remembered for 300 s).
- StartCluster runs the held assignment with the roster. AbortCluster drops a held assignment
  without a report and aborts a running one, which then reports JobFailed Aborted.
- AbortJob, the deadline (`hold_secs` after the arrival, on this worker's monotonic clock) and a
  drain release a held assignment with JobFailed Aborted, each with its own reason. What became of
  the connection makes no difference to the deadline.
- A ResumeAck that does not adopt a held assignment forgets it without a report. One that says that
  its attempt has started leaves it held: StartCluster is sent again.
- What an earlier agent ran is taken up as running; what it held is not.

    state    event          next       instruction
    -        AssignJob      HELD       -
    -        taken up       RUNNING    -
    HELD     StartCluster   RUNNING    Run
    HELD     AbortCluster   gone       Drop
    HELD     AbortJob       gone       Release(reason of the abort)
    HELD     deadline       gone       Release("cluster start timed out")
    HELD     drain          gone       Release("worker draining")
    HELD     forgotten      gone       -
    RUNNING  AbortCluster   RUNNING    Abort
    RUNNING  ended          gone       -
    RUNNING  forgotten      gone       -

An event about an attempt or assignment that is not here is ignored, for the server may be behind; an
event that the table does not allow for a state (a start of what runs, say) is ignored the same way
where it comes from the wire, and raises IllegalHoldError where only a bug of ours can make it.

Everything here is pure: `now` is passed in, and instructions are data.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gradient_worker.timing import ATTEMPT_TOMBSTONE_SECS

__all__ = ["Abort", "Drop", "HoldRefusal", "Holds", "IllegalHoldError", "Instruction", "Release", "Run"]

MAX_TOMBSTONES: Final = 10_000
"""Aborted attempts remembered at most; the oldest go first."""

START_TIMED_OUT: Final = "cluster start timed out"
WORKER_DRAINING: Final = "worker draining"


class IllegalHoldError(RuntimeError):
    """An event that the table does not allow. The state is unchanged."""


class HoldRefusal(enum.StrEnum):
    """Why an assignment cannot be held: the reason of its rejection."""

    SECOND_MEMBER = "a member of this cluster attempt is already on this worker"
    ATTEMPT_ABORTED = "this cluster attempt was aborted"


class _State(enum.Enum):
    HELD = enum.auto()
    RUNNING = enum.auto()


@dataclass(slots=True)
class _Member:
    assignment_id: str
    attempt: str
    deadline: float
    state: _State


@dataclass(frozen=True, slots=True)
class Run:
    """Start the held job."""

    assignment_id: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Give the slot back and forget the job, without a report."""

    assignment_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give the slot back and report JobFailed Aborted with this reason."""

    assignment_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop the running job, which then reports JobFailed Aborted with this reason."""

    assignment_id: str
    reason: str


Instruction = Run | Drop | Release | Abort


class Holds:
    """All members on this worker, held or running."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._by_attempt: dict[str, str] = {}
        self._tombstones: dict[str, float] = {}

    def hold(self, assignment_id: str, attempt: str, hold_secs: float, now: float) -> HoldRefusal | None:
        """Hold an assignment, or say why not. The same one again changes nothing."""
        self._forget_tombstones(now)
        if assignment_id in self._members:
            return None
        if attempt in self._tombstones:
            return HoldRefusal.ATTEMPT_ABORTED
        if attempt in self._by_attempt:
            return HoldRefusal.SECOND_MEMBER
        self._members[assignment_id] = _Member(assignment_id, attempt, now + hold_secs, _State.HELD)
        self._by_attempt[attempt] = assignment_id
        return None

    def take_up(self, assignment_id: str, attempt: str) -> None:
        """An earlier agent started this assignment, and it still runs."""
        if assignment_id in self._members or attempt in self._by_attempt:
            raise IllegalHoldError(f"{assignment_id} is taken up beside a member of {attempt}")
        self._members[assignment_id] = _Member(assignment_id, attempt, math.inf, _State.RUNNING)
        self._by_attempt[attempt] = assignment_id

    def member_of(self, attempt: str) -> str | None:
        """The assignment of this attempt that is here, if one is."""
        return self._by_attempt.get(attempt)

    def is_held(self, assignment_id: str) -> bool:
        """Whether this assignment waits for its start."""
        member = self._members.get(assignment_id)
        return member is not None and member.state is _State.HELD

    def start_cluster(self, attempt: str) -> Run | None:
        """StartCluster. None where there is nothing to start (unknown, or it runs already)."""
        member = self._of_attempt(attempt)
        if member is None or member.state is not _State.HELD:
            return None
        member.state = _State.RUNNING
        return Run(member.assignment_id)

    def abort_cluster(self, attempt: str, reason: str, now: float) -> Drop | Abort | None:
        """AbortCluster, remembered so that an AssignJob behind it is rejected."""
        self._forget_tombstones(now)
        while len(self._tombstones) >= MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        self._tombstones.pop(attempt, None)
        self._tombstones[attempt] = now + ATTEMPT_TOMBSTONE_SECS
        member = self._of_attempt(attempt)
        if member is None:
            return None
        if member.state is _State.RUNNING:
            return Abort(member.assignment_id, reason)
        self._remove(member)
        return Drop(member.assignment_id)

    def abort_job(self, assignment_id: str, reason: str) -> Release | None:
        """AbortJob of a held assignment. None where it is not held: then it is the executor's."""
        member = self._members.get(assignment_id)
        if member is None or member.state is not _State.HELD:
            return None
        self._remove(member)
        return Release(assignment_id, reason)

    def expire(self, now: float) -> list[Release]:
        """Release what no StartCluster came for in time."""
        return self._release_all(START_TIMED_OUT, lambda member: member.deadline <= now)

    def drain(self) -> list[Release]:
        """Release everything held."""
        return self._release_all(WORKER_DRAINING, lambda _member: True)

    def next_deadline(self) -> float | None:
        """When `expire` has work next, on the clock that `now` comes from."""
        held = [member.deadline for member in self._members.values() if member.state is _State.HELD]
        return min(held, default=None)

    def ended(self, assignment_id: str) -> None:
        """A running member made its final report. One that is no member changes nothing."""
        member = self._members.get(assignment_id)
        if member is None:
            return
        if member.state is _State.HELD:
            raise IllegalHoldError(f"{assignment_id} ended but was never started")
        self._remove(member)

    def forget(self, assignment_id: str) -> None:
        """The server dropped the assignment."""
        member = self._members.get(assignment_id)
        if member is not None:
            self._remove(member)

    def _release_all(self, reason: str, chosen: Callable[[_Member], bool]) -> list[Release]:
        released = [m for m in self._members.values() if m.state is _State.HELD and chosen(m)]
        for member in released:
            self._remove(member)
        return [Release(member.assignment_id, reason) for member in released]

    def _of_attempt(self, attempt: str) -> _Member | None:
        assignment_id = self._by_attempt.get(attempt)
        return None if assignment_id is None else self._members[assignment_id]

    def _remove(self, member: _Member) -> None:
        del self._members[member.assignment_id]
        del self._by_attempt[member.attempt]

    def _forget_tombstones(self, now: float) -> None:
        # They expire in the order they were made, so the oldest decides whether to go on.
        while self._tombstones:
            attempt, expires = next(iter(self._tombstones.items()))
            if expires > now:
                return
            del self._tombstones[attempt]
