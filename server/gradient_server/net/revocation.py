"""Which assignments a worker may no longer have once some of its peers are gone."""

import sqlalchemy as sa
from gradient_protocol.kinds import JobKind

from gradient_server.db.queries.claims import OpenAssignment, open_assignments
from gradient_server.db.tables import build_job, evaluation
from gradient_server.domain.job import split_job_key

__all__ = ["assignments_without_leave"]


def assignments_without_leave(
    connection: sa.Connection, worker_id: str, projects: frozenset[str] | None
) -> list[str]:
    """The worker's open assignments that none of `projects` wants (None: a base worker may have all)."""
    if projects is None:
        return []
    opened = open_assignments(connection, worker_id=worker_id)
    return [
        assignment.assignment_id
        for assignment in opened
        if projects.isdisjoint(_wanting(connection, assignment))
    ]


def _wanting(connection: sa.Connection, assignment: OpenAssignment) -> list[str]:
    kind, job = split_job_key(assignment.job_key)
    query = sa.select(evaluation.c.project).distinct()
    if kind is JobKind.EVAL:
        query = query.where(evaluation.c.id == job)
    else:
        wish = build_job.c
        query = query.join(build_job, wish.evaluation == evaluation.c.id)
        query = query.where(wish.build == job, wish.outcome.is_(None))
    return list(connection.scalars(query))
