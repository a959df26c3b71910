"""Numbered reports: stored and applied in a transaction, acknowledged after its commit.

What is decided about a report is the graph's (graph/reports.py); here are the order, the batching
and the answers (protocol.md, "Reports that must not be lost").
"""

from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa
import structlog
from gradient_protocol.errors import ProtocolError
from gradient_protocol.messages.common import Error
from gradient_protocol.messages.server import ReportAck
from gradient_protocol.messages.worker import ClusterSignalReport, JobCompleted, JobFailed, JobUpdate

from gradient_server.db.queries.claims import note_log
from gradient_server.domain.events import Event
from gradient_server.graph.reports import ReportOutcome, apply_report, refuse_report
from gradient_server.net.services import Services
from gradient_server.net.session import RefusedReport, Session

__all__ = ["REPORTS", "Report", "apply_reports"]

log = structlog.get_logger(__name__)

REFUSED: Final = 400

Report = JobUpdate | JobCompleted | JobFailed | ClusterSignalReport | RefusedReport
REPORTS = (JobUpdate, JobCompleted, JobFailed, ClusterSignalReport, RefusedReport)


async def apply_reports(services: Services, session: Session, reports: Sequence[Report]) -> None:
    """Apply reports in their order and acknowledge them.

    On SQLite they share a transaction; on PostgreSQL each has its own, for the graph's locks are
    taken by kind of report. Raises ProtocolError for a gap, after what came before was answered.
    """
    at_once = 1 if services.database.dialect == "postgresql" else len(reports)
    for begin in range(0, len(reports), at_once):
        await _apply_together(services, session, reports[begin : begin + at_once])


async def _apply_together(services: Services, session: Session, reports: Sequence[Report]) -> None:
    for report in reports:
        if isinstance(report, JobCompleted | JobFailed):
            await session.logs_stored(report.assignment_id)

    def apply(connection: sa.Connection) -> tuple[list[ReportOutcome], list[Event]]:
        outcomes = [_apply_one(services, session, connection, report) for report in reports]
        return outcomes, [event for outcome in outcomes for event in outcome.events]

    outcomes = await services.transact(apply)
    for report in reports:
        if isinstance(report, JobCompleted | JobFailed):
            services.clusters.final_report(report.assignment_id)
    _answer(session, reports, outcomes)


def _apply_one(
    services: Services, session: Session, connection: sa.Connection, report: Report
) -> ReportOutcome:
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
        held = session.held(report.assignment_id)
        if held is not None and held.log_bytes:
            truncated = held.log_broken or services.logs.is_truncated(held.assignment_id)
            note_log(connection, held.assignment_id, held.log_bytes, truncated=truncated)
    return apply_report(
        connection,
        worker_id=session.worker_id,
        instance_id=services.instance_id,
        message=report,
        now=now,
        ids=services.ids,
        settings=services.graph_settings,
    )


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
