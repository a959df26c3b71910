"""What a verdict does to each member (cluster-jobs.md, Recovery; design.md, Rows and verdicts).

Retry puts every member's job back, whatever it reported; what it made is dropped. Under the other
three a member that reported settles by its own report and one that did not ends Aborted. A failure
that would have been tried again cannot be, alone: under Fail it becomes Permanent, and where the
cluster was completed or aborted without it, the member ends Aborted like one that was still running.
"""

from typing import Final

from gradient_protocol.kinds import FailureKind, JobKind
from gradient_protocol.messages.worker import JobCompleted, JobFailed

from gradient_server.cluster.verdict import Verdict
from gradient_server.db.queries.cached_paths import CachedPath, put_path
from gradient_server.domain.events import ObjectUnused, PathStored
from gradient_server.domain.status import AssignmentStatus, BuildStatus
from gradient_server.graph import sql
from gradient_server.graph.assignments import close_assignment, store_attempt, store_spans
from gradient_server.graph.build_endings import (
    Build,
    Failure,
    complete_build,
    find_build,
    lacking_outputs,
    note_peak,
    spend,
)
from gradient_server.graph.build_outputs import store_build_output
from gradient_server.graph.evaluation_endings import (
    evaluation_again,
    evaluation_ended,
    evaluation_walked,
    find_evaluation,
)
from gradient_server.graph.failures import Decision, Outcome
from gradient_server.graph.heal import forget_paths, heal, missing_paths
from gradient_server.graph.metrics import store_build_metrics
from gradient_server.graph.progress import advance, fail_builds
from gradient_server.graph.states import BuildEvent, EvaluationEvent
from gradient_server.graph.transitions import move_builds
from gradient_server.graph.verdict_rows import Member
from gradient_server.graph.work import Work

__all__ = ["close_member", "put_back", "settle_member"]

_MAX_ERROR_CHARACTERS: Final = 64 * 1024
_OWN_FAILURES: Final = (FailureKind.PERMANENT, FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY)

_COMMIT = sql.statement("UPDATE upload SET committed = TRUE WHERE request IN [requests]")


def close_member(work: Work, member: Member) -> None:
    """Closes the row by its report, or as Abandoned where there is none, and records the try."""
    assignment, report = member.assignment, member.report
    dropped = 0
    if report is not None:
        dropped = store_spans(work, assignment, report.spans, report.spans_dropped)
    if assignment.kind is JobKind.BUILD:
        store_attempt(work, assignment, _outcome(member), _error(member))
    close_assignment(work, assignment, _status(member), spans_dropped=dropped)


def settle_member(work: Work, member: Member, verdict: Verdict, error: str) -> None:
    """The end of a closed member's job under Complete, Fail or Abort; `error` for one that is aborted."""
    failure = member.failure
    own = failure is not None and (failure[0] in _OWN_FAILURES or verdict is Verdict.FAIL)
    if isinstance(member.report, JobCompleted) and failure is None:
        _succeed(work, member)
    elif own:
        _fail(work, member)
    else:
        _abort(work, member, error, counts_as_success=verdict is Verdict.COMPLETE and not member.primary)


def put_back(work: Work, member: Member) -> None:
    """Retry: a closed member's job waits again, at once; its attempts are the cluster's affair."""
    assignment = member.assignment
    if assignment.kind is JobKind.EVAL:
        evaluation = find_evaluation(work, assignment.job)
        if not evaluation.is_final:
            missing = _missing(member)
            lost = evaluation.source_path is not None and evaluation.source_path in missing
            if lost and evaluation.source_path is not None:
                forget_paths(work, [evaluation.source_path])
            evaluation_again(work, evaluation, source_lost=lost)
        return
    build = find_build(work, assignment.job)
    _note_failure(work, member, build)
    move_builds(work, [build.id], BuildEvent.WAITS_AGAIN)
    _repair(work, member, build)
    advance(work, [build.id])


def _succeed(work: Work, member: Member) -> None:
    assignment = member.assignment
    if assignment.kind is JobKind.EVAL:
        evaluation = find_evaluation(work, assignment.job)
        if not evaluation.is_final:
            evaluation_walked(work, evaluation)
        return
    assert member.output is not None
    refused = store_build_output(work, assignment, member.output)
    if refused is not None:
        raise RuntimeError(f"a held BuildOutput of {assignment.id} does not fit its build: {refused}")
    _commit_uploads(work, member)
    build = find_build(work, assignment.job)
    lacking = lacking_outputs(work, build)
    if lacking:
        raise RuntimeError(f"{lacking[0]} of {assignment.id} was committed and is not held")
    complete_build(work, build, assignment.worker_name)


def _commit_uploads(work: Work, member: Member) -> None:
    assert member.output is not None
    taken = [member.uploads[output.path] for output in member.output.outputs]
    requests = sql.array(work.connection, [upload.request for upload in taken])
    sql.run(work.connection, _COMMIT, {"requests": requests})
    for output, upload in zip(member.output.outputs, taken, strict=True):
        held = upload.held()
        entry = CachedPath(
            path=output.path,
            nar_hash=held.nar_hash,
            nar_size=held.nar_size,
            file_size=held.file_size,
            compression=held.compression,
            object=held.object,
            references=held.references,
            contains_store_dir=output.contains_store_dir,
        )
        replaced = put_path(work.connection, entry, now=work.now)
        if replaced is not None:
            work.events.append(ObjectUnused(replaced))
        work.events.append(PathStored(output.path, held.nar_size))


def _fail(work: Work, member: Member) -> None:
    assignment = member.assignment
    assert member.failure is not None
    kind, error = member.failure
    error = error[:_MAX_ERROR_CHARACTERS]
    if assignment.kind is JobKind.EVAL:
        evaluation_ended(work, find_evaluation(work, assignment.job), EvaluationEvent.FAILED, error)
        return
    build = find_build(work, assignment.job)
    _note_failure(work, member, build)
    stored = kind if kind in _OWN_FAILURES else FailureKind.PERMANENT
    fail_builds(
        work,
        [build.id],
        BuildEvent.FAILED,
        error=error,
        kind=stored.value,
        worker=assignment.worker_name,
    )
    _repair(work, member, build)


def _abort(work: Work, member: Member, error: str, *, counts_as_success: bool) -> None:
    assignment = member.assignment
    if assignment.kind is JobKind.EVAL:
        evaluation_ended(work, find_evaluation(work, assignment.job), EvaluationEvent.ABORTED, error)
        return
    fail_builds(
        work,
        [assignment.job],
        BuildEvent.ABORTED,
        error=error,
        kind=FailureKind.ABORTED.value,
        worker=assignment.worker_name,
        counts_as=BuildStatus.COMPLETED if counts_as_success else None,
    )


def _note_failure(work: Work, member: Member, build: Build) -> None:
    """What the failure teaches about the build: its peak, its misses, the text to show."""
    if member.failure is None:
        return
    kind, error = member.failure
    report, history = member.report, build.history
    if isinstance(report, JobFailed) and report.metrics is not None and report.metrics.oom_killed:
        store_build_metrics(work, member.assignment, report.metrics, None)
        if report.metrics.peak_ram_mb is not None:
            note_peak(work, build, report.metrics.peak_ram_mb)
    missed = kind is FailureKind.SUBSTITUTE_UNAVAILABLE
    decision = Decision(
        outcome=Outcome.REQUEUE,
        attempts=history.attempts,
        inputs_unavailable_loops=history.inputs_unavailable_loops,
        substitute_misses=history.substitute_misses + (1 if missed else 0),
        oom_retries=history.oom_retries,
    )
    spend(work, build, decision, Failure(kind.value, error[:_MAX_ERROR_CHARACTERS]))


def _repair(work: Work, member: Member, build: Build) -> None:
    """A missing input is forgotten and what makes it is built again."""
    missing = _missing(member)
    if not missing:
        return
    made, sources = missing_paths(work, [build.derivation], missing)
    forget_paths(work, sources)
    heal(work, [build.derivation], made)


def _missing(member: Member) -> list[str]:
    report = member.report
    if isinstance(report, JobFailed) and report.kind is FailureKind.INPUTS_UNAVAILABLE:
        return report.missing_paths
    return []


def _status(member: Member) -> AssignmentStatus:
    if member.report is None or member.lost:
        return AssignmentStatus.ABANDONED
    return AssignmentStatus.COMPLETED if member.failure is None else AssignmentStatus.FAILED


def _outcome(member: Member) -> str:
    """As build_attempt has it."""
    if member.lost:
        return "Lost"
    if member.report is None:
        return FailureKind.ABORTED.value
    return "Completed" if member.failure is None else member.failure[0].value


def _error(member: Member) -> str | None:
    if member.report is None:
        return "stopped with its cluster attempt"
    return None if member.failure is None else member.failure[1][:_MAX_ERROR_CHARACTERS]
