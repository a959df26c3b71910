"""Cluster jobs (cluster-jobs.md, Tables)."""

import sqlalchemy as sa

from gradient_server.db.tables.base import BigKey, Time, check_in, metadata
from gradient_server.domain.status import AttemptOutcome, ClusterStatus

__all__ = ["cluster_attempt", "cluster_job", "cluster_member", "cluster_reservation", "cluster_signal"]

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
    sa.Column("finished_at", Time, index=True),
    check_in("status", ClusterStatus),
    sa.Index(
        "idx-cluster_job-open",
        "status",
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    ),
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
    # Why it ended so, for people: the failed prepare, or the report that decided.
    sa.Column("reason", sa.Text),
    # Final reports (and losses) stored so far: each gets its place, for the first deciding one wins.
    sa.Column("report_count", sa.Integer, nullable=False, default=0),
    # Signals stored so far, and the bytes of their payloads: `signal_count` is the last one's `n`.
    sa.Column("signal_count", sa.Integer, nullable=False, default=0),
    sa.Column("signal_bytes", sa.BigInteger, nullable=False, default=0),
    # Of a try that is to be repeated: members are stopping, at the latest until then. NULL once all have.
    sa.Column("survivors_until", Time),
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

# The one order of an attempt's signals (protocol.md, Signals).
cluster_signal = sa.Table(
    "cluster_signal",
    metadata,
    sa.Column("cluster_attempt", sa.ForeignKey("cluster_attempt.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("n", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sender_role", sa.Text, nullable=False),
    sa.Column("sender_index", sa.Integer, nullable=False),
    # NULL: for all others. `to_role` alone: for all of that role.
    sa.Column("to_role", sa.Text),
    sa.Column("to_index", sa.Integer),
    sa.Column("topic", sa.Text, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Column("created_at", Time, nullable=False),
)

# The one reservation of the pool (cluster-jobs.md, Aging Reservations).
cluster_reservation = sa.Table(
    "cluster_reservation",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column(
        "cluster_job", sa.ForeignKey("cluster_job.id", ondelete="CASCADE"), nullable=False, unique=True
    ),
    sa.Column("instance", sa.Text, nullable=False),
    sa.Column("reserved_at", Time, nullable=False),
    # {job key: worker id}
    sa.Column("seats", sa.JSON, nullable=False),
    sa.CheckConstraint("id = 1", name="only-one"),
)
