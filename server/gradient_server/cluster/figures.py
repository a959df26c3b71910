"""What clusters do at this moment, in numbers, for `/metrics`, `/board` and `gradient status`."""

from collections import Counter
from dataclasses import dataclass

from gradient_server.cluster.attempts import Attempts
from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.reservation import ReservationDesk
from gradient_server.cluster.states import AttemptState

__all__ = ["ClusterFigures", "take_figures"]

MEMBERS = "members"
BACKOFF = "backoff"
SEATS = "seats"


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """`waiting` by what they wait for, `attempts` by state; all states are there, with 0.

    Counted since the start of the process: `started`, `prepares_failed`, `signals_forwarded`,
    `signals_dropped`. `reserved_secs`: how long the reservation is held; None where none is, and
    `seats_reserved` is how many seats it has.
    """

    waiting: dict[str, int]
    attempts: dict[str, int]
    started: int
    prepares_failed: int
    signals_forwarded: int
    signals_dropped: int
    reserved_secs: float | None
    seats_reserved: int


def take_figures(
    book: ClusterBook,
    attempts: Attempts,
    desk: ReservationDesk,
    now: float,
    *,
    started: int,
    prepares_failed: int,
    signals_forwarded: int,
    signals_dropped: int,
) -> ClusterFigures:
    """`now` on the monotonic clock."""
    waiting = dict.fromkeys((MEMBERS, BACKOFF, SEATS), 0)
    for entry in book.clusters.values():
        if entry.attempt_id is None:
            what = MEMBERS if not entry.is_complete else BACKOFF if entry.startable_at > now else SEATS
            waiting[what] += 1
    states = Counter(attempt.machine.state for attempt in attempts)
    held = desk.held
    return ClusterFigures(
        waiting=waiting,
        attempts={str(state): states[state] for state in AttemptState if state is not AttemptState.OVER},
        started=started,
        prepares_failed=prepares_failed,
        signals_forwarded=signals_forwarded,
        signals_dropped=signals_dropped,
        reserved_secs=None if held is None else now - held.reserved_at,
        seats_reserved=0 if held is None else len(held.seats),
    )
