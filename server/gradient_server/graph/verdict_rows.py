"""The members of an attempt as its verdict finds them: rows, stored reports, uploads."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from gradient_protocol.kinds import FailureKind, JobKind
from gradient_protocol.messages.shapes import BuildOutput
from gradient_protocol.messages.worker import JobCompleted, JobFailed

from gradient_server.cluster.verdict import MemberReport, MemberState
from gradient_server.db.queries.clusters import lock_cluster, lock_jobs
from gradient_server.db.queries.uploads import Upload
from gradient_server.domain.status import AbortReason, AssignmentStatus
from gradient_server.graph import sql
from gradient_server.graph.assignments import Assignment, find_open
from gradient_server.graph.heal import missing_paths
from gradient_server.graph.member_reports import read_output, read_report
from gradient_server.graph.work import Work

__all__ = ["Attempt", "Member", "find_attempt", "find_members", "member_reports"]

_ATTEMPT = sql.statement(
    "SELECT t.id, t.cluster_job, t.instance, t.started_at IS NOT NULL, c.attempts, c.retry_budget"
    " FROM cluster_attempt t JOIN cluster_job c ON c.id = t.cluster_job"
    " WHERE t.id = :id AND t.finished_at IS NULL"
)
_ROWS = sql.statement(
    "SELECT a.id FROM dispatched_job a WHERE a.cluster_attempt = :id AND a.finished_at IS NULL ORDER BY a.id"
)
_MEMBERS = sql.statement(
    'SELECT a.id, m.role, m."index", m."primary", a.held_report, a.held_output, a.held_order,'
    " a.lost_at IS NOT NULL FROM dispatched_job a JOIN cluster_attempt t ON t.id = a.cluster_attempt"
    ' JOIN cluster_member m ON m.cluster_job = t.cluster_job AND m.role = a.cluster_role AND m."index" ='
    " a.cluster_index WHERE a.cluster_attempt = :id AND a.finished_at IS NULL ORDER BY m.position"
)
# A build that nobody wants any more, that has ended, or whose dependency has finally failed.
_BUILD_CANNOT_START = sql.statement(
    "SELECT b.id FROM derivation_build b WHERE b.id IN [ids] AND (b.finished_at IS NOT NULL"
    " OR NOT EXISTS (SELECT 1 FROM build_job j WHERE j.build = b.id AND j.outcome IS NULL)"
    " OR EXISTS (SELECT 1 FROM derivation_dependency e WHERE e.derivation = b.derivation"
    "  AND NOT e.runtime_only AND NOT EXISTS (SELECT 1 FROM derivation_build c"
    "   WHERE c.derivation = e.dependency AND c.status IN ('Created', 'Queued', 'Assigned', 'Completed'))))"
)
_EVALUATION_CANNOT_START = sql.statement(
    "SELECT id FROM evaluation WHERE id IN [ids] AND (finished_at IS NOT NULL OR abort_requested_at"
    " IS NOT NULL)"
)
_SOURCE_IS_LOST = sql.statement(
    "SELECT source, source_path FROM evaluation WHERE id = :id AND source_path IN [paths]"
)
_UPLOADS = sql.statement(
    "SELECT u.request, u.worker, u.assignment, u.path, u.created_at, u.lease_until, u.nar_hash, u.nar_size,"
    ' u.object, u.committed, u.file_size, u.compression, u."references" FROM upload u'
    " WHERE u.assignment IN [ids] AND u.object IS NOT NULL AND NOT u.committed"
    " ORDER BY u.created_at, u.request"
)
_DERIVATION = sql.statement("SELECT derivation FROM derivation_build WHERE id = :id")


@dataclass(frozen=True, slots=True)
class Attempt:
    """An open attempt and its cluster's account."""

    id: str
    cluster: str
    instance_id: str
    started: bool
    attempts: int
    retry_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An open member row. `report` None: it is still running (or held). `lost`: the server made it up.

    `lacking`: an output of a reported success that was not uploaded, which makes it a failure.
    `source_lost`: it cannot be tried again, for nothing in the graph makes what it misses.
    """

    assignment: Assignment
    role: str
    index: int
    primary: bool
    report: JobCompleted | JobFailed | None
    output: BuildOutput | None
    order: int | None
    lost: bool
    uploads: Mapping[str, Upload]
    lacking: str | None = None
    source_lost: bool = False

    @property
    def address(self) -> str:
        """`role index`, for people."""
        return f"{self.role} {self.index}"

    @property
    def failure(self) -> tuple[FailureKind, str] | None:
        """Kind and text of its failure; None for a success and for one that has not reported."""
        if isinstance(self.report, JobFailed):
            return self.report.kind, self.report.error
        if self.lacking is not None:
            return FailureKind.TRANSIENT, f"the output {self.lacking} is not in the server's store"
        return None


def find_attempt(work: Work, attempt_id: str) -> Attempt | None:
    """The attempt, if it is open."""
    rows = sql.run(work.connection, _ATTEMPT, {"id": attempt_id})
    if not rows:
        return None
    row = rows[0]
    return Attempt(row[0], row[1], row[2], bool(row[3]), row[4], row[5])


def find_members(work: Work, attempt: Attempt) -> list[Member]:
    """Its open member rows in the cluster's order; they, their jobs and the cluster are locked."""
    parameters = {"id": attempt.id}
    opened = [row[0] for row in sql.run(work.connection, _ROWS, parameters)]
    assignments = {a.id: a for a in find_open(work, opened)}
    lock_jobs(work.connection, (a.job_key for a in assignments.values()))
    lock_cluster(work.connection, attempt.cluster)
    finished = _finished_uploads(work, opened)
    members = []
    for row in sql.run(work.connection, _MEMBERS, parameters):
        assignment, report, output = assignments[row[0]], row[4], row[5]
        member = Member(
            assignment=assignment,
            role=row[1],
            index=row[2],
            primary=bool(row[3]),
            report=None if report is None else read_report(bytes(report)),
            output=None if output is None else read_output(bytes(output)),
            order=row[6],
            lost=bool(row[7]),
            uploads=finished.get(assignment.id, {}),
        )
        members.append(_examine(work, member))
    return members


def member_reports(work: Work, members: list[Member]) -> list[MemberReport]:
    """What `cluster.verdict.decide` takes: stored reports in the order of their arrival, then the rest."""
    # It matters once there is something to retry.
    failed = any(member.failure is not None for member in members)
    stuck = _cannot_start(work, members) if failed else set()
    ordered = sorted(members, key=lambda member: (member.order is None, member.order or 0))
    return [
        MemberReport(
            role=member.role,
            index=member.index,
            primary=member.primary,
            state=_state(member),
            failure_kind=None if member.failure is None else member.failure[0],
            can_start=member.assignment.job_key not in stuck and not member.source_lost,
        )
        for member in ordered
    ]


def _state(member: Member) -> MemberState:
    if member.report is None:
        accepted = member.assignment.status is AssignmentStatus.ACCEPTED
        return MemberState.RUNNING if accepted else MemberState.HELD
    if member.lost:
        return MemberState.LOST
    if member.failure is None:
        return MemberState.SUCCEEDED
    return MemberState.ABORTED if member.failure[0] is FailureKind.ABORTED else MemberState.FAILED


def _finished_uploads(work: Work, assignments: list[str]) -> dict[str, dict[str, Upload]]:
    """By assignment and path; of several of one path the last one."""
    found: dict[str, dict[str, Upload]] = {}
    for row in sql.run(work.connection, _UPLOADS, {"ids": sql.array(work.connection, assignments)}):
        upload = Upload(*(*row[:-1], sql.from_json(row[-1])))
        found.setdefault(upload.assignment, {})[upload.path] = upload
    return found


def _examine(work: Work, member: Member) -> Member:
    """What only the store and the graph know of a report."""
    report = member.report
    if isinstance(report, JobCompleted) and member.assignment.kind is JobKind.BUILD:
        return dataclasses.replace(member, lacking=_lacking(member))
    if isinstance(report, JobFailed) and report.kind is FailureKind.INPUTS_UNAVAILABLE:
        return dataclasses.replace(member, source_lost=_misses_source(work, member.assignment, report))
    return member


def _lacking(member: Member) -> str | None:
    if member.output is None:
        return "(none was reported)"
    for output in member.output.outputs:
        upload = member.uploads.get(output.path)
        if upload is None or upload.nar_hash != output.nar_hash:
            return output.path
    return None


def _misses_source(work: Work, assignment: Assignment, report: JobFailed) -> bool:
    if assignment.kind is JobKind.BUILD:
        derivation = sql.run(work.connection, _DERIVATION, {"id": assignment.job})[0][0]
        return bool(missing_paths(work, [derivation], report.missing_paths)[1])
    parameters = {"id": assignment.job, "paths": sql.array(work.connection, report.missing_paths)}
    rows = sql.run(work.connection, _SOURCE_IS_LOST, parameters)
    return bool(rows) and sql.from_json(rows[0][0]).get("type") == "Path"


def _cannot_start(work: Work, members: list[Member]) -> set[str]:
    stuck = {
        member.assignment.job_key
        for member in members
        if member.assignment.abort_reason in (AbortReason.USER, AbortReason.EVALUATION)
    }
    for kind, statement, prefix in (
        (JobKind.BUILD, _BUILD_CANNOT_START, "build"),
        (JobKind.EVAL, _EVALUATION_CANNOT_START, "eval"),
    ):
        jobs = [member.assignment.job for member in members if member.assignment.kind is kind]
        if jobs:
            rows = sql.run(work.connection, statement, {"ids": sql.array(work.connection, jobs)})
            stuck.update(f"{prefix}:{row[0]}" for row in rows)
    return stuck
