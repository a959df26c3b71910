"""Who may work and who may ask: projects, tasks, keys, workers, server instances."""

import sqlalchemy as sa

from gradient_server.db.tables.base import Time, metadata

__all__ = ["api_key", "instance", "project", "task", "worker", "worker_registration"]

project = sa.Table(
    "project",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", Time, nullable=False),
)

# History and limits of evaluations are kept per task of a project.
task = sa.Table(
    "task",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("project", sa.ForeignKey("project.id", ondelete="CASCADE"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    # At most this many evaluations of the task run at once; the others wait. NULL: no limit.
    sa.Column("max_concurrent_evaluations", sa.Integer),
    sa.Column("evaluation_timeout_secs", Time),
    sa.UniqueConstraint("project", "name"),
)

api_key = sa.Table(
    "api_key",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    # NULL: a key of the server itself, good for every project.
    sa.Column("project", sa.ForeignKey("project.id", ondelete="CASCADE")),
    sa.Column("key_sha256", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("revoked_at", Time),
)

worker = sa.Table(
    "worker",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("last_seen_at", Time),
    # Set while an operator drains the worker (operations.md, `gradient worker drain`).
    sa.Column("draining_since", Time),
    sa.Column("draining_reason", sa.Text),
    sa.Column("draining_deadline", Time),
)

# A peer is what registers a worker: a project's id, or `server` for a base worker (protocol.md).
worker_registration = sa.Table(
    "worker_registration",
    metadata,
    sa.Column("worker", sa.ForeignKey("worker.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("peer", sa.Text, primary_key=True),
    sa.Column("token_sha256", sa.LargeBinary, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("revoked_at", Time),
)

instance = sa.Table(
    "instance",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("advertise_url", sa.Text),
    sa.Column("started_at", Time, nullable=False),
    sa.Column("heartbeat_at", Time, nullable=False),
    sa.Column("stopped_at", Time),
    # The one successor that took over what this instance owned (protocol.md, Several instances).
    sa.Column("succeeded_by", sa.Text),
)
