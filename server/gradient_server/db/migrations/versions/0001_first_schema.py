"""First schema."""
# ruff: noqa: PLR0915, E501 - a list of statements, as Alembic spells them

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies the revision."""
    op.create_table(
        "cached_path",
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("nar_hash", sa.Text(), nullable=False),
        sa.Column("nar_size", sa.BigInteger(), nullable=False),
        sa.Column("file_size", sa.BigInteger(), nullable=False),
        sa.Column("compression", sa.Text(), nullable=False),
        sa.Column("object", sa.Text(), nullable=False),
        sa.Column("contains_store_dir", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("path", name=op.f("pk-cached_path")),
    )
    with op.batch_alter_table("cached_path", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-cached_path-object"), ["object"], unique=False)

    op.create_table(
        "derivation",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("drv_path", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("pname", sa.Text(), nullable=True),
        sa.Column("history_name", sa.Text(), nullable=False),
        sa.Column("system", sa.Text(), nullable=False),
        sa.Column("features", sa.JSON(), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.Column("env", sa.JSON(), nullable=False),
        sa.Column("fixed_output", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("prefer_local", sa.Boolean(), nullable=False),
        sa.Column("clustered", sa.Boolean(), nullable=False),
        sa.Column("timeout_secs", sa.Double(), nullable=True),
        sa.Column("max_silent_secs", sa.Double(), nullable=True),
        sa.Column("closure_size", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-derivation")),
        sa.UniqueConstraint("drv_path", name=op.f("uq-derivation-drv_path")),
    )
    op.create_table(
        "instance",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("advertise_url", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("stopped_at", sa.Double(), nullable=True),
        sa.Column("succeeded_by", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-instance")),
    )
    op.create_table(
        "project",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-project")),
        sa.UniqueConstraint("name", name=op.f("uq-project-name")),
    )
    op.create_table(
        "upload",
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("assignment", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("nar_hash", sa.Text(), nullable=True),
        sa.Column("nar_size", sa.BigInteger(), nullable=True),
        sa.Column("object", sa.Text(), nullable=True),
        sa.Column("file_size", sa.BigInteger(), nullable=True),
        sa.Column("compression", sa.Text(), nullable=True),
        sa.Column("references", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("committed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("request", name=op.f("pk-upload")),
    )
    with op.batch_alter_table("upload", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-upload-assignment"), ["assignment"], unique=False)
        batch_op.create_index(batch_op.f("idx-upload-lease_until"), ["lease_until"], unique=False)
        batch_op.create_index(batch_op.f("idx-upload-path"), ["path"], unique=False)

    op.create_table(
        "worker",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=True),
        sa.Column("draining_since", sa.Double(), nullable=True),
        sa.Column("draining_reason", sa.Text(), nullable=True),
        sa.Column("draining_deadline", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-worker")),
        sa.UniqueConstraint("name", name=op.f("uq-worker-name")),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=True),
        sa.Column("key_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project"], ["project.id"], name=op.f("fk-api_key-project"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-api_key")),
        sa.UniqueConstraint("key_sha256", name=op.f("uq-api_key-key_sha256")),
    )
    op.create_table(
        "cached_path_reference",
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("reference", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["path"], ["cached_path.path"], name=op.f("fk-cached_path_reference-path"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("path", "reference", name=op.f("pk-cached_path_reference")),
    )
    with op.batch_alter_table("cached_path_reference", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-cached_path_reference-reference"), ["reference"], unique=False)

    op.create_table(
        "cluster_job",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("same_zone", sa.Boolean(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("retry_budget", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "status IN ('Queued', 'Running', 'Completed', 'Failed', 'Aborted')",
            name=op.f("ck-cluster_job-status-known"),
        ),
        sa.ForeignKeyConstraint(
            ["project"], ["project.id"], name=op.f("fk-cluster_job-project"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-cluster_job")),
    )
    with op.batch_alter_table("cluster_job", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-cluster_job-finished_at"), ["finished_at"], unique=False)
        batch_op.create_index(
            "idx-cluster_job-open",
            ["status"],
            unique=False,
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )

    op.create_table(
        "derivation_build",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("derivation", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("prioritized", sa.Boolean(), nullable=False),
        sa.Column("build_request", sa.Boolean(), nullable=False),
        sa.Column("ifd", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=True),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("not_before", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("inputs_unavailable_loops", sa.Integer(), nullable=False),
        sa.Column("substitute_misses", sa.Integer(), nullable=False),
        sa.Column("oom_retries", sa.Integer(), nullable=False),
        sa.Column("peak_ram_mb", sa.BigInteger(), nullable=True),
        sa.Column("failure_kind", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("products", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("substituted", sa.Boolean(), nullable=False),
        sa.CheckConstraint(
            "status IN ('Created', 'Queued', 'Assigned', 'Completed', 'Failed', 'Aborted', 'DependencyFailed')",
            name=op.f("ck-derivation_build-status-known"),
        ),
        sa.ForeignKeyConstraint(
            ["derivation"], ["derivation.id"], name=op.f("fk-derivation_build-derivation"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-derivation_build")),
    )
    with op.batch_alter_table("derivation_build", schema=None) as batch_op:
        batch_op.create_index(
            "idx-derivation_build-current",
            ["derivation"],
            unique=True,
            sqlite_where=sa.text("status IN ('Created', 'Queued', 'Assigned', 'Completed')"),
            postgresql_where=sa.text("status IN ('Created', 'Queued', 'Assigned', 'Completed')"),
        )
        batch_op.create_index(batch_op.f("idx-derivation_build-derivation"), ["derivation"], unique=False)
        batch_op.create_index(
            "idx-derivation_build-open",
            ["status"],
            unique=False,
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )

    op.create_table(
        "derivation_dependency",
        sa.Column("derivation", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("dependency", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("runtime_only", sa.Boolean(), nullable=False),
        sa.Column("outputs", sa.JSON(), nullable=False),
        sa.Column("input_name", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["dependency"], ["derivation.id"], name=op.f("fk-derivation_dependency-dependency")
        ),
        sa.ForeignKeyConstraint(
            ["derivation"],
            ["derivation.id"],
            name=op.f("fk-derivation_dependency-derivation"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("derivation", "dependency", name=op.f("pk-derivation_dependency")),
    )
    with op.batch_alter_table("derivation_dependency", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("idx-derivation_dependency-dependency"), ["dependency"], unique=False
        )

    op.create_table(
        "derivation_metric",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("derivation", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("assignment", sa.Text(), nullable=False),
        sa.Column("history_name", sa.Text(), nullable=False),
        sa.Column("architecture", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("peak_ram_mb", sa.BigInteger(), nullable=True),
        sa.Column("anon_peak_ram_mb", sa.BigInteger(), nullable=True),
        sa.Column("peak_source", sa.Text(), nullable=True),
        sa.Column("cpu_time_ms", sa.BigInteger(), nullable=True),
        sa.Column("avg_cpu_pct", sa.Double(), nullable=True),
        sa.Column("disk_read_bytes", sa.BigInteger(), nullable=True),
        sa.Column("disk_write_bytes", sa.BigInteger(), nullable=True),
        sa.Column("build_time_ms", sa.BigInteger(), nullable=True),
        sa.Column("output_nar_size", sa.BigInteger(), nullable=True),
        sa.Column("closure_size", sa.BigInteger(), nullable=True),
        sa.Column("oom_killed", sa.Boolean(), nullable=False),
        sa.Column("concurrent_builds", sa.Integer(), nullable=False),
        sa.Column("build_cores", sa.Integer(), nullable=True),
        sa.Column("cpu_core_score", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["derivation"],
            ["derivation.id"],
            name=op.f("fk-derivation_metric-derivation"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-derivation_metric")),
        sa.UniqueConstraint("assignment", name=op.f("uq-derivation_metric-assignment")),
    )
    with op.batch_alter_table("derivation_metric", schema=None) as batch_op:
        batch_op.create_index("idx-derivation_metric-created", ["created_at"], unique=False)
        batch_op.create_index(batch_op.f("idx-derivation_metric-derivation"), ["derivation"], unique=False)
        batch_op.create_index(
            "idx-derivation_metric-history", ["history_name", "architecture", "created_at"], unique=False
        )

    op.create_table(
        "derivation_output",
        sa.Column("derivation", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("nar_hash", sa.Text(), nullable=True),
        sa.Column("nar_size", sa.BigInteger(), nullable=True),
        sa.Column("contains_store_dir", sa.Boolean(), nullable=True),
        sa.ForeignKeyConstraint(
            ["derivation"],
            ["derivation.id"],
            name=op.f("fk-derivation_output-derivation"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("derivation", "name", name=op.f("pk-derivation_output")),
    )
    with op.batch_alter_table("derivation_output", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-derivation_output-path"), ["path"], unique=False)

    op.create_table(
        "derivation_source",
        sa.Column("derivation", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["derivation"],
            ["derivation.id"],
            name=op.f("fk-derivation_source-derivation"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("derivation", "path", name=op.f("pk-derivation_source")),
    )
    op.create_table(
        "task",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("max_concurrent_evaluations", sa.Integer(), nullable=True),
        sa.Column("evaluation_timeout_secs", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["project"], ["project.id"], name=op.f("fk-task-project"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-task")),
        sa.UniqueConstraint("project", "name", name=op.f("uq-task-project_name")),
    )
    op.create_table(
        "worker_registration",
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("peer", sa.Text(), nullable=False),
        sa.Column("token_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["worker"], ["worker.id"], name=op.f("fk-worker_registration-worker"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("worker", "peer", name=op.f("pk-worker_registration")),
    )
    op.create_table(
        "build_attempt",
        sa.Column("assignment", sa.Text(), nullable=False),
        sa.Column("build", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("log_bytes", sa.BigInteger(), nullable=False),
        sa.Column("log_truncated", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["build"], ["derivation_build.id"], name=op.f("fk-build_attempt-build"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("assignment", name=op.f("pk-build_attempt")),
    )
    with op.batch_alter_table("build_attempt", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-build_attempt-build"), ["build"], unique=False)

    op.create_table(
        "cluster_attempt",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("cluster_job", sa.Text(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("report_count", sa.Integer(), nullable=False),
        sa.Column("signal_count", sa.Integer(), nullable=False),
        sa.Column("signal_bytes", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "outcome IS NULL OR outcome IN ('Succeeded', 'Failed', 'PrepareFailed', 'Aborted')",
            name=op.f("ck-cluster_attempt-outcome-known"),
        ),
        sa.ForeignKeyConstraint(
            ["cluster_job"],
            ["cluster_job.id"],
            name=op.f("fk-cluster_attempt-cluster_job"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-cluster_attempt")),
    )
    with op.batch_alter_table("cluster_attempt", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-cluster_attempt-cluster_job"), ["cluster_job"], unique=False)
        batch_op.create_index(
            "idx-cluster_attempt-open",
            ["cluster_job"],
            unique=True,
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )

    op.create_table(
        "cluster_reservation",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cluster_job", sa.Text(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("reserved_at", sa.Double(), nullable=False),
        sa.Column("seats", sa.JSON(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck-cluster_reservation-only-one")),
        sa.ForeignKeyConstraint(
            ["cluster_job"],
            ["cluster_job.id"],
            name=op.f("fk-cluster_reservation-cluster_job"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-cluster_reservation")),
        sa.UniqueConstraint("cluster_job", name=op.f("uq-cluster_reservation-cluster_job")),
    )
    op.create_table(
        "evaluation",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("source", sa.JSON(), nullable=False),
        sa.Column("source_path", sa.Text(), nullable=True),
        sa.Column("source_rev", sa.Text(), nullable=True),
        sa.Column("attrs", sa.JSON(), nullable=False),
        sa.Column("prioritized", sa.Boolean(), nullable=False),
        sa.Column("build_request", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("ready_at", sa.Double(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("walked_at", sa.Double(), nullable=True),
        sa.Column("last_progress_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("abort_requested_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "status IN ('Queued', 'Assigned', 'Building', 'Completed', 'Failed', 'Aborted')",
            name=op.f("ck-evaluation-status-known"),
        ),
        sa.ForeignKeyConstraint(
            ["project"], ["project.id"], name=op.f("fk-evaluation-project"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["task"], ["task.id"], name=op.f("fk-evaluation-task"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-evaluation")),
    )
    with op.batch_alter_table("evaluation", schema=None) as batch_op:
        batch_op.create_index(
            "idx-evaluation-open",
            ["status"],
            unique=False,
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )
        batch_op.create_index("idx-evaluation-task-created", ["task", "created_at"], unique=False)

    op.create_table(
        "build_job",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("evaluation", sa.Text(), nullable=False),
        sa.Column("derivation", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("build", sa.Text(), nullable=False),
        sa.Column("attr", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["build"], ["derivation_build.id"], name=op.f("fk-build_job-build")),
        sa.ForeignKeyConstraint(["derivation"], ["derivation.id"], name=op.f("fk-build_job-derivation")),
        sa.ForeignKeyConstraint(
            ["evaluation"], ["evaluation.id"], name=op.f("fk-build_job-evaluation"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-build_job")),
        sa.UniqueConstraint("evaluation", "derivation", name=op.f("uq-build_job-evaluation_derivation")),
    )
    with op.batch_alter_table("build_job", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-build_job-build"), ["build"], unique=False)
        batch_op.create_index(batch_op.f("idx-build_job-derivation"), ["derivation"], unique=False)
        batch_op.create_index(
            "idx-build_job-open",
            ["evaluation"],
            unique=False,
            sqlite_where=sa.text("outcome IS NULL"),
            postgresql_where=sa.text("outcome IS NULL"),
        )

    op.create_table(
        "cluster_member",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("cluster_job", sa.Text(), nullable=False),
        sa.Column("evaluation", sa.Text(), nullable=True),
        sa.Column("derivation_build", sa.Text(), nullable=True),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("primary", sa.Boolean(), nullable=False),
        sa.Column("pin", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(evaluation IS NULL) <> (derivation_build IS NULL)", name=op.f("ck-cluster_member-one-job")
        ),
        sa.ForeignKeyConstraint(
            ["cluster_job"],
            ["cluster_job.id"],
            name=op.f("fk-cluster_member-cluster_job"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["derivation_build"],
            ["derivation_build.id"],
            name=op.f("fk-cluster_member-derivation_build"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["evaluation"], ["evaluation.id"], name=op.f("fk-cluster_member-evaluation"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-cluster_member")),
        sa.UniqueConstraint(
            "cluster_job", "role", "index", name=op.f("uq-cluster_member-cluster_job_role_index")
        ),
    )
    with op.batch_alter_table("cluster_member", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-cluster_member-cluster_job"), ["cluster_job"], unique=False)
        batch_op.create_index(
            "idx-cluster_member-derivation_build",
            ["derivation_build"],
            unique=True,
            sqlite_where=sa.text("derivation_build IS NOT NULL"),
            postgresql_where=sa.text("derivation_build IS NOT NULL"),
        )
        batch_op.create_index(
            "idx-cluster_member-evaluation",
            ["evaluation"],
            unique=True,
            sqlite_where=sa.text("evaluation IS NOT NULL"),
            postgresql_where=sa.text("evaluation IS NOT NULL"),
        )

    op.create_table(
        "cluster_signal",
        sa.Column("cluster_attempt", sa.Text(), nullable=False),
        sa.Column("n", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sender_role", sa.Text(), nullable=False),
        sa.Column("sender_index", sa.Integer(), nullable=False),
        sa.Column("to_role", sa.Text(), nullable=True),
        sa.Column("to_index", sa.Integer(), nullable=True),
        sa.Column("topic", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["cluster_attempt"],
            ["cluster_attempt.id"],
            name=op.f("fk-cluster_signal-cluster_attempt"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("cluster_attempt", "n", name=op.f("pk-cluster_signal")),
    )
    op.create_table(
        "dispatched_job",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job_key", sa.Text(), nullable=False),
        sa.Column("evaluation", sa.Text(), nullable=True),
        sa.Column("derivation_build", sa.Text(), nullable=True),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("cluster_attempt", sa.Text(), nullable=True),
        sa.Column("cluster_role", sa.Text(), nullable=True),
        sa.Column("cluster_index", sa.Integer(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("assigned_at", sa.Double(), nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=True),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("refused_seq", sa.Integer(), nullable=True),
        sa.Column("held_report", sa.LargeBinary(), nullable=True),
        sa.Column("held_output", sa.LargeBinary(), nullable=True),
        sa.Column("held_order", sa.Integer(), nullable=True),
        sa.Column("lost_at", sa.Double(), nullable=True),
        sa.Column("refused_signals", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("fetch_only", sa.Boolean(), nullable=False),
        sa.Column("abort_reason", sa.Text(), nullable=True),
        sa.Column("abort_requested_at", sa.Double(), nullable=True),
        sa.Column("log_bytes", sa.BigInteger(), nullable=False),
        sa.Column("log_truncated", sa.Boolean(), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=True),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("missing_count", sa.BigInteger(), nullable=True),
        sa.Column("missing_nar_size", sa.BigInteger(), nullable=True),
        sa.Column("dependency_count", sa.Integer(), nullable=True),
        sa.Column("score_breakdown", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("spans_dropped", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "status IN ('Assigned', 'Accepted', 'Completed', 'Failed', 'Rejected', 'Abandoned')",
            name=op.f("ck-dispatched_job-status-known"),
        ),
        sa.CheckConstraint(
            "(evaluation IS NULL) <> (derivation_build IS NULL)", name=op.f("ck-dispatched_job-one-job")
        ),
        sa.ForeignKeyConstraint(
            ["cluster_attempt"],
            ["cluster_attempt.id"],
            name=op.f("fk-dispatched_job-cluster_attempt"),
            ondelete="SET NULL",
        ),
        sa.ForeignKeyConstraint(
            ["derivation_build"],
            ["derivation_build.id"],
            name=op.f("fk-dispatched_job-derivation_build"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["evaluation"], ["evaluation.id"], name=op.f("fk-dispatched_job-evaluation"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-dispatched_job")),
    )
    with op.batch_alter_table("dispatched_job", schema=None) as batch_op:
        batch_op.create_index(
            "idx-dispatched_job-evaluated",
            ["finished_at"],
            unique=False,
            sqlite_where=sa.text("evaluation IS NOT NULL"),
            postgresql_where=sa.text("evaluation IS NOT NULL"),
        )
        batch_op.create_index(
            "idx-dispatched_job-windows",
            ["assigned_at", "ready_at", "missing_nar_size", "missing_count", "dependency_count"],
            unique=False,
            sqlite_where=sa.text(
                "derivation_build IS NOT NULL AND ready_at IS NOT NULL AND cluster_role IS NULL"
            ),
            postgresql_where=sa.text(
                "derivation_build IS NOT NULL AND ready_at IS NOT NULL AND cluster_role IS NULL"
            ),
        )
        batch_op.create_index(
            batch_op.f("idx-dispatched_job-cluster_attempt"), ["cluster_attempt"], unique=False
        )
        batch_op.create_index(
            batch_op.f("idx-dispatched_job-derivation_build"), ["derivation_build"], unique=False
        )
        batch_op.create_index(batch_op.f("idx-dispatched_job-evaluation"), ["evaluation"], unique=False)
        batch_op.create_index(
            "idx-dispatched_job-open-job",
            ["job_key"],
            unique=True,
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )
        batch_op.create_index(
            "idx-dispatched_job-open-worker",
            ["worker"],
            unique=False,
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )

    op.create_table(
        "evaluation_metric",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("evaluation", sa.Text(), nullable=False),
        sa.Column("assignment", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("derivations", sa.Integer(), nullable=False),
        sa.Column("known", sa.Integer(), nullable=False),
        sa.Column("wall_ms", sa.BigInteger(), nullable=False),
        sa.Column("cpu_ms", sa.BigInteger(), nullable=False),
        sa.Column("peak_rss_mb", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["evaluation"],
            ["evaluation.id"],
            name=op.f("fk-evaluation_metric-evaluation"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-evaluation_metric")),
        sa.UniqueConstraint("assignment", name=op.f("uq-evaluation_metric-assignment")),
    )
    with op.batch_alter_table("evaluation_metric", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-evaluation_metric-evaluation"), ["evaluation"], unique=False)
        batch_op.create_index("idx-evaluation_metric-task-created", ["task", "created_at"], unique=False)

    op.create_table(
        "evaluation_note",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("evaluation", sa.Text(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["evaluation"], ["evaluation.id"], name=op.f("fk-evaluation_note-evaluation"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-evaluation_note")),
    )
    with op.batch_alter_table("evaluation_note", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-evaluation_note-evaluation"), ["evaluation"], unique=False)

    op.create_table(
        "import_request",
        sa.Column("query", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("evaluation", sa.Text(), nullable=False),
        sa.Column("assignment", sa.Text(), nullable=False),
        sa.Column("build", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["build"], ["derivation_build.id"], name=op.f("fk-import_request-build")),
        sa.ForeignKeyConstraint(
            ["evaluation"], ["evaluation.id"], name=op.f("fk-import_request-evaluation"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("query", "path", name=op.f("pk-import_request")),
    )
    with op.batch_alter_table("import_request", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("idx-import_request-assignment"), ["assignment"], unique=False)
        batch_op.create_index(batch_op.f("idx-import_request-build"), ["build"], unique=False)
        batch_op.create_index(batch_op.f("idx-import_request-evaluation"), ["evaluation"], unique=False)

    op.create_table(
        "span",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("assignment", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("start", sa.Double(), nullable=False),
        sa.Column("end", sa.Double(), nullable=False),
        sa.Column("nar_bytes", sa.BigInteger(), nullable=True),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("paths", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["assignment"], ["dispatched_job.id"], name=op.f("fk-span-assignment"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk-span")),
    )
    with op.batch_alter_table("span", schema=None) as batch_op:
        batch_op.create_index("idx-span-assignment", ["assignment", "position"], unique=False)
        batch_op.create_index(
            "idx-span-windows",
            ["kind", "end", "start", "nar_bytes", "stored_bytes", "paths"],
            unique=False,
            sqlite_where=sa.text("kind IN ('NarFetch', 'NarPush', 'Prefetch', 'SubstituteFetch')"),
            postgresql_where=sa.text("kind IN ('NarFetch', 'NarPush', 'Prefetch', 'SubstituteFetch')"),
        )


def downgrade() -> None:
    """Undoes the revision."""
    with op.batch_alter_table("span", schema=None) as batch_op:
        batch_op.drop_index("idx-span-windows")
        batch_op.drop_index("idx-span-assignment")

    op.drop_table("span")
    with op.batch_alter_table("import_request", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("idx-import_request-evaluation"))
        batch_op.drop_index(batch_op.f("idx-import_request-build"))
        batch_op.drop_index(batch_op.f("idx-import_request-assignment"))

    op.drop_table("import_request")
    with op.batch_alter_table("evaluation_note", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("idx-evaluation_note-evaluation"))

    op.drop_table("evaluation_note")
    with op.batch_alter_table("evaluation_metric", schema=None) as batch_op:
        batch_op.drop_index("idx-evaluation_metric-task-created")
        batch_op.drop_index(batch_op.f("idx-evaluation_metric-evaluation"))

    op.drop_table("evaluation_metric")
    with op.batch_alter_table("dispatched_job", schema=None) as batch_op:
        batch_op.drop_index(
            "idx-dispatched_job-open-worker",
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )
        batch_op.drop_index(
            "idx-dispatched_job-open-job",
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )
        batch_op.drop_index(batch_op.f("idx-dispatched_job-evaluation"))
        batch_op.drop_index(batch_op.f("idx-dispatched_job-derivation_build"))
        batch_op.drop_index(batch_op.f("idx-dispatched_job-cluster_attempt"))
        batch_op.drop_index("idx-dispatched_job-windows")
        batch_op.drop_index("idx-dispatched_job-evaluated")

    op.drop_table("dispatched_job")
    op.drop_table("cluster_signal")
    with op.batch_alter_table("cluster_member", schema=None) as batch_op:
        batch_op.drop_index(
            "idx-cluster_member-evaluation",
            sqlite_where=sa.text("evaluation IS NOT NULL"),
            postgresql_where=sa.text("evaluation IS NOT NULL"),
        )
        batch_op.drop_index(
            "idx-cluster_member-derivation_build",
            sqlite_where=sa.text("derivation_build IS NOT NULL"),
            postgresql_where=sa.text("derivation_build IS NOT NULL"),
        )
        batch_op.drop_index(batch_op.f("idx-cluster_member-cluster_job"))

    op.drop_table("cluster_member")
    with op.batch_alter_table("build_job", schema=None) as batch_op:
        batch_op.drop_index(
            "idx-build_job-open",
            sqlite_where=sa.text("outcome IS NULL"),
            postgresql_where=sa.text("outcome IS NULL"),
        )
        batch_op.drop_index(batch_op.f("idx-build_job-derivation"))
        batch_op.drop_index(batch_op.f("idx-build_job-build"))

    op.drop_table("build_job")
    with op.batch_alter_table("evaluation", schema=None) as batch_op:
        batch_op.drop_index("idx-evaluation-task-created")
        batch_op.drop_index(
            "idx-evaluation-open",
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )

    op.drop_table("evaluation")
    op.drop_table("cluster_reservation")
    with op.batch_alter_table("cluster_attempt", schema=None) as batch_op:
        batch_op.drop_index(
            "idx-cluster_attempt-open",
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )
        batch_op.drop_index(batch_op.f("idx-cluster_attempt-cluster_job"))

    op.drop_table("cluster_attempt")
    with op.batch_alter_table("build_attempt", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("idx-build_attempt-build"))

    op.drop_table("build_attempt")
    op.drop_table("worker_registration")
    op.drop_table("task")
    op.drop_table("derivation_source")
    with op.batch_alter_table("derivation_output", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("idx-derivation_output-path"))

    op.drop_table("derivation_output")
    with op.batch_alter_table("derivation_metric", schema=None) as batch_op:
        batch_op.drop_index("idx-derivation_metric-history")
        batch_op.drop_index(batch_op.f("idx-derivation_metric-derivation"))
        batch_op.drop_index("idx-derivation_metric-created")

    op.drop_table("derivation_metric")
    with op.batch_alter_table("derivation_dependency", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("idx-derivation_dependency-dependency"))

    op.drop_table("derivation_dependency")
    with op.batch_alter_table("derivation_build", schema=None) as batch_op:
        batch_op.drop_index(
            "idx-derivation_build-open",
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )
        batch_op.drop_index(batch_op.f("idx-derivation_build-derivation"))
        batch_op.drop_index(
            "idx-derivation_build-current",
            sqlite_where=sa.text("status IN ('Created', 'Queued', 'Assigned', 'Completed')"),
            postgresql_where=sa.text("status IN ('Created', 'Queued', 'Assigned', 'Completed')"),
        )

    op.drop_table("derivation_build")
    with op.batch_alter_table("cluster_job", schema=None) as batch_op:
        batch_op.drop_index(
            "idx-cluster_job-open",
            sqlite_where=sa.text("finished_at IS NULL"),
            postgresql_where=sa.text("finished_at IS NULL"),
        )
        batch_op.drop_index(batch_op.f("idx-cluster_job-finished_at"))

    op.drop_table("cluster_job")
    with op.batch_alter_table("cached_path_reference", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("idx-cached_path_reference-reference"))

    op.drop_table("cached_path_reference")
    op.drop_table("api_key")
    op.drop_table("worker")
    with op.batch_alter_table("upload", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("idx-upload-path"))
        batch_op.drop_index(batch_op.f("idx-upload-lease_until"))
        batch_op.drop_index(batch_op.f("idx-upload-assignment"))

    op.drop_table("upload")
    op.drop_table("project")
    op.drop_table("instance")
    op.drop_table("derivation")
    with op.batch_alter_table("cached_path", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("idx-cached_path-object"))

    op.drop_table("cached_path")
