"""Numbered reports (protocol.md, Reports that must not be lost): who may report, in which order, what then.

A report counts if its sender holds the assignment, the assignment is open, and its number is the next
one. A number that was applied before is acknowledged again and changes nothing. A gap ends the session.
Once a report's content was refused, what follows of the assignment is dropped until JobFailed
Permanent comes under that number. The last number is stored in the transaction that applies the report.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import FailureKind, JobKind
from gradient_protocol.messages.shapes import BuildOutput, EvalResult, EvalStats, FetchResult
from gradient_protocol.messages.worker import ClusterSignalReport, JobCompleted, JobFailed, JobUpdate

from gradient_server.db.queries.signals import acknowledged_up_to, refused_signal
from gradient_server.domain.events import Event, MemberReported, SignalDropped
from gradient_server.domain.status import AssignmentStatus
from gradient_server.graph import sql
from gradient_server.graph.aftermath import carry_out
from gradient_server.graph.assignments import Assignment, close_assignment, find_assignment, store_spans
from gradient_server.graph.build_endings import build_failed, build_succeeded, find_build, lacking_outputs
from gradient_server.graph.build_outputs import store_build_output
from gradient_server.graph.content import check_fetch_result
from gradient_server.graph.evaluation_endings import (
    evaluation_failed,
    evaluation_fetched,
    evaluation_walked,
    find_evaluation,
    source_is_held,
)
from gradient_server.graph.ingest import ingest_batch
from gradient_server.graph.member_reports import hold_final, hold_output
from gradient_server.graph.metrics import store_build_metrics, store_evaluation_metrics
from gradient_server.graph.settings import GraphSettings
from gradient_server.graph.signals import store_signal
from gradient_server.graph.work import Work

__all__ = [
    "Report",
    "ReportOutcome",
    "apply_report",
    "fail_unreadable_job",
    "lock_for_reports",
    "refuse_report",
]

Report = JobUpdate | JobCompleted | JobFailed | ClusterSignalReport

_MAX_ERROR_CHARACTERS = 64 * 1024

_IS_EVALUATION = sql.statement("SELECT evaluation IS NOT NULL FROM dispatched_job WHERE id = :id")
_STORE_SEQ = sql.statement("UPDATE dispatched_job SET last_seq = :seq WHERE id = :id")
_REFUSE = sql.statement("UPDATE dispatched_job SET refused_seq = :seq WHERE id = :id")
_FETCHED = sql.statement("UPDATE evaluation SET source_path = :path, source_rev = :rev WHERE id = :id")
_PROGRESS = sql.statement("UPDATE evaluation SET last_progress_at = :now WHERE id = :id")


@dataclass(slots=True)
class ReportOutcome:
    """What to answer after the commit.

    `acknowledge` goes out as ReportAck, cumulative, unless `refused` (Error with assignment_id and seq,
    the session lives) or `error` (Error with that code, the session ends) is set. `closed`: the
    assignment has ended with this report. `signal_refused`: the ReportAck of exactly this report's
    `seq` carries it as `refused` (a signal beyond the limits; protocol.md, Signals).
    """

    acknowledge: int
    refused: str | None = None
    error: tuple[int, str] | None = None
    events: list[Event] = field(default_factory=list)
    closed: bool = False
    signal_refused: str | None = None


def apply_report(
    connection: sa.Connection,
    *,
    worker_id: str,
    instance_id: str,
    message: Report,
    now: float,
    ids: IdSource,
    settings: GraphSettings | None = None,
) -> ReportOutcome:
    """Applies one report in the caller's transaction. ValueError if it carries no number."""
    if message.seq is None:
        raise ValueError("only numbered reports are applied")
    work = Work(connection, now, ids, settings or GraphSettings())
    lock_for_reports(connection, [message])
    assignment = find_assignment(work, message.assignment_id)
    outcome = _check_order(assignment, worker_id, instance_id, message)
    if outcome is not None or assignment is None:
        return _note_late(work, assignment, worker_id, message, outcome or ReportOutcome(message.seq))
    closed = False
    reason = None
    if isinstance(message, ClusterSignalReport):
        _store_seq(work, assignment, message.seq)
        refused = store_signal(work, assignment, message)
        return ReportOutcome(message.seq, events=work.events, signal_refused=refused)
    if assignment.cluster_attempt is not None:
        reason = _hold(work, assignment, message)
    elif isinstance(message, JobUpdate):
        reason = _apply_update(work, assignment, message)
    else:
        _apply_final(work, assignment, message)
        closed = True
    if reason is not None:
        return _refuse(work, assignment, message.seq, reason)
    return ReportOutcome(message.seq, events=carry_out(work), closed=closed)


def refuse_report(
    connection: sa.Connection,
    *,
    worker_id: str,
    instance_id: str,
    assignment_id: str,
    seq: int,
    reason: str,
    now: float,
    ids: IdSource,
) -> ReportOutcome:
    """A report whose content could not even be decoded: refused under its number, if it was the next."""
    work = Work(connection, now, ids)
    assignment = find_assignment(work, assignment_id)
    stand_in = JobCompleted(assignment_id=assignment_id, seq=seq, spans=[], spans_dropped=0)
    outcome = _check_order(assignment, worker_id, instance_id, stand_in)
    if outcome is not None or assignment is None:
        return outcome or ReportOutcome(seq)
    return _refuse(work, assignment, seq, reason)


def fail_unreadable_job(
    connection: sa.Connection,
    *,
    worker_id: str,
    instance_id: str,
    assignment_id: str,
    reason: str,
    now: float,
    ids: IdSource,
    settings: GraphSettings | None = None,
) -> list[Event]:
    """The worker answered AssignJob by an Error: it cannot read the job, which fails Permanent."""
    work = Work(connection, now, ids, settings or GraphSettings())
    sql.lock_graph(connection)
    assignment = find_assignment(work, assignment_id)
    if assignment is None or not _is_held_by(assignment, worker_id) or assignment.instance_id != instance_id:
        return []
    if assignment.cluster_attempt is None:
        _fail(work, assignment, FailureKind.PERMANENT, f"the worker cannot read the job: {reason}")
    return carry_out(work)


def lock_for_reports(connection: sa.Connection, messages: Sequence[Report]) -> None:
    """Takes the graph's lock as far as any of the reports will need it, before any row's is taken."""
    if not sql.is_postgresql(connection):
        return
    finals = [message for message in messages if isinstance(message, JobCompleted)]
    if any(_moves_much(message) for message in messages) or any(
        _is_evaluation(connection, message.assignment_id) for message in finals
    ):
        sql.lock_graph(connection)
    elif finals:
        sql.lock_graph_shared(connection)


def _moves_much(message: Report) -> bool:
    """Whether it changes the graph's shape, or cascades through it."""
    return isinstance(message, JobFailed) or (
        isinstance(message, JobUpdate) and isinstance(message.update, EvalResult)
    )


def _is_evaluation(connection: sa.Connection, assignment_id: str) -> bool:
    rows = sql.run(connection, _IS_EVALUATION, {"id": assignment_id})
    return bool(rows and rows[0][0])


def _is_held_by(assignment: Assignment, worker_id: str) -> bool:
    return assignment.worker_id == worker_id and assignment.finished_at is None


def _check_order(
    assignment: Assignment | None, worker_id: str, instance_id: str, message: Report
) -> ReportOutcome | None:
    """The answer to a report that is not to be applied, None for the one that is next."""
    seq = message.seq
    assert seq is not None
    if assignment is None or not _is_held_by(assignment, worker_id):
        return ReportOutcome(seq)
    if assignment.instance_id != instance_id:
        return ReportOutcome(0, error=(500, "this server instance no longer owns the assignment"))
    refused_seq = assignment.refused_seq
    if refused_seq is not None and seq >= refused_seq:
        if isinstance(message, JobFailed) and message.kind is FailureKind.PERMANENT and seq == refused_seq:
            return None
        return ReportOutcome(assignment.last_seq)
    if seq <= assignment.last_seq:
        return ReportOutcome(assignment.last_seq)
    if seq > assignment.last_seq + 1:
        expected = assignment.last_seq + 1
        return ReportOutcome(
            assignment.last_seq,
            error=(400, f"report {seq} of assignment {assignment.id} came where {expected} was due"),
        )
    return None


def _refuse(work: Work, assignment: Assignment, seq: int, reason: str) -> ReportOutcome:
    sql.run(work.connection, _REFUSE, {"id": assignment.id, "seq": seq})
    return ReportOutcome(assignment.last_seq, refused=reason)


def _store_seq(work: Work, assignment: Assignment, seq: int) -> None:
    sql.run(work.connection, _STORE_SEQ, {"id": assignment.id, "seq": seq})


def _note_late(
    work: Work,
    assignment: Assignment | None,
    worker_id: str,
    message: Report,
    outcome: ReportOutcome,
) -> ReportOutcome:
    """A report that changes nothing may still be waited for, or have been answered before."""
    if assignment is None or assignment.worker_id != worker_id:
        if isinstance(message, ClusterSignalReport):
            outcome.events.append(
                SignalDropped(message.attempt, message.assignment_id, "its sender is no member")
            )
        return outcome
    assert message.seq is not None
    if assignment.cluster_attempt is not None and outcome.error is None:
        # It may come again because the answer to a refused signal right behind it was lost.
        outcome.acknowledge = acknowledged_up_to(
            work.connection, assignment.id, message.seq, outcome.acknowledge
        )
    if isinstance(message, ClusterSignalReport):
        outcome.signal_refused = refused_signal(work.connection, assignment.id, message.seq)
        if outcome.signal_refused is not None:
            outcome.acknowledge = message.seq
        is_news = message.seq > assignment.last_seq and outcome.signal_refused is None
        if assignment.finished_at is not None and is_news:
            outcome.events.append(SignalDropped(message.attempt, assignment.id, "its attempt is over"))
    elif assignment.finished_at is None or assignment.cluster_attempt is None:
        return outcome
    elif isinstance(message, JobCompleted | JobFailed):
        # A survivor of an attempt that is over has stopped.
        outcome.events.append(MemberReported(assignment.cluster_attempt, assignment.id))
    return outcome


def _hold(work: Work, assignment: Assignment, message: JobUpdate | JobCompleted | JobFailed) -> str | None:
    """A member's reports wait, whole, for the verdict of its attempt; an evaluation's batches do not."""
    if not isinstance(message, JobUpdate):
        hold_final(work, assignment, message)
        return None
    if assignment.kind is JobKind.EVAL:
        return _apply_update(work, assignment, message)
    return hold_output(work, assignment, message)


def _apply_update(work: Work, assignment: Assignment, message: JobUpdate) -> str | None:
    """The reason if the content is refused."""
    update = message.update
    seq = message.seq
    assert seq is not None
    if isinstance(update, BuildOutput):
        if assignment.kind is not JobKind.BUILD:
            return "an evaluation has no BuildOutput"
        reason = store_build_output(work, assignment, update)
    elif assignment.kind is not JobKind.EVAL:
        return f"a build has no {type(update).__name__}"
    else:
        reason = _apply_evaluation_update(work, assignment, update)
    if reason is None:
        _store_seq(work, assignment, seq)
    return reason


def _apply_evaluation_update(work: Work, assignment: Assignment, update: object) -> str | None:
    evaluation = find_evaluation(work, assignment.job)
    if evaluation.is_final:
        # Its worker has not confirmed the abort yet: acknowledged, and of no effect.
        return None
    reason = None
    if isinstance(update, FetchResult):
        reason = check_fetch_result(update)
        if reason is None:
            parameters = {"id": evaluation.id, "path": update.path, "rev": update.rev}
            sql.run(work.connection, _FETCHED, parameters)
    elif isinstance(update, EvalResult):
        reason = ingest_batch(work, evaluation.id, update)
    elif isinstance(update, EvalStats):
        store_evaluation_metrics(work, assignment, update)
    else:
        return f"{type(update).__name__} is not a numbered report"
    sql.run(work.connection, _PROGRESS, {"id": evaluation.id, "now": work.now})
    return reason


def _apply_final(work: Work, assignment: Assignment, message: JobCompleted | JobFailed) -> None:
    dropped = store_spans(work, assignment, message.spans, message.spans_dropped)
    if isinstance(message, JobFailed):
        _job_failed(work, assignment, message, dropped)
    elif assignment.kind is JobKind.BUILD:
        _build_completed(work, assignment, message, dropped)
    else:
        _evaluation_completed(work, assignment, message, dropped)


def _job_failed(work: Work, assignment: Assignment, message: JobFailed, dropped: int) -> None:
    metrics = message.metrics
    peak_ram_mb = None
    if assignment.kind is JobKind.BUILD and metrics is not None and metrics.oom_killed:
        # A failed build leaves a row of metrics only after an out-of-memory kill.
        store_build_metrics(work, assignment, metrics, None)
        peak_ram_mb = metrics.peak_ram_mb
    _fail(
        work,
        assignment,
        message.kind,
        message.error[:_MAX_ERROR_CHARACTERS],
        seq=message.seq,
        spans_dropped=dropped,
        reported_missing=tuple(message.missing_paths),
        peak_ram_mb=peak_ram_mb,
    )


def _build_completed(work: Work, assignment: Assignment, message: JobCompleted, dropped: int) -> None:
    build = find_build(work, assignment.job)
    lacking = lacking_outputs(work, build)
    if lacking:
        error = f"the output {lacking[0]} is not in the server's store"
        _fail(work, assignment, FailureKind.TRANSIENT, error, seq=message.seq, spans_dropped=dropped)
    else:
        build_succeeded(work, assignment, build, seq=message.seq, spans_dropped=dropped)


def _evaluation_completed(work: Work, assignment: Assignment, message: JobCompleted, dropped: int) -> None:
    evaluation = find_evaluation(work, assignment.job)
    if assignment.fetch_only and not evaluation.is_final and not source_is_held(work, evaluation):
        error = "the fetched source is not in the server's store"
        _fail(work, assignment, FailureKind.TRANSIENT, error, seq=message.seq, spans_dropped=dropped)
        return
    close_assignment(work, assignment, AssignmentStatus.COMPLETED, seq=message.seq, spans_dropped=dropped)
    if evaluation.is_final:
        return
    if assignment.fetch_only:
        evaluation_fetched(work, evaluation)
    else:
        evaluation_walked(work, evaluation)


def _fail(
    work: Work,
    assignment: Assignment,
    kind: FailureKind,
    error: str,
    *,
    seq: int | None = None,
    spans_dropped: int = 0,
    reported_missing: tuple[str, ...] = (),
    peak_ram_mb: int | None = None,
) -> None:
    if assignment.kind is JobKind.BUILD:
        build_failed(
            work,
            assignment,
            find_build(work, assignment.job),
            kind,
            error,
            seq=seq,
            spans_dropped=spans_dropped,
            reported_missing=reported_missing,
            peak_ram_mb=peak_ram_mb,
        )
    else:
        evaluation_failed(
            work,
            assignment,
            find_evaluation(work, assignment.job),
            kind,
            error,
            seq=seq,
            spans_dropped=spans_dropped,
            reported_missing=reported_missing,
        )
