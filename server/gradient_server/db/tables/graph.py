"""The job graph: evaluations, derivations, and the builds they share."""

import sqlalchemy as sa

from gradient_server.db.tables.base import BigKey, Time, check_in, metadata
from gradient_server.domain.status import BuildStatus, EvaluationStatus

__all__ = [
    "build_attempt",
    "build_job",
    "derivation",
    "derivation_build",
    "derivation_dependency",
    "derivation_output",
    "derivation_source",
    "evaluation",
    "evaluation_note",
    "import_request",
]

# The derivation's current build is one of these; a build that ended otherwise gets a new row when
# somebody asks again (operations.md, "Submitting the same tree again").
CURRENT_BUILD = "status IN ('Created', 'Queued', 'Assigned', 'Completed')"

evaluation = sa.Table(
    "evaluation",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("project", sa.ForeignKey("project.id", ondelete="CASCADE"), nullable=False),
    sa.Column("task", sa.ForeignKey("task.id", ondelete="CASCADE"), nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    # The wire's `source` as JSON; `source_path` once it is a store path that the server holds.
    sa.Column("source", sa.JSON, nullable=False),
    sa.Column("source_path", sa.Text, index=True),
    sa.Column("source_rev", sa.Text),
    sa.Column("attrs", sa.JSON, nullable=False),
    sa.Column("prioritized", sa.Boolean, nullable=False, default=False),
    # Asked for by a person (`gradient build`), not by a schedule: QosRule.
    sa.Column("build_request", sa.Boolean, nullable=False, default=True),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("queued_at", Time, nullable=False),
    sa.Column("ready_at", Time, nullable=False),
    sa.Column("not_before", Time),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    # When the evaluation job itself ended; the graph is complete from then on.
    sa.Column("walked_at", Time),
    sa.Column("last_progress_at", Time),
    sa.Column("finished_at", Time),
    sa.Column("abort_requested_at", Time),
    sa.Column("error", sa.Text),
    check_in("status", EvaluationStatus),
    sa.Index(
        "idx-evaluation-open",
        "status",
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    ),
    sa.Index("idx-evaluation-task-created", "task", "created_at"),
)

evaluation_note = sa.Table(
    "evaluation_note",
    metadata,
    sa.Column("id", BigKey, primary_key=True, autoincrement=True),
    sa.Column("evaluation", sa.ForeignKey("evaluation.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("level", sa.Text, nullable=False),
    sa.Column("source", sa.Text),
    sa.Column("message", sa.Text, nullable=False),
)

derivation = sa.Table(
    "derivation",
    metadata,
    sa.Column("id", BigKey, primary_key=True, autoincrement=True),
    sa.Column("drv_path", sa.Text, nullable=False, unique=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("pname", sa.Text),
    # pname, else name: what the build history is kept under (scoring.md, History).
    sa.Column("history_name", sa.Text, nullable=False),
    sa.Column("system", sa.Text, nullable=False),
    sa.Column("features", sa.JSON, nullable=False),
    sa.Column("command", sa.JSON, nullable=False),
    sa.Column("env", sa.JSON, nullable=False),
    sa.Column("fixed_output", sa.JSON(none_as_null=True)),
    sa.Column("prefer_local", sa.Boolean, nullable=False),
    # It, or something that it needs, is a member of a recipe's cluster.
    sa.Column("clustered", sa.Boolean, nullable=False, default=False),
    sa.Column("timeout_secs", Time),
    sa.Column("max_silent_secs", Time),
    sa.Column("closure_size", sa.BigInteger),
    sa.Column("created_at", Time, nullable=False),
    # When a walk was last told that it is known, to the hour: such a walk builds upon it.
    sa.Column("used_at", Time),
)

derivation_output = sa.Table(
    "derivation_output",
    metadata,
    sa.Column("derivation", sa.ForeignKey("derivation.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("position", sa.Integer, nullable=False),
    sa.Column("path", sa.Text, nullable=False, index=True),
    # As built; NULL until the first build.
    sa.Column("nar_hash", sa.Text),
    sa.Column("nar_size", sa.BigInteger),
    # It names the directory of the store it was built in, so it may not work elsewhere.
    sa.Column("contains_store_dir", sa.Boolean),
)

# An edge: `derivation` needs `dependency`. A runtime-only edge does not hold the build back.
derivation_dependency = sa.Table(
    "derivation_dependency",
    metadata,
    sa.Column("derivation", sa.ForeignKey("derivation.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("dependency", sa.ForeignKey("derivation.id"), primary_key=True, index=True),
    sa.Column("runtime_only", sa.Boolean, nullable=False),
    sa.Column("outputs", sa.JSON, nullable=False),
    # The name that the input's environment variable is made from.
    sa.Column("input_name", sa.Text),
)

derivation_source = sa.Table(
    "derivation_source",
    metadata,
    sa.Column("derivation", sa.ForeignKey("derivation.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("path", sa.Text, primary_key=True, index=True),
)

# The shared build: one row serves every evaluation that wants the derivation.
derivation_build = sa.Table(
    "derivation_build",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("derivation", sa.ForeignKey("derivation.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("prioritized", sa.Boolean, nullable=False, default=False),
    sa.Column("build_request", sa.Boolean, nullable=False, default=False),
    # An evaluation waits on this build for an import (QosRule, IFD).
    sa.Column("ifd", sa.Boolean, nullable=False, default=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("queued_at", Time),
    # The moment the dependencies finished (WaitTimeRule measures from here).
    sa.Column("ready_at", Time),
    # Backoff after a transient failure.
    sa.Column("not_before", Time),
    sa.Column("finished_at", Time),
    # Attempts used; an abandoned or canceled assignment uses none.
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("inputs_unavailable_loops", sa.Integer, nullable=False, default=0),
    sa.Column("substitute_misses", sa.Integer, nullable=False, default=0),
    sa.Column("oom_retries", sa.Integer, nullable=False, default=0),
    # Largest peak seen in a killed or lost build of this row (policies.md, History).
    sa.Column("peak_ram_mb", sa.BigInteger),
    sa.Column("failure_kind", sa.Text),
    sa.Column("error", sa.Text),
    # What the build made that is worth naming to people (BuildOutput), as the wire's list.
    sa.Column("products", sa.JSON(none_as_null=True)),
    # Completed because a worker held the outputs already.
    sa.Column("substituted", sa.Boolean, nullable=False, default=False),
    check_in("status", BuildStatus),
    sa.Index(
        "idx-derivation_build-current",
        "derivation",
        unique=True,
        sqlite_where=sa.text(CURRENT_BUILD),
        postgresql_where=sa.text(CURRENT_BUILD),
    ),
    sa.Index(
        "idx-derivation_build-open",
        "status",
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    ),
)

# What one evaluation wants: a derivation, and the shared build that serves it.
build_job = sa.Table(
    "build_job",
    metadata,
    sa.Column("id", BigKey, primary_key=True, autoincrement=True),
    sa.Column("evaluation", sa.ForeignKey("evaluation.id", ondelete="CASCADE"), nullable=False),
    sa.Column("derivation", sa.ForeignKey("derivation.id"), nullable=False, index=True),
    sa.Column("build", sa.ForeignKey("derivation_build.id"), nullable=False, index=True),
    # The attribute that was asked for; NULL for what is only needed by others.
    sa.Column("attr", sa.Text),
    # The build's final status as far as this evaluation is concerned; NULL while open.
    sa.Column("outcome", sa.Text),
    sa.Column("finished_at", Time),
    sa.UniqueConstraint("evaluation", "derivation"),
    sa.Index(
        "idx-build_job-open",
        "evaluation",
        sqlite_where=sa.text("outcome IS NULL"),
        postgresql_where=sa.text("outcome IS NULL"),
    ),
)

# One try of a build on a worker. Its log is kept under the assignment's id.
build_attempt = sa.Table(
    "build_attempt",
    metadata,
    sa.Column("assignment", sa.Text, primary_key=True),
    sa.Column("build", sa.ForeignKey("derivation_build.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("worker", sa.Text, nullable=False),
    sa.Column("started_at", Time, nullable=False),
    sa.Column("finished_at", Time, nullable=False),
    # `Completed`, or the failure kind; `Lost` where the worker went with it.
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("log_bytes", sa.BigInteger, nullable=False, default=0),
    sa.Column("log_truncated", sa.Boolean, nullable=False, default=False),
)

# An evaluation waits for outputs that it reads (`import`). One row a path.
import_request = sa.Table(
    "import_request",
    metadata,
    sa.Column("query", sa.Text, primary_key=True),
    sa.Column("path", sa.Text, primary_key=True),
    sa.Column("evaluation", sa.ForeignKey("evaluation.id", ondelete="CASCADE"), nullable=False, index=True),
    sa.Column("assignment", sa.Text, nullable=False, index=True),
    sa.Column("build", sa.ForeignKey("derivation_build.id"), index=True),
    sa.Column("created_at", Time, nullable=False),
    # NULL while waiting; then `ready`, or the reason of the failure.
    sa.Column("result", sa.Text),
)
