"""Attempts of clusters: claim, start and close, each one transaction that says whether it took effect
(cluster-jobs.md, "Claim" and "Close"; design.md, "Rows and verdicts").

Every function names the owner: an instance that was succeeded changes nothing. On PostgreSQL rows are
locked in one order everywhere: assignments, jobs, the cluster, its attempt; each by a statement of its
own, so that the next one's snapshot sees what was committed before the lock was given.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from gradient_protocol.kinds import JobKind

from gradient_server.db.hot import HotStatement, array_of, execute_text, texts_in
from gradient_server.db.queries.claims import Claim, ClosedAssignment, claim_assignment, close_abandoned
from gradient_server.domain.job import build_key, eval_key, split_job_key
from gradient_server.domain.status import AttemptOutcome, ClusterStatus

__all__ = [
    "ClusterClaim",
    "Membership",
    "claim_cluster",
    "close_cluster_attempt",
    "close_open_attempt",
    "cluster_membership",
    "lock_cluster",
    "lock_jobs",
    "note_survivors_ended",
    "start_cluster_attempt",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterClaim:
    """An attempt and the assignment of every member. Each member's `cluster_attempt` is `attempt_id`."""

    attempt_id: str
    cluster_id: str
    instance_id: str
    members: Sequence[Claim]


@dataclass(frozen=True, slots=True)
class Membership:
    """The cluster that a job is a member of, and where that cluster stands."""

    cluster_id: str
    status: ClusterStatus


_IDS = texts_in("id", "ids")
_LOCK_JOBS = {
    JobKind.BUILD: HotStatement(
        "SELECT 1",
        f"SELECT 1 FROM derivation_build WHERE {_IDS[1]} ORDER BY id FOR NO KEY UPDATE",  # noqa: S608 - our own words
    ),
    JobKind.EVAL: HotStatement(
        "SELECT 1",
        f"SELECT 1 FROM evaluation WHERE {_IDS[1]} ORDER BY id FOR NO KEY UPDATE",  # noqa: S608 - our own words
    ),
}
_LOCK_CLUSTER = HotStatement("SELECT 1", "SELECT 1 FROM cluster_job WHERE id = :cluster FOR NO KEY UPDATE")
_LOCK_MEMBERS = HotStatement(
    "SELECT 1",
    "SELECT job_key FROM dispatched_job WHERE cluster_attempt = :attempt AND finished_at IS NULL ORDER BY id"
    " FOR NO KEY UPDATE",
)
_MEMBER_JOBS = HotStatement(
    "SELECT evaluation, derivation_build FROM cluster_member WHERE cluster_job = :cluster"
)
_INSERT_ATTEMPT = HotStatement(
    """
INSERT INTO cluster_attempt (id, cluster_job, instance, created_at, report_count, signal_count, signal_bytes)
SELECT :attempt, job.id, :instance, :now, 0, 0, 0 FROM cluster_job AS job
WHERE job.id = :cluster AND job.status = 'Queued' AND NOT EXISTS (SELECT 1 FROM cluster_attempt AS last
    WHERE last.cluster_job = job.id AND last.survivors_until > :now AND last.instance <> :instance)
ON CONFLICT (cluster_job) WHERE finished_at IS NULL DO NOTHING
RETURNING id
""",
    """
INSERT INTO cluster_attempt (id, cluster_job, instance, created_at, report_count, signal_count, signal_bytes)
SELECT CAST(:attempt AS TEXT), job.id, CAST(:instance AS TEXT), CAST(:now AS DOUBLE PRECISION), 0, 0, 0
FROM cluster_job AS job
WHERE job.id = :cluster AND job.status = 'Queued' AND NOT EXISTS (SELECT 1 FROM cluster_attempt AS last
    WHERE last.cluster_job = job.id AND last.survivors_until > :now AND last.instance <> :instance)
ON CONFLICT (cluster_job) WHERE finished_at IS NULL DO NOTHING
RETURNING id
""",
)
_SAVE = HotStatement("SAVEPOINT cluster_claim")
_UNDO = HotStatement("ROLLBACK TO SAVEPOINT cluster_claim")
_RELEASE = HotStatement("RELEASE SAVEPOINT cluster_claim")


def claim_cluster(connection: sa.Connection, claim: ClusterClaim, *, now: float) -> bool:
    """The attempt and every member's assignment, or nothing of it.

    False where the cluster is not Queued, has an open attempt, or one at another instance whose survivors
    are stopping (of its own an instance knows by itself), or where a member cannot start or has an open
    assignment; what was written before that is undone, and the caller's transaction can go on.
    ValueError for a claim that seats two members on one worker, or that is of another attempt.
    """
    _check(claim)
    execute_text(connection, _SAVE, {})
    claimed = _claim(connection, claim, now)
    if not claimed:
        execute_text(connection, _UNDO, {})
    execute_text(connection, _RELEASE, {})
    return claimed


def _check(claim: ClusterClaim) -> None:
    if len({member.worker_id for member in claim.members}) < len(claim.members):
        raise ValueError(f"two members of cluster {claim.cluster_id} are to sit on one worker")
    for member in claim.members:
        if member.cluster_attempt != claim.attempt_id or member.instance_id != claim.instance_id:
            raise ValueError(f"{member.job_key} is claimed for another attempt than {claim.attempt_id}")


def _claim(connection: sa.Connection, claim: ClusterClaim, now: float) -> bool:
    # Submission and claim lock the jobs first, so that a member never runs alone, whatever races.
    lock_jobs(connection, (member.job_key for member in claim.members))
    parameters = {
        "attempt": claim.attempt_id,
        "cluster": claim.cluster_id,
        "instance": claim.instance_id,
        "now": now,
    }
    lock_cluster(connection, claim.cluster_id)
    if not execute_text(connection, _INSERT_ATTEMPT, parameters):
        return False
    rows = execute_text(connection, _MEMBER_JOBS, {"cluster": claim.cluster_id})
    keys = {build_key(build) if evaluation is None else eval_key(evaluation) for evaluation, build in rows}
    if keys != {member.job_key for member in claim.members} or len(keys) != len(claim.members):
        return False
    return all(claim_assignment(connection, member, now=now) for member in claim.members)


def lock_jobs(connection: sa.Connection, job_keys: Iterable[str]) -> None:
    """Nobody else claims these jobs, or makes them members, until the transaction ends."""
    if connection.dialect.name != "postgresql":
        return
    jobs: dict[JobKind, list[str]] = {JobKind.BUILD: [], JobKind.EVAL: []}
    for key in job_keys:
        kind, job = split_job_key(key)
        jobs[kind].append(job)
    for kind, ids in jobs.items():
        if ids:
            execute_text(connection, _LOCK_JOBS[kind], {"ids": array_of(connection, ids)})


def lock_cluster(connection: sa.Connection, cluster_id: str) -> None:
    """Nobody else claims, ends or settles this cluster until the transaction ends."""
    if connection.dialect.name == "postgresql":
        execute_text(connection, _LOCK_CLUSTER, {"cluster": cluster_id})


def _lock_attempt(connection: sa.Connection, attempt_id: str) -> None:
    """The member rows, their jobs and the cluster, in the order of locks."""
    if connection.dialect.name != "postgresql":
        return
    rows = execute_text(connection, _LOCK_MEMBERS, {"attempt": attempt_id})
    lock_jobs(connection, (row[0] for row in rows))
    for (cluster,) in execute_text(connection, _CLUSTER_OF_ATTEMPT, {"attempt": attempt_id}):
        lock_cluster(connection, cluster)


# A member that reported, was rejected or is to be aborted is no member that can be started.
_START = HotStatement(
    """
UPDATE cluster_attempt SET started_at = :now
WHERE id = :attempt AND instance = :instance AND started_at IS NULL AND finished_at IS NULL
    AND NOT EXISTS (SELECT 1 FROM dispatched_job AS member WHERE member.cluster_attempt = :attempt
        AND (member.status <> 'Accepted' OR member.finished_at IS NOT NULL
            OR member.held_report IS NOT NULL OR member.abort_reason IS NOT NULL))
    AND (SELECT COUNT(*) FROM dispatched_job AS member WHERE member.cluster_attempt = :attempt)
        = (SELECT COUNT(*) FROM cluster_member AS seat WHERE seat.cluster_job = cluster_attempt.cluster_job)
    AND EXISTS (SELECT 1 FROM cluster_job AS job
        WHERE job.id = cluster_attempt.cluster_job AND job.status = 'Queued')
RETURNING cluster_job
"""
)
_CLUSTER_OF_ATTEMPT = HotStatement("SELECT cluster_job FROM cluster_attempt WHERE id = :attempt")
_RUNNING = HotStatement(
    "UPDATE cluster_job SET status = 'Running', attempts = attempts + 1 WHERE id = :cluster"
)


def start_cluster_attempt(
    connection: sa.Connection, attempt_id: str, instance_id: str, *, now: float
) -> bool:
    """The attempt is started and its cluster Running, if every member row is open and Accepted.

    False, and nothing is changed, otherwise: a member was rejected, lost, has reported or is to be
    aborted; the attempt is closed, was started before, or is another instance's.
    """
    parameters = {"attempt": attempt_id, "instance": instance_id, "now": now}
    _lock_attempt(connection, attempt_id)
    started = execute_text(connection, _START, parameters)
    if not started:
        return False
    execute_text(connection, _RUNNING, {"cluster": started[0][0]})
    return True


# A prepare can only fail before the start: the last acceptance may have been faster.
_CLOSE = HotStatement(
    """
UPDATE cluster_attempt SET finished_at = :now, outcome = :outcome, reason = :reason
WHERE id = :attempt AND finished_at IS NULL
    AND (CAST(:instance AS TEXT) IS NULL OR instance = :instance)
    AND (started_at IS NULL OR CAST(:outcome AS TEXT) <> 'PrepareFailed')
RETURNING id
"""
)
_SURVIVORS_ENDED = HotStatement("UPDATE cluster_attempt SET survivors_until = NULL WHERE id = :attempt")
_OPEN_MEMBERS = HotStatement(
    "SELECT id FROM dispatched_job WHERE cluster_attempt = :attempt AND finished_at IS NULL ORDER BY id"
)


def close_cluster_attempt(
    connection: sa.Connection,
    attempt_id: str,
    outcome: AttemptOutcome,
    *,
    now: float,
    instance_id: str | None = None,
    reason: str | None = None,
) -> bool:
    """Closes an open attempt, and every open member row as Abandoned. The second close is False.

    The members' jobs are Queued again. PrepareFailed is False for an attempt that was started.
    """
    closed = close_open_attempt(
        connection, attempt_id, outcome, now=now, instance_id=instance_id, reason=reason
    )
    return closed is not None


def close_open_attempt(
    connection: sa.Connection,
    attempt_id: str,
    outcome: AttemptOutcome,
    *,
    now: float,
    instance_id: str | None = None,
    reason: str | None = None,
) -> list[ClosedAssignment] | None:
    """The same; the member rows that were open, None where the attempt was not."""
    _lock_attempt(connection, attempt_id)
    parameters = {
        "attempt": attempt_id,
        "instance": instance_id,
        "outcome": outcome.value,
        "reason": reason,
        "now": now,
    }
    if not execute_text(connection, _CLOSE, parameters):
        return None
    rows = execute_text(connection, _OPEN_MEMBERS, {"attempt": attempt_id})
    closed = [close_abandoned(connection, row[0], now=now) for row in rows]
    return [entry for entry in closed if entry is not None]


def note_survivors_ended(connection: sa.Connection, attempt_id: str) -> None:
    """Nobody waits for members of the closed attempt any more: its cluster may be tried again anywhere."""
    execute_text(connection, _SURVIVORS_ENDED, {"attempt": attempt_id})


def _membership_statement(reference: str) -> HotStatement:
    condition = texts_in(f"member.{reference}", "ids")
    text = (
        f"SELECT member.{reference}, job.id, job.status FROM cluster_member AS member"  # noqa: S608 - our own words
        " JOIN cluster_job AS job ON job.id = member.cluster_job WHERE "
    )
    return HotStatement(text + condition[0], text + condition[1])


_MEMBERSHIP = {
    JobKind.BUILD: _membership_statement("derivation_build"),
    JobKind.EVAL: _membership_statement("evaluation"),
}


def cluster_membership(connection: sa.Connection, job_keys: Iterable[str]) -> dict[str, Membership]:
    """Those of the jobs that are members, with their clusters: one query a kind for the whole batch."""
    jobs: dict[JobKind, list[str]] = {JobKind.BUILD: [], JobKind.EVAL: []}
    for key in job_keys:
        kind, job = split_job_key(key)
        jobs[kind].append(job)
    found: dict[str, Membership] = {}
    for kind, ids in jobs.items():
        if not ids:
            continue
        to_key = build_key if kind is JobKind.BUILD else eval_key
        for job, cluster, status in execute_text(
            connection, _MEMBERSHIP[kind], {"ids": array_of(connection, ids)}
        ):
            found[to_key(job)] = Membership(cluster, ClusterStatus(status))
    return found
