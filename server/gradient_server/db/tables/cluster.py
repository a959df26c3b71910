"""Cluster jobs (cluster-jobs.md, Tables)."""

import sqlalchemy as sa

from gradient_server.db.tables.base import BigKey, Time, check_in, metadata
from gradient_server.domain.status import AttemptOutcome, ClusterStatus

__all__ = ["cluster_attempt", "cluster_job", "cluster_member"]

cluster_job = sa.Table(
    "cluster_job",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("project", sa.ForeignKey("project.id", ondelete="CASCADE"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("same_zone", sa.Boolean, nullable=False),
    # Started attempts; Retry while `attempts <= retry_budget` (design.md).
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("retry_budget", sa.Integer, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("finished_at", Time),
    check_in("status", ClusterStatus),
)

cluster_member = sa.Table(
    "cluster_member",
    metadata,
    sa.Column("id", BigKey, primary_key=True, autoincrement=True),
    sa.Column("cluster_job", sa.ForeignKey("cluster_job.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("evaluation", sa.ForeignKey("evaluation.id", ondelete="CASCADE")),
    sa.Column("derivation_build", sa.ForeignKey("derivation_build.id", ondelete="CASCADE")),
    sa.Column("position", sa.Integer, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    # Counts from 0 within the role, in the order of the cluster's members.
    sa.Column("index", sa.Integer, nullable=False),
    sa.Column("primary", sa.Boolean, nullable=False, default=False),
    sa.Column("pin", sa.Text),
    sa.CheckConstraint("(evaluation IS NULL) <> (derivation_build IS NULL)", name="one-job"),
    sa.UniqueConstraint("cluster_job", "role", "index"),
    sa.Index(
        "idx-cluster_member-evaluation",
        "evaluation",
        unique=True,
        sqlite_where=sa.text("evaluation IS NOT NULL"),
        postgresql_where=sa.text("evaluation IS NOT NULL"),
    ),
    sa.Index(
        "idx-cluster_member-derivation_build",
        "derivation_build",
        unique=True,
        sqlite_where=sa.text("derivation_build IS NOT NULL"),
        postgresql_where=sa.text("derivation_build IS NOT NULL"),
    ),
)

cluster_attempt = sa.Table(
    "cluster_attempt",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("cluster_job", sa.ForeignKey("cluster_job.id", ondelete="CASCADE"), nullable=False, index=True),
    # The server instance that claimed it: an attempt lives whole on one instance.
    sa.Column("instance", sa.Text, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    # Unset until every member accepted.
    sa.Column("started_at", Time),
    sa.Column("finished_at", Time),
    sa.Column("outcome", sa.Text),
    sa.CheckConstraint(
        "outcome IS NULL OR outcome IN (" + ", ".join(f"'{outcome}'" for outcome in AttemptOutcome) + ")",
        name="outcome-known",
    ),
    sa.Index(
        "idx-cluster_attempt-open",
        "cluster_job",
        unique=True,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    ),
)
