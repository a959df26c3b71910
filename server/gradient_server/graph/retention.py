"""The hourly retention pass over clusters (cluster-jobs.md, Tables).

A cluster that has ended is deleted once it is older than `retentionDays`, or at once where garbage
collection has removed its members; one that has not ended never is. Its member rows stay, as plain
telemetry.
"""

from typing import Final

import sqlalchemy as sa

from gradient_server.db.queries.signals import delete_old_signals
from gradient_server.db.queries.uploads import delete_stranded_uploads
from gradient_server.domain.events import Event, ObjectUnused
from gradient_server.graph import sql

__all__ = ["DAY_SECS", "delete_empty_clusters", "delete_old_clusters", "run_retention"]

DAY_SECS: Final = 86_400.0
# Nobody can receive the signals of an attempt that is over; kept a while for who looks into it.
_SIGNALS_KEPT_SECS: Final = DAY_SECS
# A pass deletes at most so many: its transaction holds up the others.
_MAX_CLUSTERS: Final = 1_000

_DELETE = sql.statement(
    "DELETE FROM cluster_job WHERE id IN (SELECT c.id FROM cluster_job c"
    " WHERE c.finished_at IS NOT NULL AND c.status IN ('Completed', 'Failed', 'Aborted')"
    " AND (c.finished_at < :before OR NOT EXISTS"
    "  (SELECT 1 FROM cluster_member m WHERE m.cluster_job = c.id)) ORDER BY c.finished_at LIMIT :many)"
    " RETURNING id"
)
_DELETE_EMPTY = sql.statement(
    "DELETE FROM cluster_job WHERE finished_at IS NOT NULL AND NOT EXISTS"
    " (SELECT 1 FROM cluster_member m WHERE m.cluster_job = cluster_job.id) RETURNING id"
)


def delete_empty_clusters(connection: sa.Connection) -> list[str]:
    """Deletes ended clusters whose members are all gone: for garbage collection, in its own transaction."""
    return [row[0] for row in sql.run(connection, _DELETE_EMPTY)]


def delete_old_clusters(connection: sa.Connection, *, retention_days: float, now: float) -> list[str]:
    """Deletes what may go, the oldest first, at most 1,000 at a time; their ids."""
    parameters = {"before": now - retention_days * DAY_SECS, "many": _MAX_CLUSTERS}
    return [row[0] for row in sql.run(connection, _DELETE, parameters)]


def run_retention(connection: sa.Connection, *, retention_days: float, now: float) -> tuple[int, list[Event]]:
    """The pass: clusters, signals of attempts long over, uploads that no verdict will take.

    How many clusters went: 0, and it is over.
    """
    sql.lock_graph(connection)
    gone = delete_old_clusters(connection, retention_days=retention_days, now=now)
    delete_old_signals(connection, finished_before=now - _SIGNALS_KEPT_SECS)
    return len(gone), [ObjectUnused(name) for name in delete_stranded_uploads(connection)]
