"""Started members and what they are owed: StartCluster first, then every signal meant for them, in the
attempt's one order and without a gap (protocol.md, Signals).

A signal waits in its row until the member's session has room. A session's own position is what the
worker said at its resume, and what was sent since.
"""

from collections.abc import Callable, Sequence
from typing import Final

import structlog
import trio
from gradient_protocol.messages.server import AbortCluster, ClusterSignal, StartCluster
from gradient_protocol.messages.shapes import MemberAddress

from gradient_server.cluster import events as e
from gradient_server.cluster.attempts import Attempt, SeatRecord
from gradient_server.cluster.executor import Executor
from gradient_server.cluster.states import AttemptState, Seat
from gradient_server.cluster.store import ClusterStore
from gradient_server.db.queries.signals import StoredSignal
from gradient_server.domain.events import Event, SignalDropped, SignalStored
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scheduler.signal import Signal
from gradient_server.scheduler.worker import Worker

__all__ = ["AdoptedMember", "MemberSessions"]

log = structlog.get_logger(__name__)

# (assignment, attempt, is it held, the last signal that the worker has)
AdoptedMember = tuple[str, str, bool, int]

_ROOM_SECS: Final = 0.05  # between two looks at a session without room
_SIGNALS_AT_ONCE: Final = 64
_STARTED: Final = (AttemptState.RUNNING, AttemptState.SETTLING)


class MemberSessions:
    """Tells members; one task forwards."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        store: ClusterStore,
        executor: Executor,
        is_connected: Callable[[str], bool],
    ) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._store = store
        self._executor = executor
        self._is_connected = is_connected
        self._attempts = executor.attempts
        self._behind: dict[str, None] = {}
        self._wanted = Signal()
        self.signals_forwarded = 0
        self.signals_dropped = 0

    # Sessions

    def resumed(self, worker_id: str, adopted: list[AdoptedMember], lost: list[str]) -> None:
        """After a worker's ResumeAck.

        A held member of a started attempt gets its StartCluster again, one of an attempt that is over its
        AbortCluster. A survivor was dropped, which ends it; `lost` are members that the worker has not.
        """
        for assignment_id, attempt_id, held, signal_n in adopted:
            attempt = self._attempts.of_assignment(assignment_id)
            if attempt is None or not attempt.machine.is_open:
                self._scheduler.free_seat(assignment_id, unsent=False)
                self._executor.send(worker_id, AbortCluster(attempt=attempt_id, reason="the attempt is over"))
                continue
            seat = attempt.seats[assignment_id]
            seat.owes_start = held
            seat.signal_n = signal_n
            seat.is_present = True
            if attempt.machine.state in _STARTED:
                self._catch_up(attempt)
        for assignment_id in lost:
            self._executor.member_event(e.MemberLost(assignment_id, "its worker came back without it"))
        for attempt, seat in self._attempts.at_worker(worker_id):
            if attempt.machine.seats[seat.assignment_id] is Seat.STOPPING:
                self._executor.feed(attempt, e.MemberLost(seat.assignment_id, "dropped at the resume"))

    def start(self, attempt: Attempt, seat: SeatRecord) -> None:
        """The start is committed: the member is told, now or once its worker is back."""
        seat.owes_start = True
        seat.is_present = self._is_connected(seat.worker_id)
        self._tell(attempt, seat)

    def _catch_up(self, attempt: Attempt) -> None:
        # After a restart of the server the roster's addresses come with the workers. Until all are
        # there a held member waits, and its hold ends by itself.
        roster_known = all(
            seat.endpoint is not None or self._is_connected(seat.worker_id) for seat in attempt.seats.values()
        )
        for seat in attempt.seats.values():
            if seat.is_present and not seat.is_listening and (roster_known or not seat.owes_start):
                self._tell(attempt, seat)

    def _tell(self, attempt: Attempt, seat: SeatRecord) -> None:
        if not seat.is_present:
            return
        if seat.owes_start:
            seat.owes_start = False
            self._executor.send(seat.worker_id, StartCluster(attempt=attempt.id, roster=attempt.roster()))
        seat.is_listening = True
        self._forward_soon(attempt.id)

    def left(self, seat: SeatRecord) -> None:
        """The member's session ended."""
        seat.is_present = seat.is_listening = False

    # Signals

    def on_event(self, event: Event) -> None:
        """A signal is stored, or dropped."""
        if isinstance(event, SignalDropped):
            self.signals_dropped += 1
            log.info("a signal was dropped", attempt=event.attempt_id, reason=event.reason)
        elif isinstance(event, SignalStored) and self._attempts.get(event.attempt_id) is not None:
            self._forward_soon(event.attempt_id)

    def _forward_soon(self, attempt_id: str) -> None:
        self._behind[attempt_id] = None
        self._wanted.set()

    async def run(self) -> None:
        """Forwards, for ever."""
        while True:
            await self.forward()
            if self._behind:
                await trio.sleep(_ROOM_SECS)
            else:
                await self._wanted.wait()

    async def forward(self) -> None:
        """Forwards what is stored to every member that listens. Attempts without room stay behind."""
        behind = list(self._behind)
        self._behind.clear()
        for attempt_id in behind:
            attempt = self._attempts.get(attempt_id)
            if attempt is None:
                continue
            for seat in attempt.seats.values():
                if seat.is_listening and not await self._forward_to(attempt, seat):
                    self._behind[attempt_id] = None

    async def _forward_to(self, attempt: Attempt, seat: SeatRecord) -> bool:
        """True if the member has everything now."""
        while (worker := self._listener(attempt, seat)) is not None:
            if not worker.outbox.control_has_room:
                return False
            before, member = seat.signal_n, seat.member
            found = await self._store.signals_after(
                attempt.id, before, member.role, member.index, limit=_SIGNALS_AT_ONCE
            )
            # The session may be another one now, with a position of its own.
            if self._listener(attempt, seat) is worker and seat.signal_n == before:
                self._send(attempt, seat, worker, found)
                if len(found) < _SIGNALS_AT_ONCE and (not found or seat.signal_n == found[-1].n):
                    return True
        return True

    def _listener(self, attempt: Attempt, seat: SeatRecord) -> Worker | None:
        """The worker whose session is to hear the attempt's signals; None for none."""
        if not seat.is_listening or not attempt.machine.is_open:
            return None
        return self._pool.workers.get(seat.worker_id)

    def _send(
        self, attempt: Attempt, seat: SeatRecord, worker: Worker, signals: Sequence[StoredSignal]
    ) -> None:
        for stored in signals:
            if not worker.outbox.control_has_room:
                return
            sender = MemberAddress(role=stored.sender_role, index=stored.sender_index)
            worker.outbox.send(
                ClusterSignal(
                    attempt=attempt.id,
                    n=stored.n,
                    sender=sender,
                    topic=stored.topic,
                    payload=stored.payload,
                )
            )
            seat.signal_n = stored.n
            self.signals_forwarded += 1
