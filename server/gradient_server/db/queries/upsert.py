"""INSERT ... ON CONFLICT, which SQLAlchemy spells per database."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

__all__ = ["insert_or_ignore", "insert_or_update"]


def insert_or_ignore(connection: sa.Connection, table: sa.Table) -> sa.Insert:
    """An INSERT that leaves rows alone that are there, by whatever constraint."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    return postgresql.insert(table).on_conflict_do_nothing()


def insert_or_update(
    connection: sa.Connection,
    table: sa.Table,
    *,
    key: Sequence[str],
    updates: Mapping[str, Any] | None = None,
) -> sa.Insert:
    """An INSERT that overwrites the row with the same `key` columns (a unique index without a condition).

    `updates` are the columns to set then; by default all that are not in the key take the new values.
    """
    build = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = build(table)
    new = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in key}
    return statement.on_conflict_do_update(index_elements=list(key), set_=dict(updates) if updates else new)
