"""Assignments, and what is recorded of them: reports, spans, metrics."""

import sqlalchemy as sa

from gradient_server.db.tables.base import BigKey, Time, check_in, metadata
from gradient_server.domain.status import AssignmentStatus

__all__ = ["WINDOW_SPANS", "derivation_metric", "dispatched_job", "evaluation_metric", "span"]

# The kinds of span that the instance windows read, as an SQL list (scoring.md, "Instance Windows").
WINDOW_SPANS = "'NarFetch', 'NarPush', 'Prefetch', 'SubstituteFetch'"
_WAITED = "derivation_build IS NOT NULL AND ready_at IS NOT NULL AND cluster_role IS NULL"

dispatched_job = sa.Table(
    "dispatched_job",
    metadata,
    # The assignment's id on the wire.
    sa.Column("id", sa.Text, primary_key=True),
    # `eval:<evaluation>` or `build:<shared build>`.
    sa.Column("job_key", sa.Text, nullable=False),
    sa.Column("evaluation", sa.ForeignKey("evaluation.id", ondelete="CASCADE"), index=True),
    sa.Column("derivation_build", sa.ForeignKey("derivation_build.id", ondelete="CASCADE"), index=True),
    sa.Column("worker", sa.Text, nullable=False),
    # The server instance that owns the assignment; every write about it names the owner.
    sa.Column("instance", sa.Text, nullable=False),
    sa.Column("cluster_attempt", sa.ForeignKey("cluster_attempt.id", ondelete="SET NULL"), index=True),
    sa.Column("cluster_role", sa.Text),
    sa.Column("cluster_index", sa.Integer),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("assigned_at", Time, nullable=False),
    sa.Column("accepted_at", Time),
    sa.Column("finished_at", Time),
    # The last numbered report that is applied (or, of a member, stored).
    sa.Column("last_seq", sa.Integer, nullable=False, default=0),
    # A report under this number was refused: what follows is dropped until JobFailed arrives.
    sa.Column("refused_seq", sa.Integer),
    # A cluster member's final report, whole, until the verdict (protocol.md, Reports).
    sa.Column("held_report", sa.LargeBinary),
    # Its BuildOutput, which waits for the same verdict.
    sa.Column("held_output", sa.LargeBinary),
    # The place of the stored report among those of its attempt: the first deciding one wins.
    sa.Column("held_order", sa.Integer),
    # A member that the server declared lost; its `held_report` was made up for the verdict.
    sa.Column("lost_at", Time),
    # Signals of it that were refused last, by `seq`, so that a repeated one is answered the same.
    sa.Column("refused_signals", sa.JSON(none_as_null=True)),
    # The fetch half of a split evaluation: its success queues the other half.
    sa.Column("fetch_only", sa.Boolean, nullable=False, default=False),
    sa.Column("abort_reason", sa.Text),
    sa.Column("abort_requested_at", Time),
    sa.Column("log_bytes", sa.BigInteger, nullable=False, default=0),
    sa.Column("log_truncated", sa.Boolean, nullable=False, default=False),
    # As the job was when it was assigned: the instance windows read these (scoring.md).
    sa.Column("queued_at", Time),
    sa.Column("ready_at", Time),
    sa.Column("missing_count", sa.BigInteger),
    sa.Column("missing_nar_size", sa.BigInteger),
    sa.Column("dependency_count", sa.Integer),
    sa.Column("score_breakdown", sa.JSON(none_as_null=True)),
    sa.Column("spans_dropped", sa.Integer, nullable=False, default=0),
    sa.CheckConstraint("(evaluation IS NULL) <> (derivation_build IS NULL)", name="one-job"),
    check_in("status", AssignmentStatus),
    sa.Index(
        "idx-dispatched_job-open-job",
        "job_key",
        unique=True,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    ),
    sa.Index(
        "idx-dispatched_job-open-worker",
        "worker",
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    ),
    # What the windows average, whole: rows are wide, and a day has many.
    sa.Index(
        "idx-dispatched_job-windows",
        "assigned_at",
        "ready_at",
        "missing_nar_size",
        "missing_count",
        "dependency_count",
        sqlite_where=sa.text(_WAITED),
        postgresql_where=sa.text(_WAITED),
    ),
    sa.Index(
        "idx-dispatched_job-evaluated",
        "finished_at",
        sqlite_where=sa.text("evaluation IS NOT NULL"),
        postgresql_where=sa.text("evaluation IS NOT NULL"),
    ),
)

span = sa.Table(
    "span",
    metadata,
    sa.Column("id", BigKey, primary_key=True, autoincrement=True),
    sa.Column("assignment", sa.ForeignKey("dispatched_job.id", ondelete="CASCADE"), nullable=False),
    # The place in the report's list, which `parent` counts in.
    sa.Column("position", sa.Integer, nullable=False),
    sa.Column("parent", sa.Integer),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("start", Time, nullable=False),
    sa.Column("end", Time, nullable=False),
    sa.Column("nar_bytes", sa.BigInteger),
    sa.Column("stored_bytes", sa.BigInteger),
    sa.Column("paths", sa.Integer),
    sa.Index("idx-span-assignment", "assignment", "position"),
    sa.Index(
        "idx-span-windows",
        "kind",
        "end",
        "start",
        "nar_bytes",
        "stored_bytes",
        "paths",
        sqlite_where=sa.text(f"kind IN ({WINDOW_SPANS})"),
        postgresql_where=sa.text(f"kind IN ({WINDOW_SPANS})"),
    ),
)

# One row a real build (scoring.md, History and Closure Size).
derivation_metric = sa.Table(
    "derivation_metric",
    metadata,
    sa.Column("id", BigKey, primary_key=True, autoincrement=True),
    sa.Column("derivation", sa.ForeignKey("derivation.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("assignment", sa.Text, nullable=False, unique=True),
    sa.Column("history_name", sa.Text, nullable=False),
    sa.Column("architecture", sa.Text, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("peak_ram_mb", sa.BigInteger),
    sa.Column("anon_peak_ram_mb", sa.BigInteger),
    sa.Column("peak_source", sa.Text),
    sa.Column("cpu_time_ms", sa.BigInteger),
    sa.Column("avg_cpu_pct", Time),
    sa.Column("disk_read_bytes", sa.BigInteger),
    sa.Column("disk_write_bytes", sa.BigInteger),
    sa.Column("build_time_ms", sa.BigInteger),
    sa.Column("output_nar_size", sa.BigInteger),
    sa.Column("closure_size", sa.BigInteger),
    sa.Column("oom_killed", sa.Boolean, nullable=False),
    sa.Column("concurrent_builds", sa.Integer, nullable=False),
    sa.Column("build_cores", sa.Integer),
    sa.Column("cpu_core_score", Time),
    sa.Index("idx-derivation_metric-history", "history_name", "architecture", "created_at"),
    sa.Index("idx-derivation_metric-created", "created_at"),
)

evaluation_metric = sa.Table(
    "evaluation_metric",
    metadata,
    sa.Column("id", BigKey, primary_key=True, autoincrement=True),
    sa.Column("evaluation", sa.ForeignKey("evaluation.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("assignment", sa.Text, nullable=False, unique=True),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("derivations", sa.Integer, nullable=False),
    sa.Column("known", sa.Integer, nullable=False),
    sa.Column("wall_ms", sa.BigInteger, nullable=False),
    sa.Column("cpu_ms", sa.BigInteger, nullable=False),
    sa.Column("peak_rss_mb", sa.BigInteger),
    sa.Index("idx-evaluation_metric-task-created", "task", "created_at"),
)
