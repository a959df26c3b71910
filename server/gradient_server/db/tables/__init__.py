"""The schema, one module a concern. Import `metadata` for all of it."""

from gradient_server.db.tables.base import metadata
from gradient_server.db.tables.cluster import (
    cluster_attempt,
    cluster_job,
    cluster_member,
    cluster_reservation,
    cluster_signal,
)
from gradient_server.db.tables.dispatch import derivation_metric, dispatched_job, evaluation_metric, span
from gradient_server.db.tables.graph import (
    build_attempt,
    build_job,
    derivation,
    derivation_build,
    derivation_dependency,
    derivation_output,
    derivation_source,
    evaluation,
    evaluation_note,
    import_request,
)
from gradient_server.db.tables.registry import (
    api_key,
    instance,
    project,
    task,
    worker,
    worker_registration,
)
from gradient_server.db.tables.storage import cached_path, cached_path_reference, upload

__all__ = [
    "api_key",
    "build_attempt",
    "build_job",
    "cached_path",
    "cached_path_reference",
    "cluster_attempt",
    "cluster_job",
    "cluster_member",
    "cluster_reservation",
    "cluster_signal",
    "derivation",
    "derivation_build",
    "derivation_dependency",
    "derivation_metric",
    "derivation_output",
    "derivation_source",
    "dispatched_job",
    "evaluation",
    "evaluation_metric",
    "evaluation_note",
    "import_request",
    "instance",
    "metadata",
    "project",
    "span",
    "task",
    "upload",
    "worker",
    "worker_registration",
]
