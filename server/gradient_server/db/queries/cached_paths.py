"""What the NAR store holds: one row a path, the object that has its contents, and its references."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from gradient_protocol.kinds import Compression

from gradient_server.db.hot import HotStatement, array_of, execute_text, texts_in
from gradient_server.db.queries.upsert import insert_or_ignore
from gradient_server.db.tables import cached_path, cached_path_reference, upload

__all__ = [
    "CachedPath",
    "closure",
    "closure_missing",
    "forget_path",
    "get_paths",
    "held_paths",
    "object_in_use",
    "put_path",
    "stale_paths",
    "touch_paths",
]

# Used again within this, a path is not noted again: garbage collection looks at days.
_NOTED_FOR_SECS = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPath:
    """A path that the server holds. `nar_*` are of the uncompressed NAR, sizes in bytes."""

    path: str
    nar_hash: str
    nar_size: int
    file_size: int
    compression: Compression
    object: str
    references: tuple[str, ...]
    contains_store_dir: bool = False


_PUT = HotStatement(
    """
INSERT INTO cached_path
    (path, nar_hash, nar_size, file_size, compression, object, contains_store_dir, created_at, used_at)
VALUES
    (:path, :nar_hash, :nar_size, :file_size, :compression, :object,
     CAST(:contains_store_dir AS INTEGER) = 1, :now, :now)
ON CONFLICT (path) DO UPDATE SET
    nar_hash = excluded.nar_hash, nar_size = excluded.nar_size, file_size = excluded.file_size,
    compression = excluded.compression, object = excluded.object,
    contains_store_dir = excluded.contains_store_dir, used_at = excluded.used_at
"""
)
_OBJECT = HotStatement("SELECT object FROM cached_path WHERE path = :path")


def put_path(connection: sa.Connection, entry: CachedPath, *, now: float) -> str | None:
    """Records a path, or what it is from now on. Call it once the object is durable.

    Returns the name of the object that it replaces and that nothing uses any more, to be deleted
    after the commit; None otherwise.
    """
    before = execute_text(connection, _OBJECT, {"path": entry.path})
    execute_text(
        connection,
        _PUT,
        {
            "path": entry.path,
            "nar_hash": entry.nar_hash,
            "nar_size": entry.nar_size,
            "file_size": entry.file_size,
            "compression": str(entry.compression),
            "object": entry.object,
            "contains_store_dir": int(entry.contains_store_dir),
            "now": now,
        },
    )
    row = cached_path_reference
    if before:
        connection.execute(row.delete().where(row.c.path == entry.path))
    references = [{"path": entry.path, "reference": reference} for reference in sorted(set(entry.references))]
    if references:
        connection.execute(insert_or_ignore(connection, row), references)
    return _unused_object(connection, before[0][0]) if before and before[0][0] != entry.object else None


def forget_path(connection: sa.Connection, path: str) -> str | None:
    """The store has lost the path. Returns its object if nothing uses it any more, to be deleted."""
    gone = connection.scalar(
        cached_path.delete().where(cached_path.c.path == path).returning(cached_path.c.object)
    )
    return None if gone is None else _unused_object(connection, gone)


def _unused_object(connection: sa.Connection, name: str) -> str | None:
    return None if object_in_use(connection, name) else name


def object_in_use(connection: sa.Connection, name: str) -> bool:
    """Whether a path, or an upload that waits for its cluster's verdict, has its contents there."""
    used = sa.or_(
        sa.exists().where(cached_path.c.object == name),
        sa.exists().where(upload.c.object == name, ~upload.c.committed),
    )
    return bool(connection.scalar(sa.select(used)))


_SQLITE_ROW = """
    held.path, held.nar_hash, held.nar_size, held.file_size, held.compression, held.object,
    held.contains_store_dir,
    (SELECT json_group_array(reference) FROM cached_path_reference AS r WHERE r.path = held.path)
"""
_POSTGRESQL_ROW = """
    held.path, held.nar_hash, held.nar_size, held.file_size, held.compression, held.object,
    held.contains_store_dir,
    ARRAY(SELECT reference FROM cached_path_reference AS r WHERE r.path = held.path)
"""
_IN = texts_in("path", "paths")
_GET = HotStatement(
    f"SELECT {_SQLITE_ROW} FROM cached_path AS held WHERE held.{_IN[0]}",  # noqa: S608 - our own words
    f"SELECT {_POSTGRESQL_ROW} FROM cached_path AS held WHERE held.{_IN[1]}",  # noqa: S608 - our own words
)
_HELD = HotStatement(
    f"SELECT path FROM cached_path WHERE {_IN[0]}",  # noqa: S608 - our own words
    f"SELECT path FROM cached_path WHERE {_IN[1]}",  # noqa: S608 - our own words
)
_SQLITE_CLOSURE = """
WITH RECURSIVE reached(path) AS (
    SELECT value FROM json_each(:paths)
    UNION
    SELECT r.reference FROM reached JOIN cached_path_reference AS r ON r.path = reached.path
)
"""
_POSTGRESQL_CLOSURE = """
WITH RECURSIVE reached(path) AS (
    SELECT unnest(CAST(:paths AS text[]))
    UNION
    SELECT r.reference FROM reached JOIN cached_path_reference AS r ON r.path = reached.path
)
"""
_HELD_REACHED = "FROM reached JOIN cached_path AS held ON held.path = reached.path ORDER BY held.path"
_CLOSURE = HotStatement(
    f"{_SQLITE_CLOSURE} SELECT {_SQLITE_ROW} {_HELD_REACHED}",
    f"{_POSTGRESQL_CLOSURE} SELECT {_POSTGRESQL_ROW} {_HELD_REACHED}",
)
_NOT_HELD = """
SELECT reached.path FROM reached
WHERE NOT EXISTS (SELECT 1 FROM cached_path AS held WHERE held.path = reached.path) ORDER BY reached.path
"""
_CLOSURE_MISSING = HotStatement(_SQLITE_CLOSURE + _NOT_HELD, _POSTGRESQL_CLOSURE + _NOT_HELD)


def get_paths(connection: sa.Connection, paths: Iterable[str]) -> dict[str, CachedPath]:
    """Those of the paths that are held, by path."""
    rows = execute_text(connection, _GET, {"paths": array_of(connection, paths)})
    return {row[0]: _cached_path(row) for row in rows}


def held_paths(connection: sa.Connection, paths: Iterable[str]) -> set[str]:
    """Those of the paths that are held, without anything about them."""
    return {row[0] for row in execute_text(connection, _HELD, {"paths": array_of(connection, paths)})}


def closure(connection: sa.Connection, paths: Iterable[str]) -> list[CachedPath]:
    """The held paths among `paths` and whatever they refer to, at any distance, by path."""
    rows = execute_text(connection, _CLOSURE, {"paths": array_of(connection, paths)})
    return [_cached_path(row) for row in rows]


def closure_missing(connection: sa.Connection, paths: Iterable[str]) -> list[str]:
    """The paths of the same closure that are not held, by path. What lies beyond them is unknown."""
    rows = execute_text(connection, _CLOSURE_MISSING, {"paths": array_of(connection, paths)})
    return [row[0] for row in rows]


_TOUCH = HotStatement(
    f"UPDATE cached_path SET used_at = :now WHERE {_IN[0]}",  # noqa: S608 - our own words
    f"UPDATE cached_path SET used_at = :now WHERE {_IN[1]}",  # noqa: S608 - our own words
)
_STALE = HotStatement(
    f"SELECT path FROM cached_path WHERE {_IN[0]} AND used_at < :before",  # noqa: S608 - our own words
    f"SELECT path FROM cached_path WHERE {_IN[1]} AND used_at < :before",  # noqa: S608 - our own words
)


def stale_paths(connection: sa.Connection, paths: Iterable[str], *, now: float) -> list[str]:
    """Those of the paths whose use is to be noted, before anybody is told that they are held."""
    parameters = {"paths": array_of(connection, paths), "before": now - _NOTED_FOR_SECS}
    return sorted(row[0] for row in execute_text(connection, _STALE, parameters))


def touch_paths(connection: sa.Connection, paths: Iterable[str], *, now: float) -> None:
    """The paths were used: garbage collection passes them over for another while."""
    execute_text(connection, _TOUCH, {"paths": array_of(connection, paths), "now": now})


def _cached_path(row: Sequence[Any]) -> CachedPath:
    path, nar_hash, nar_size, file_size, compression, name, contains_store_dir, references = row
    return CachedPath(
        path=path,
        nar_hash=nar_hash,
        nar_size=nar_size,
        file_size=file_size,
        compression=Compression(compression),
        object=name,
        references=tuple(sorted(json.loads(references) if isinstance(references, str) else references)),
        contains_store_dir=bool(contains_store_dir),
    )
