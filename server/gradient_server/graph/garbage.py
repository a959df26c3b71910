"""Garbage collection of the graph: evaluations past `retentionDays`, then what nobody wants any more.

What refers to something keeps it, from the top down: evaluations keep derivations (each wishes the
whole closure of what it asked for), derivations keep those that they depend on, their builds, their
sources and their outputs, and a path keeps what it refers to. Clusters, running jobs, imports and
uploads keep what is theirs. So an active evaluation, and whatever it may still ask for, is never
touched, whenever a pass ends and the next one begins.

Each function takes away one batch in the caller's transaction, which is to be short. `*_window`
looks, for a reader; what it finds is looked at once more by the function that deletes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from gradient_server.db.queries.cached_paths import forget_path
from gradient_server.domain.events import Event, ObjectUnused
from gradient_server.graph import sql
from gradient_server.graph.retention import delete_empty_clusters

__all__ = [
    "Window",
    "delete_derivations",
    "delete_evaluations",
    "delete_paths",
    "derivation_window",
    "old_evaluations",
    "path_window",
]

_MAX_EVALUATIONS = 20
_MAX_WISHES = 5_000
_WINDOW = 2_000
# Rows of one derivation or path and of what goes with it are few, but not one.
_MAX_AT_ONCE = 500

_OLD_EVALUATIONS = sql.statement(
    "SELECT v.id FROM evaluation v WHERE v.finished_at < :before"
    " AND NOT EXISTS (SELECT 1 FROM dispatched_job a WHERE a.evaluation = v.id AND a.finished_at IS NULL)"
    " AND NOT EXISTS (SELECT 1 FROM cluster_member m JOIN cluster_job c ON c.id = m.cluster_job"
    "  WHERE m.evaluation = v.id AND c.finished_at IS NULL)"
    " ORDER BY v.id LIMIT :many"
)
_DELETE_WISHES = sql.statement(
    "DELETE FROM build_job WHERE id IN"
    " (SELECT j.id FROM build_job j WHERE j.evaluation IN [evaluations] LIMIT :many) RETURNING id"
)
_DELETE_EVALUATIONS = sql.statement("DELETE FROM evaluation WHERE id IN [evaluations]")

# A build that something other than its derivation still holds on to.
_HELD_BUILD = (
    "EXISTS (SELECT 1 FROM build_job j WHERE j.build = b.id)"
    " OR EXISTS (SELECT 1 FROM cluster_member m WHERE m.derivation_build = b.id)"
    " OR EXISTS (SELECT 1 FROM import_request r WHERE r.build = b.id)"
    " OR EXISTS (SELECT 1 FROM dispatched_job a WHERE a.derivation_build = b.id AND a.finished_at IS NULL)"
)
_IS_GARBAGE = (
    "COALESCE(d.used_at, d.created_at) < :before"  # noqa: S608 - own words only
    " AND NOT EXISTS (SELECT 1 FROM derivation_dependency e WHERE e.dependency = d.id)"
    " AND NOT EXISTS (SELECT 1 FROM build_job w WHERE w.derivation = d.id)"
    " AND NOT EXISTS (SELECT 1 FROM derivation_build b WHERE b.derivation = d.id"
    f"  AND (b.finished_at IS NULL OR b.finished_at >= :before OR {_HELD_BUILD}))"
)
# Of derivations that stay: what ended otherwise than by success, and nobody waits to hear of.
_OLD_BUILDS = (
    "b.status IN ('Failed', 'Aborted', 'DependencyFailed') AND b.finished_at < :before"
    f" AND NOT ({_HELD_BUILD})"
)
_DERIVATION_WINDOW = sql.statement(
    "SELECT d.id FROM derivation d WHERE d.id < :below ORDER BY d.id DESC LIMIT :many"
)
_GARBAGE = sql.statement(
    f"SELECT d.id FROM derivation d WHERE d.id IN [ids] AND {_IS_GARBAGE} ORDER BY d.id DESC LIMIT :many"  # noqa: S608 - own words only
)
_BUILD_GARBAGE = sql.statement(
    f"SELECT b.id FROM derivation_build b WHERE b.derivation IN [ids] AND {_OLD_BUILDS}"  # noqa: S608 - own words only
    " ORDER BY b.id LIMIT :many"
)
_DELETE_DERIVATIONS = sql.statement("DELETE FROM derivation WHERE id IN [ids]")
_DELETE_BUILDS = sql.statement("DELETE FROM derivation_build WHERE id IN [ids]")

_PATH_WINDOW = sql.statement("SELECT path FROM cached_path WHERE path > :above ORDER BY path LIMIT :many")
_PATH_GARBAGE = sql.statement(
    "SELECT p.path FROM cached_path p WHERE p.path IN [paths] AND p.used_at < :before"
    " AND NOT EXISTS (SELECT 1 FROM derivation_output o WHERE o.path = p.path)"
    " AND NOT EXISTS (SELECT 1 FROM derivation_source s WHERE s.path = p.path)"
    " AND NOT EXISTS (SELECT 1 FROM evaluation v WHERE v.source_path = p.path)"
    " AND NOT EXISTS (SELECT 1 FROM upload u WHERE u.path = p.path AND NOT u.committed)"
    " AND NOT EXISTS"
    "  (SELECT 1 FROM cached_path_reference r WHERE r.reference = p.path AND r.path <> p.path)"
    " ORDER BY p.path LIMIT :many"
)
_REFERENCES = sql.statement(
    "SELECT DISTINCT reference FROM cached_path_reference WHERE path IN [paths] ORDER BY reference"
)


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a table. `last`: where the next one begins, None after the end; `garbage`: ids in it."""

    last: int | str | None
    garbage: tuple[int | str, ...]


def old_evaluations(connection: sa.Connection, *, before: float) -> list[str]:
    """Some that ended before `before` and that nothing holds on to, the oldest first."""
    rows = sql.run(connection, _OLD_EVALUATIONS, {"before": before, "many": _MAX_EVALUATIONS})
    return [row[0] for row in rows]


def delete_evaluations(connection: sa.Connection, *, before: float) -> int:
    """Deletes some of them with their wishes, and clusters that lose their last member. 0: none is left."""
    sql.lock_graph(connection)
    found = old_evaluations(connection, before=before)
    if not found:
        return 0
    evaluations = sql.array(connection, found)
    parameters = {"evaluations": evaluations, "many": _MAX_WISHES}
    if len(sql.run(connection, _DELETE_WISHES, parameters)) == _MAX_WISHES:
        return _MAX_WISHES  # the rest of them in a transaction of its own
    sql.run(connection, _DELETE_EVALUATIONS, {"evaluations": evaluations})
    delete_empty_clusters(connection)
    return len(found)


def derivation_window(connection: sa.Connection, *, below: int, before: float) -> Window:
    """The next stretch, from the newest on: a derivation comes after those that depend on it."""
    rows = sql.run(connection, _DERIVATION_WINDOW, {"below": below, "many": _WINDOW})
    ids = [row[0] for row in rows]
    if not ids:
        return Window(None, ())
    parameters = {"ids": sql.array(connection, ids), "before": before, "many": 1}
    found = sql.run(connection, _GARBAGE, parameters) or sql.run(connection, _BUILD_GARBAGE, parameters)
    return Window(ids[-1], tuple(ids) if found else ())


def delete_derivations(connection: sa.Connection, ids: Sequence[int], *, before: float) -> int:
    """Deletes what is garbage among these, with builds, attempts, spans and metrics, and old builds of
    those that stay. How many rows; 0: none is left.
    """
    sql.lock_graph(connection)
    parameters = {"ids": sql.array(connection, ids), "before": before, "many": _MAX_AT_ONCE}
    builds = [row[0] for row in sql.run(connection, _BUILD_GARBAGE, parameters)]
    if builds:
        sql.run(connection, _DELETE_BUILDS, {"ids": sql.array(connection, builds)})
    derivations = [row[0] for row in sql.run(connection, _GARBAGE, parameters)]
    if derivations:
        sql.run(connection, _DELETE_DERIVATIONS, {"ids": sql.array(connection, derivations)})
    return len(builds) + len(derivations)


def path_window(connection: sa.Connection, *, above: str, before: float) -> Window:
    """The next stretch of the NAR store's paths."""
    rows = sql.run(connection, _PATH_WINDOW, {"above": above, "many": _WINDOW})
    paths = [row[0] for row in rows]
    if not paths:
        return Window(None, ())
    parameters = {"paths": sql.array(connection, paths), "before": before, "many": _WINDOW}
    return Window(paths[-1], tuple(row[0] for row in sql.run(connection, _PATH_GARBAGE, parameters)))


def delete_paths(
    connection: sa.Connection, paths: Sequence[str], *, before: float
) -> tuple[tuple[list[str], int], list[Event]]:
    """Deletes what is garbage among these. What is to be looked at next (the rest, and what the deleted
    referred to), how many went, and the objects to be deleted after the commit.
    """
    sql.lock_graph(connection)
    parameters = {"paths": sql.array(connection, paths), "before": before, "many": _MAX_AT_ONCE}
    gone = [row[0] for row in sql.run(connection, _PATH_GARBAGE, parameters)]
    if not gone:
        return ([], 0), []
    rows = sql.run(connection, _REFERENCES, {"paths": sql.array(connection, gone)})
    objects = [forget_path(connection, path) for path in gone]
    events: list[Event] = [ObjectUnused(name) for name in objects if name is not None]
    rest = paths if len(gone) == _MAX_AT_ONCE else ()
    return (sorted({*rest, *(row[0] for row in rows)}.difference(gone)), len(gone)), events
