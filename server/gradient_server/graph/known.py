"""Which derivations the server knows, so that an evaluation's walk need not go there again."""

from collections.abc import Sequence

import sqlalchemy as sa

from gradient_server.graph import sql

__all__ = ["known_derivations"]

# A cluster comes with all its members each time, so that it is joined, skipped or run anew as a whole.
_KNOWN = sql.statement(
    "SELECT drv_path FROM derivation WHERE drv_path IN [paths] AND NOT clustered ORDER BY drv_path"
)


def known_derivations(connection: sa.Connection, paths: Sequence[str]) -> list[str]:
    """Those of `paths` (derivations) that are stored, and with them everything below (stored.py).

    Members of clusters, and what needs them, never count as known.
    """
    return [row[0] for row in sql.run(connection, _KNOWN, {"paths": sql.array(connection, paths)})]
