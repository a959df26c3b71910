"""Numbered reports: stored and applied in a transaction, acknowledged after its commit.

What is decided about a report is the graph's (graph/reports.py); here are the order, the batching
and the answers (protocol.md, "Reports that must not be lost").
"""

from collections.abc import Sequence
from typing import Final

import structlog
from gradient_protocol.errors import ProtocolError
from gradient_protocol.messages.common import Error
from gradient_protocol.messages.server import ReportAck
from gradient_protocol.messages.worker import AssignJobResponse, JobCompleted, JobFailed

from gradient_server.graph.reports import ReportOutcome
from gradient_server.net.report_work import REPORTS, Acceptance, Report, ReportWork, apply_together
from gradient_server.net.services import Services
from gradient_server.net.session import Session

__all__ = ["REPORTS", "Report", "apply_reports"]

log = structlog.get_logger(__name__)

REFUSED: Final = 400


async def apply_reports(
    services: Services, session: Session, items: Sequence[Report | AssignJobResponse]
) -> None:
    """Apply reports in their order and acknowledge them; store acceptances that came among them.

    On SQLite they share a transaction; on PostgreSQL each has its own, for the graph's locks are
    taken by kind of report. Raises ProtocolError for a gap, after what came before was answered.
    """
    to_do: list[Report | Acceptance] = []
    for item in items:
        if not isinstance(item, AssignJobResponse):
            to_do.append(item)
        elif services.scheduler.take_acceptance(session.worker_id, item):
            to_do.append(Acceptance(item.assignment_id))
    at_once = 1 if services.database.dialect == "postgresql" else max(len(to_do), 1)
    for begin in range(0, len(to_do), at_once):
        await _apply(services, session, to_do[begin : begin + at_once])


async def _apply(services: Services, session: Session, items: Sequence[Report | Acceptance]) -> None:
    reports = [item for item in items if not isinstance(item, Acceptance)]
    finals = [report for report in reports if isinstance(report, JobCompleted | JobFailed)]
    for report in finals:
        await session.logs_stored(report.assignment_id)
    outcomes = await services.transact(ReportWork(services, session, items), apply_together)
    for report in finals:
        services.clusters.final_report(report.assignment_id)
    _answer(session, reports, outcomes)


def _answer(session: Session, reports: Sequence[Report], outcomes: Sequence[ReportOutcome]) -> None:
    """One `ReportAck` for each assignment, for it is cumulative; an `Error` for each refused report."""
    acknowledged: dict[str, int] = {}
    fault: tuple[int, str] | None = None
    for report, outcome in zip(reports, outcomes, strict=True):
        session.report_done(report.assignment_id)
        if outcome.error is not None:
            fault = fault or outcome.error
        elif outcome.refused is not None:
            _refuse(session, report, outcome.refused)
        elif outcome.signal_refused is not None:
            # What came before is acknowledged first, for this one concerns exactly its own number.
            acknowledged.pop(report.assignment_id, None)
            session.send(
                ReportAck(
                    assignment_id=report.assignment_id,
                    seq=outcome.acknowledge,
                    refused=outcome.signal_refused,
                )
            )
        else:
            seq = max(outcome.acknowledge, acknowledged.get(report.assignment_id, 0))
            acknowledged[report.assignment_id] = seq
    for assignment_id, seq in acknowledged.items():
        session.send(ReportAck(assignment_id=assignment_id, seq=seq))
    if fault is not None:
        raise ProtocolError(*fault)


def _refuse(session: Session, report: Report, reason: str) -> None:
    log.warning("a report is refused", assignment=report.assignment_id, seq=report.seq, reason=reason)
    session.send(Error(code=REFUSED, reason=reason, assignment_id=report.assignment_id, seq=report.seq))
