"""Which derivations the server knows, so that an evaluation's walk need not go there again."""

from collections.abc import Sequence

import sqlalchemy as sa

from gradient_server.graph import sql

__all__ = ["known_derivations", "stale_derivations", "touch_derivations"]

# Told again within this, a derivation is not noted again: garbage collection looks at days.
_NOTED_FOR_SECS = 3_600.0

# A cluster comes with all its members each time, so that it is joined, skipped or run anew as a whole.
_KNOWN = sql.statement(
    "SELECT drv_path FROM derivation WHERE drv_path IN [paths] AND NOT clustered ORDER BY drv_path"
)


def known_derivations(connection: sa.Connection, paths: Sequence[str]) -> list[str]:
    """Those of `paths` (derivations) that are stored, and with them everything below (stored.py).

    Members of clusters, and what needs them, never count as known.
    """
    return [row[0] for row in sql.run(connection, _KNOWN, {"paths": sql.array(connection, paths)})]


_STALE = sql.statement(
    "SELECT drv_path FROM derivation WHERE drv_path IN [paths] AND COALESCE(used_at, created_at) < :before"
    " ORDER BY drv_path"
)
_TOUCH = sql.statement("UPDATE derivation SET used_at = :now WHERE drv_path IN [paths]")


def stale_derivations(connection: sa.Connection, paths: Sequence[str], *, now: float) -> list[str]:
    """Those of `paths` whose use is to be noted, before anybody is told that they are known."""
    if not paths:
        return []
    parameters = {"paths": sql.array(connection, paths), "before": now - _NOTED_FOR_SECS}
    return [row[0] for row in sql.run(connection, _STALE, parameters)]


def touch_derivations(connection: sa.Connection, paths: Sequence[str], *, now: float) -> list[str]:
    """Notes their use. Those that are still there: the others were collected in the meantime."""
    sql.run(connection, _TOUCH, {"paths": sql.array(connection, paths), "now": now})
    return known_derivations(connection, paths)
