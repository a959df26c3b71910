"""All assignments of this agent, and what of them still has to reach the server.

Reports go out in order, at most eight of a job unacknowledged, only while the control lane has room,
and a final one behind its log (protocol.md, "Lanes and flow"). A slot is given back when the final
report is sent, everything else when it is acknowledged.
"""

from collections.abc import Callable, Iterator

import structlog
from gradient_protocol.errors import SessionClosed
from gradient_protocol.kinds import FailureKind, JobKind, ResumeState
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.worker import JobCompleted, JobFailed

from gradient_worker.executor.failure import Failure
from gradient_worker.executor.job import Job, Stop, StopCause
from gradient_worker.slots import Slots
from gradient_worker.wakeup import Wakeup
from gradient_worker.wire import Link, Wire

__all__ = ["Jobs"]

logger = structlog.get_logger(__name__)


class Jobs:
    """`slot_freed` is called with the kind; `forgotten` with each job that nothing is kept of any more."""

    def __init__(
        self,
        *,
        link: Link,
        slots: Slots,
        slot_freed: Callable[[JobKind], None],
        forgotten: Callable[[Job], None],
    ) -> None:
        self._link = link
        self._slots = slots
        self._slot_freed = slot_freed
        self._forgotten = forgotten
        self._jobs: dict[str, Job] = {}
        self._crowded = Wakeup()

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, assignment_id: str) -> Job | None:
        """The job of an assignment, if it is here."""
        return self._jobs.get(assignment_id)

    def add(self, job: Job) -> None:
        """An assignment is accepted or recovered."""
        self._jobs[job.assignment_id] = job

    @property
    def unfinished(self) -> int:
        """Jobs without a final report."""
        return sum(1 for job in self._jobs.values() if not job.reports.finished)

    def is_stopping(self, job_id: str) -> bool:
        """Whether this worker still stops an earlier assignment of the job."""
        return any(
            job.assign.job_id == job_id and job.stopped is not None and not job.reports.finished
            for job in self._jobs.values()
        )

    def finish(self, job: Job, failed: Failure | None) -> None:
        """Make the final report. None: the job succeeded."""
        spans, dropped = job.spans.take()
        job.state = ResumeState.DONE

        def make(seq: int) -> JobCompleted | JobFailed:
            if failed is None:
                return JobCompleted(
                    assignment_id=job.assignment_id, seq=seq, spans=spans, spans_dropped=dropped
                )
            return JobFailed(
                assignment_id=job.assignment_id,
                seq=seq,
                kind=failed.kind,
                error=failed.error,
                missing_paths=list(failed.missing_paths),
                metrics=failed.metrics,
                spans=spans,
                spans_dropped=dropped,
            )

        job.reports.finish(make)

    def refuse(self, job: Job, seq: int, reason: str) -> bool:
        """The content of a report was refused: JobFailed Permanent takes its place."""
        spans, dropped = job.spans.take()
        refused = job.reports.refuse(
            seq,
            lambda again: JobFailed(
                assignment_id=job.assignment_id,
                seq=again,
                kind=FailureKind.PERMANENT,
                error=f"report {seq} was refused: {reason}",
                missing_paths=[],
                spans=spans,
                spans_dropped=dropped,
            ),
        )
        if refused:
            job.state = ResumeState.DONE
        return refused

    def forget(self, job: Job) -> None:
        """The server has everything of the job, or wants nothing of it."""
        if self._jobs.pop(job.assignment_id, None) is None:
            return
        job.gone.set()
        self._give_back(job)
        self._forgotten(job)

    def flush(self, job: Job) -> None:
        """Send what the job's reports, its log and the control lane allow now."""
        wire = self._link.current
        if wire is None:
            return
        try:
            while wire.connection.control_has_room:
                message = job.reports.due(log_first=job.log_first(wire))
                if message is None:
                    break
                self._send(wire, job, message)
            else:
                self._crowded.set()
        except SessionClosed:
            return  # the next session sends it again
        if job.reports.final_sent:
            self._give_back(job)

    def _send(self, wire: Wire, job: Job, message: Message) -> None:
        try:
            wire.send(message)
        except ValueError as error:  # larger than the wire takes, and no smaller the next time
            logger.error("a report cannot be sent", assignment_id=job.assignment_id, error=str(error))
            seq = job.reports.last_due
            if isinstance(message, JobFailed) or not self.refuse(job, seq, str(error)):
                raise
            job.stop(Stop(StopCause.REFUSED, str(error)))

    def flush_all(self) -> None:
        """Every job, oldest first."""
        for job in self:
            self.flush(job)

    async def pump(self, wire: Wire) -> None:
        """Go on with what a crowded control lane held back, for as long as the session lives."""
        while True:
            await self._crowded.wait()
            await wire.connection.control_room()
            self.flush_all()

    def _give_back(self, job: Job) -> None:
        kind = self._slots.give_back(job.assignment_id)
        if kind is not None:
            self._slot_freed(kind)
