"""What a session's reports do in their transaction, and the same for many sessions at once.

Most reports are the two that end an ordinary build, and while a database thread commits, those of dozens
of sessions gather: `apply_together` ends them in a few statements (graph/completions.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from gradient_protocol.messages.shapes import BuildOutput
from gradient_protocol.messages.worker import ClusterSignalReport, JobCompleted, JobFailed, JobUpdate

from gradient_server.db.queries.claims import accept_assignment, note_log
from gradient_server.domain.events import Event
from gradient_server.graph import sql
from gradient_server.graph.completions import Completion, complete_together
from gradient_server.graph.reports import ReportOutcome, apply_report, lock_for_reports, refuse_report
from gradient_server.net.services import Services
from gradient_server.net.session import RefusedReport, Session

__all__ = ["REPORTS", "Acceptance", "Report", "ReportWork", "apply_together"]

Report = JobUpdate | JobCompleted | JobFailed | ClusterSignalReport | RefusedReport
REPORTS = (JobUpdate, JobCompleted, JobFailed, ClusterSignalReport, RefusedReport)

Applied = tuple[list[ReportOutcome], list[Event]]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The worker took this job, which is no cluster's member; the scheduler knows already."""

    assignment_id: str


class ReportWork:
    """One transaction of one session: its reports in their order, and what it accepted among them."""

    __slots__ = ("items", "services", "session")

    def __init__(self, services: Services, session: Session, items: Sequence[Report | Acceptance]) -> None:
        self.services = services
        self.session = session
        self.items = items

    def __call__(self, connection: sa.Connection) -> Applied:
        """One by one. An outcome for each report, and all events."""
        outcomes: list[ReportOutcome] = []
        lock_for_reports(
            connection, [item for item in self.items if not isinstance(item, Acceptance | RefusedReport)]
        )
        for item in self.items:
            if isinstance(item, Acceptance):
                self._accept(connection, item)
            else:
                outcomes.append(self._apply_one(connection, item))
        return outcomes, [event for outcome in outcomes for event in outcome.events]

    def completion(self) -> Completion | None:
        """The end of one build, if that is all there is."""
        accepted = False
        output: JobUpdate | None = None
        *before, final = self.items
        if not isinstance(final, JobCompleted):
            return None
        for item in before:
            if isinstance(item, RefusedReport) or item.assignment_id != final.assignment_id:
                return None
            if isinstance(item, Acceptance) and not accepted and output is None:
                accepted = True
            elif isinstance(item, JobUpdate) and isinstance(item.update, BuildOutput) and output is None:
                output = item
            else:
                return None
        return Completion(final.assignment_id, self.session.worker_id, accepted, output, final)

    def note_log(self, connection: sa.Connection, assignment_id: str) -> None:
        """How much of the log is stored, before the end of the assignment is."""
        held = self.session.held(assignment_id)
        if held is not None and held.log_bytes:
            truncated = held.log_broken or self.services.logs.is_truncated(held.assignment_id)
            note_log(connection, held.assignment_id, held.log_bytes, truncated=truncated)

    def _accept(self, connection: sa.Connection, acceptance: Acceptance) -> None:
        accept_assignment(
            connection,
            acceptance.assignment_id,
            self.session.worker_id,
            now=self.services.clock.now(),
            instance_id=self.services.instance_id,
        )

    def _apply_one(self, connection: sa.Connection, report: Report) -> ReportOutcome:
        services, session = self.services, self.session
        now = services.clock.now()
        if isinstance(report, RefusedReport):
            return refuse_report(
                connection,
                worker_id=session.worker_id,
                instance_id=services.instance_id,
                assignment_id=report.assignment_id,
                seq=report.seq,
                reason=report.reason,
                now=now,
                ids=services.ids,
            )
        if isinstance(report, JobCompleted | JobFailed):
            self.note_log(connection, report.assignment_id)
        return apply_report(
            connection,
            worker_id=session.worker_id,
            instance_id=services.instance_id,
            message=report,
            now=now,
            ids=services.ids,
            settings=services.graph_settings,
        )


def apply_together(
    connection: sa.Connection, works: Sequence[Callable[[sa.Connection], Any]]
) -> list[Applied | None]:
    """The ordinary ends of builds among `works`, all of them `ReportWork`; None for each other one."""
    results: list[Applied | None] = [None] * len(works)
    ends: list[tuple[ReportWork, Completion]] = []
    places: list[int] = []
    for place, work in enumerate(works):
        completion = work.completion() if isinstance(work, ReportWork) else None
        if isinstance(work, ReportWork) and completion is not None:
            ends.append((work, completion))
            places.append(place)
            services = work.services
    if not ends:
        return results
    sql.lock_graph_shared(connection)
    for work, completion in ends:
        work.note_log(connection, completion.assignment_id)
    completions = [completion for _, completion in ends]
    done = complete_together(
        connection,
        completions,
        instance_id=services.instance_id,
        now=services.clock.now(),
        ids=services.ids,
        settings=services.graph_settings,
    )
    for place, completion, events in zip(places, completions, done, strict=True):
        if events is not None:
            results[place] = _outcomes(completion, events), events
    return results


def _outcomes(completion: Completion, events: list[Event]) -> list[ReportOutcome]:
    outcomes = []
    if completion.output is not None and completion.output.seq is not None:
        outcomes.append(ReportOutcome(completion.output.seq))
    outcomes.append(ReportOutcome(completion.final.seq, events=events, closed=True))
    return outcomes
