"""What the agent writes into its journal, and reads from it after a restart.

The journal must outlive the agent, not the host (design.md, "The build runner"). A full disk costs
what an agent that dies now would need, and no running job: it is logged, and the jobs go on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
from gradient_protocol.codec import Decoder, Side, encode
from gradient_protocol.errors import ProtocolError
from gradient_protocol.kinds import ResumeState
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import AssignJob, ClusterSignal, StartCluster

from gradient_worker.member_signals import Remembered
from gradient_worker.runner.journal import Journal, JournaledAssignment, JournalFull

__all__ = ["JournalKeeper", "Recovered"]

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """An assignment that an earlier agent left.

    `pending`: reports that were never acknowledged. `start` and `remembered`: of a member that has started.
    """

    assign: AssignJob
    state: ResumeState
    acknowledged: int
    last_seq: int
    pending: tuple[tuple[int, Message], ...]
    log_offset: int
    start: StartCluster | None
    remembered: Remembered

    @property
    def built(self) -> bool:
        """Whether its BuildOutput, or its end, was reported: something that is no signal."""
        return self.last_seq > len(set(self.remembered.sends.values()))


class JournalKeeper:
    """The journal in the agent's words. No call raises for a full disk."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def accepted(self, assign: AssignJob) -> None:
        """An assignment is this worker's."""
        data, held = encode(assign), assign.cluster is not None
        self._write(
            lambda: self._journal.record_assignment(assign.assignment_id, assign.job_id, data, held=held)
        )

    def started(self, assignment_id: str, start: StartCluster) -> None:
        """A held job runs."""
        data = encode(start)
        self._write(lambda: self._journal.record_started(assignment_id, data))

    def left(self, assignment_id: str) -> None:
        """This agent hands the assignment over."""
        self._write(lambda: self._journal.record_left(assignment_id))

    def taken_up(self, assignment_id: str) -> int:
        """This agent takes over what it found. Returns how many that had it died."""
        self._write(lambda: self._journal.record_taken_up(assignment_id))
        known = self._journal.assignments.get(assignment_id)
        return 0 if known is None else known.agents_died

    def report(self, assignment_id: str, seq: int, message: Message, send_id: str | None = None) -> None:
        """Keep a report until it is acknowledged; one under the same `seq` replaces it."""
        data = encode(message)
        self._write(lambda: self._journal.record_report(assignment_id, seq, data, send_id))

    def acknowledged(self, assignment_id: str, seq: int) -> None:
        """Everything up to `seq` is committed at the server."""
        self._write(lambda: self._journal.record_acknowledged(assignment_id, seq))

    def signal_refused(self, assignment_id: str, seq: int, reason: str) -> None:
        """The server refused a signal: kept before its acknowledgement is, for the `send` that waits."""
        self._write(lambda: self._journal.record_refused(assignment_id, seq, reason))

    def signal_received(self, assignment_id: str, signal: ClusterSignal) -> None:
        """A signal came for a member."""
        data = encode(signal)
        self._write(lambda: self._journal.record_signal_received(assignment_id, signal.n, data))

    def signal_taken(self, assignment_id: str, n: int, take_id: str) -> None:
        """A local `recv` has it."""
        self._write(lambda: self._journal.record_signal_taken(assignment_id, n, take_id))

    def barrier_passed(self, assignment_id: str, name: str, k: int) -> None:
        """The k-th barrier of this name was passed."""
        self._write(lambda: self._journal.record_barrier_passed(assignment_id, name, k))

    def log_offset(self, assignment_id: str, offset: int) -> None:
        """The server holds the log up to here."""
        self._write(lambda: self._journal.record_log_offset(assignment_id, offset))

    def forget(self, assignment_id: str) -> None:
        """The server has everything of it, or wants nothing of it."""
        self._write(lambda: self._journal.forget(assignment_id))

    def recover(self) -> list[Recovered]:
        """What an earlier agent left; what cannot be read is forgotten with a log line."""
        found = []
        for assignment_id, kept in list(self._journal.assignments.items()):
            try:
                found.append(_recovered(kept))
            except (ProtocolError, ValueError) as error:
                logger.error("a journalled assignment is lost", assignment_id=assignment_id, error=str(error))
                self.forget(assignment_id)
        return found

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except JournalFull as error:
            logger.error("the journal cannot be written; a restart now would lose jobs", error=str(error))


def _recovered(kept: JournaledAssignment) -> Recovered:
    assign = _of(AssignJob, kept.assign_job)
    worker = Decoder(Side.WORKER)
    start = None if kept.start_cluster is None else _of(StartCluster, kept.start_cluster)
    return Recovered(
        assign=assign,
        state=kept.state,
        acknowledged=kept.acknowledged_seq,
        last_seq=kept.last_seq,
        pending=tuple((seq, worker.decode(data)) for seq, data in sorted(kept.reports.items())),
        log_offset=kept.log_offset,
        start=start,
        remembered=Remembered(
            signals=tuple(_of(ClusterSignal, data) for data in kept.signals.values()),
            last_n=kept.signal_n,
            sends=kept.send_ids,
            refused=kept.refused,
            takes=kept.takes,
            barriers=kept.barriers,
        ),
    )


M = TypeVar("M", bound=Message)


def _of(kind: type[M], data: bytes) -> M:
    message = Decoder(Side.SERVER).decode(data)
    if not isinstance(message, kind):
        raise ValueError(f"{type(message).__name__} where {kind.__name__} was due")
    return message
