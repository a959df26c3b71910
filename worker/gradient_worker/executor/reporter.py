"""The numbered reports of one assignment (protocol.md, "Reports that must not be lost").

Reports count from 1, are journalled before they are sent, and are kept until they are acknowledged.
At most eight are sent and unacknowledged. A session that resumes sends again all after the `seq` it
names. A final report goes out once the log is: see `log_first`.

A report whose content the server refused is not sent again: it and all that follow are discarded,
and JobFailed Permanent takes its number.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import trio
from gradient_protocol.limits import MAX_UNACKNOWLEDGED_REPORTS
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.shapes import JobUpdateKind
from gradient_protocol.messages.worker import JobCompleted, JobFailed, JobUpdate
from gradient_protocol.text import made_legible

__all__ = ["FINAL_REPORTS", "ReportJournal", "Reporter"]

FINAL_REPORTS: Final = (JobCompleted, JobFailed)

FinalReport = JobCompleted | JobFailed


class ReportJournal(Protocol):
    """Where reports outlive the agent. Neither call raises for a full disk."""

    def report(self, assignment_id: str, seq: int, message: Message, send_id: str | None = None) -> None:
        """Keep a report until it is acknowledged; one under the same `seq` replaces it.

        `send_id`: of the local `send` that became it, kept as long as the assignment is.
        """

    def acknowledged(self, assignment_id: str, seq: int) -> None:
        """Everything up to `seq` is committed at the server."""


class Reporter:
    """Makes, keeps and hands out the reports of one assignment. `changed` is called for each new one."""

    def __init__(
        self,
        assignment_id: str,
        journal: ReportJournal,
        changed: Callable[[], None],
        *,
        acknowledged: int = 0,
        pending: tuple[tuple[int, Message], ...] = (),
    ) -> None:
        self._assignment_id = assignment_id
        self._journal = journal
        self._changed = changed
        self._pending: deque[tuple[int, Message]] = deque(pending)
        self._acknowledged = acknowledged
        self._sent = acknowledged
        self._room = trio.Event()
        self._final_seq = next((seq for seq, m in pending if isinstance(m, FINAL_REPORTS)), None)

    @property
    def acknowledged(self) -> int:
        """The last `seq` that the server acknowledged."""
        return self._acknowledged

    @property
    def finished(self) -> bool:
        """Whether the final report exists."""
        return self._final_seq is not None

    @property
    def final_sent(self) -> bool:
        """Whether the final report left in the present session."""
        return self._final_seq is not None and self._sent >= self._final_seq

    @property
    def last_due(self) -> int:
        """The `seq` of the report that `due` gave last."""
        return self._sent

    @property
    def final_acknowledged(self) -> bool:
        """Whether the server has everything of this job."""
        return self._final_seq is not None and self._acknowledged >= self._final_seq

    @property
    def pending(self) -> tuple[Message, ...]:
        """All reports that are not acknowledged, oldest first."""
        return tuple(message for _seq, message in self._pending)

    async def report(self, update: JobUpdateKind) -> None:
        """Make a report once fewer than eight wait: what makes them must not run ahead for ever."""
        await trio.lowlevel.checkpoint()  # a stopped job must not report behind its final report
        await self._room_for_another()
        if self._final_seq is not None:
            return  # refused meanwhile: nothing follows the final report
        seq = self._next_seq()
        self._keep(seq, JobUpdate(assignment_id=self._assignment_id, seq=seq, update=update))

    async def room_for_signal(self) -> None:
        """Return once fewer than eight reports wait, or the final one is among them."""
        await self._room_for_another()

    def signal(self, send_id: str, make: Callable[[int], Message]) -> int | None:
        """Make the report of a local `send`. Returns its `seq`, None behind the final report."""
        if self._final_seq is not None:
            return None
        seq = self._next_seq()
        self._keep(seq, make(seq), send_id)
        return seq

    async def _room_for_another(self) -> None:
        while len(self._pending) >= MAX_UNACKNOWLEDGED_REPORTS and self._final_seq is None:
            if self._room.is_set():  # else others wait for it already
                self._room = trio.Event()
            await self._room.wait()

    def finish(self, make: Callable[[int], FinalReport]) -> None:
        """Make the final report, whatever waits before it. There is only one: a second is a bug."""
        if self._final_seq is not None:
            raise RuntimeError(f"{self._assignment_id} has its final report already")
        seq = self._next_seq()
        self._final_seq = seq
        self._keep(seq, make(seq))
        self._room.set()

    def due(self, *, log_first: bool) -> Message | None:
        """The next report to send, which counts as sent; None where there is none for now.

        `log_first`: the log has not been written out yet, so a final report waits.
        """
        if self._sent - self._acknowledged >= MAX_UNACKNOWLEDGED_REPORTS:
            return None
        for seq, message in self._pending:
            if seq <= self._sent:
                continue
            if log_first and isinstance(message, FINAL_REPORTS):
                return None
            self._sent = seq
            return message
        return None

    def acknowledge(self, seq: int) -> None:
        """ReportAck, cumulative. A stale one changes nothing."""
        if seq <= self._acknowledged:
            return
        self._acknowledged = seq
        self._sent = max(self._sent, seq)
        while self._pending and self._pending[0][0] <= seq:
            self._pending.popleft()
        if not self.final_acknowledged:  # else the whole assignment is forgotten next
            self._journal.acknowledged(self._assignment_id, seq)
        self._room.set()

    def resume(self, seq: int) -> None:
        """A ResumeAck adopted the job: everything after `seq` goes out again."""
        self.acknowledge(seq)
        self._sent = self._acknowledged

    def refuse(self, seq: int, make: Callable[[int], JobFailed]) -> bool:
        """The content of report `seq` was refused. False where it is none that waits.

        Discards it and what follows, and makes the final report under its number.
        """
        if all(kept != seq for kept, _message in self._pending):
            return False
        while self._pending and self._pending[-1][0] >= seq:
            self._pending.pop()
        self._sent = min(self._sent, seq - 1)
        self._final_seq = seq
        self._keep(seq, make(seq))
        self._room.set()
        return True

    def _next_seq(self) -> int:
        return (self._pending[-1][0] if self._pending else self._acknowledged) + 1

    def _keep(self, seq: int, message: Message, send_id: str | None = None) -> None:
        message = made_legible(message)  # an error's text may be anybody's: a program's, a file's name
        if send_id is None:
            self._journal.report(self._assignment_id, seq, message)
        else:
            self._journal.report(self._assignment_id, seq, message, send_id)
        self._pending.append((seq, message))
        self._changed()
