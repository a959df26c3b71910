"""Submission of a cluster over jobs that have not started (operations.md, Recipes; by HTTP).

Submission and claim lock the jobs' rows first: a job that was claimed before has started and is
refused, one that is claimed later finds that it is a member (design.md, Rows and verdicts).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.kinds import JobKind

from gradient_server.db.queries.clusters import cluster_membership, lock_jobs
from gradient_server.domain.events import Event, JobQueued
from gradient_server.domain.job import split_job_key
from gradient_server.domain.status import BuildStatus, EvaluationStatus
from gradient_server.graph import sql
from gradient_server.graph.cluster_checks import find_circle, find_needed_helper, find_shared_pin
from gradient_server.graph.cluster_rows import NewMember, insert_cluster
from gradient_server.graph.cluster_status import announce_cluster
from gradient_server.graph.content import check_members
from gradient_server.graph.jobs import load_pending
from gradient_server.graph.work import Work

__all__ = ["ClusterSpec", "ClusterSubmission", "MemberSpec", "submit_cluster"]

MAX_MEMBERS = 1_000
MAX_RETRY_BUDGET = 1_000_000
_MAX_NAME_CHARACTERS = 211

_BUILDS = sql.statement(
    "SELECT b.id, b.status, b.derivation, d.name FROM derivation_build b JOIN derivation d"
    " ON d.id = b.derivation WHERE b.id IN [ids]"
)
_BUILD_PROJECTS = sql.statement(
    "SELECT DISTINCT j.build FROM build_job j JOIN evaluation v ON v.id = j.evaluation"
    " WHERE j.build IN [ids] AND v.project = :project"
)
_EVALUATIONS = sql.statement("SELECT id, status, project FROM evaluation WHERE id IN [ids]")
_OPEN_ROWS = sql.statement(
    "SELECT job_key FROM dispatched_job WHERE job_key IN [keys] AND finished_at IS NULL ORDER BY job_key"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """A member as it was asked for: `job_key` is eval:ID or build:ID, `pin` a worker's id or name."""

    job_key: str
    role: str
    primary: bool = False
    pin: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster as it was asked for."""

    name: str
    members: Sequence[MemberSpec]
    same_zone: bool = False
    retry_budget: int = 1


@dataclass(frozen=True, slots=True)
class ClusterSubmission:
    """The new cluster's id, or the one line why there is none (`refused`)."""

    cluster_id: str | None = None
    refused: str | None = None
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class _Jobs:
    """What is stored of the members' jobs: id to name, and of builds to derivation."""

    names: dict[str, str] = field(default_factory=dict)
    derivations: dict[str, int] = field(default_factory=dict)


def submit_cluster(
    connection: sa.Connection, *, project: str, spec: ClusterSpec, now: float, ids: IdSource
) -> ClusterSubmission:
    """Stores a cluster of `project` (its id) over builds and evaluations that have not started."""
    reason = _check_spec(spec)
    if reason is not None:
        return ClusterSubmission(refused=reason)
    work = Work(connection, now, ids)
    sql.lock_graph(connection)
    keys = [member.job_key for member in spec.members]
    lock_jobs(connection, keys)
    jobs = _Jobs()
    reason = _check_jobs(work, project, keys, jobs) or _check_graph(work, spec, jobs)
    if reason is not None:
        return ClusterSubmission(refused=reason)
    cluster = insert_cluster(
        work,
        project=project,
        name=spec.name,
        same_zone=spec.same_zone,
        retry_budget=spec.retry_budget,
        members=[_new_member(member) for member in spec.members],
    )
    announce_cluster(work, cluster)
    # Those that wait already are members from now on, and no candidates of their own.
    work.events.extend(JobQueued(job) for job in load_pending(connection, keys, now))
    return ClusterSubmission(cluster, None, work.events)


def _new_member(member: MemberSpec) -> NewMember:
    kind, job = split_job_key(member.job_key)
    return NewMember(
        role=member.role,
        build=job if kind is JobKind.BUILD else None,
        evaluation=job if kind is JobKind.EVAL else None,
        primary=member.primary,
        pin=member.pin,
    )


def _check_spec(spec: ClusterSpec) -> str | None:
    if not 0 < len(spec.name) <= _MAX_NAME_CHARACTERS:
        return f"a cluster's name has 1 to {_MAX_NAME_CHARACTERS} characters"
    if not 0 < len(spec.members) <= MAX_MEMBERS:
        return f"a cluster has 1 to {MAX_MEMBERS} members"
    if not 0 <= spec.retry_budget <= MAX_RETRY_BUDGET:
        return f"the retry budget is a number from 0 to {MAX_RETRY_BUDGET}"
    seen: set[str] = set()
    for member in spec.members:
        try:
            split_job_key(member.job_key)
        except ValueError as error:
            return str(error)
        if member.job_key in seen:
            return f"{member.job_key} is named twice"
        seen.add(member.job_key)
    return check_members([(member.role, member.primary, member.pin) for member in spec.members])


def _check_jobs(work: Work, project: str, keys: Sequence[str], jobs: _Jobs) -> str | None:
    """Known, of this project, not started, in no cluster; fills `jobs`."""
    of_kind: dict[JobKind, list[str]] = {JobKind.BUILD: [], JobKind.EVAL: []}
    for key in keys:
        kind, job = split_job_key(key)
        of_kind[kind].append(job)
    reason = _check_builds(work, project, of_kind[JobKind.BUILD], jobs)
    reason = reason or _check_evaluations(work, project, of_kind[JobKind.EVAL])
    if reason is not None:
        return reason
    for (key,) in sql.run(work.connection, _OPEN_ROWS, {"keys": sql.array(work.connection, keys)}):
        return f"{key} has started already"
    for key, membership in cluster_membership(work.connection, keys).items():
        return f"{key} is in the cluster {membership.cluster_id} already"
    return None


def _check_builds(work: Work, project: str, builds: Sequence[str], jobs: _Jobs) -> str | None:
    if not builds:
        return None
    by_id = {"ids": sql.array(work.connection, builds)}
    found = {row[0]: row[1:] for row in sql.run(work.connection, _BUILDS, by_id)}
    wanted = sql.run(work.connection, _BUILD_PROJECTS, {**by_id, "project": project})
    own = {row[0] for row in wanted}
    for build in builds:
        if build not in found:
            return f"there is no build {build}"
        status, derivation, name = found[build]
        if build not in own:
            return f"build:{build} ({name}) is not of this project"
        if status not in (BuildStatus.CREATED, BuildStatus.QUEUED):
            return f"build:{build} ({name}) has started already: it is {status}"
        jobs.derivations[build] = derivation
        jobs.names[build] = name
    return None


def _check_evaluations(work: Work, project: str, evaluations: Sequence[str]) -> str | None:
    if not evaluations:
        return None
    rows = sql.run(work.connection, _EVALUATIONS, {"ids": sql.array(work.connection, evaluations)})
    found = {row[0]: row[1:] for row in rows}
    for evaluation in evaluations:
        if evaluation not in found:
            return f"there is no evaluation {evaluation}"
        status, of_project = found[evaluation]
        if of_project != project:
            return f"eval:{evaluation} is not of this project"
        if status != EvaluationStatus.QUEUED:
            return f"eval:{evaluation} has started already: it is {status}"
    return None


def _check_graph(work: Work, spec: ClusterSpec, jobs: _Jobs) -> str | None:
    shared = find_shared_pin(work, [member.pin for member in spec.members])
    if shared is not None:
        return f"two members are pinned to the worker {shared!r}"
    if not jobs.derivations:
        return None
    circle = find_circle(work, list(jobs.derivations.values()))
    if circle is not None:
        return f"{circle} would have to end before another member could start, and they start together"
    if not any(member.primary for member in spec.members):
        return None
    helpers = [
        jobs.derivations[job]
        for kind, job in (split_job_key(m.job_key) for m in spec.members if not m.primary)
        if kind is JobKind.BUILD
    ]
    return find_needed_helper(work, [], helpers)
