"""Hot statements: written once for each database, run on the driver's own cursor.

SQLAlchemy costs more for each call than SQLite takes to carry out a claim (design.md, "Measured
floors"), so the few statements that every job passes are kept as text. Parameters are named and
written `:name`; for PostgreSQL they become psycopg's `%(name)s`. What goes in and comes out is the
driver's: JSON as text that the caller encodes, booleans of SQLite as 0 and 1.

Must be called within a transaction, as everything that gets a connection from `database.run` is.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

__all__ = ["HotStatement", "array_of", "execute_text", "texts_in"]

_PARAMETER = re.compile(r"(?<!:):([a-z_]+)\b")


class HotStatement:
    """One statement in the words of both databases; `postgresql` only where they differ."""

    __slots__ = ("_texts",)

    def __init__(self, sqlite: str, postgresql: str | None = None) -> None:
        self._texts = {
            "sqlite": sqlite,
            "postgresql": _PARAMETER.sub(r"%(\1)s", (postgresql or sqlite).replace("%", "%%")),
        }

    def text(self, dialect: str) -> str:
        """The statement as the driver of `dialect` takes it."""
        return self._texts[dialect]


def execute_text(
    connection: sa.Connection, statement: HotStatement, parameters: Mapping[str, Any]
) -> list[tuple[Any, ...]]:
    """Runs `statement` and returns its rows, [] where it returns none.

    Errors are the driver's, wrapped in nothing: `sqlite3.Error` or `psycopg.Error`.
    """
    if not connection.in_transaction():
        connection.begin()
    driver: Any = connection.connection.driver_connection
    cursor = driver.execute(statement.text(connection.dialect.name), parameters)
    try:
        return cursor.fetchall() if cursor.description is not None else []
    finally:
        cursor.close()


def array_of(connection: sa.Connection, values: Iterable[str]) -> str | list[str]:
    """Many texts as one parameter: read it by `json_each` on SQLite, as `text[]` on PostgreSQL."""
    return json.dumps(list(values)) if connection.dialect.name == "sqlite" else list(values)


def texts_in(column: str, parameter: str) -> tuple[str, str]:
    """The condition that `column` is among the texts of `array_of`, for SQLite and for PostgreSQL."""
    return (
        f"{column} IN (SELECT value FROM json_each(:{parameter}))",  # noqa: S608 - our own words
        f"{column} = ANY(CAST(:{parameter} AS text[]))",
    )
