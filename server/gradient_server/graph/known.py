"""Which derivations the server knows, so that an evaluation's walk need not go there again."""

from collections.abc import Sequence

import sqlalchemy as sa

from gradient_server.graph import sql

__all__ = ["known_derivations"]

_KNOWN = sql.statement("SELECT drv_path FROM derivation WHERE drv_path IN [paths] ORDER BY drv_path")


def known_derivations(connection: sa.Connection, paths: Sequence[str]) -> list[str]:
    """Those of `paths` (derivations) that are stored, and with them everything below (stored.py)."""
    return [row[0] for row in sql.run(connection, _KNOWN, {"paths": sql.array(connection, paths)})]
