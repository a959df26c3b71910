"""How the graph writes SQL: text for both databases, run on the driver's cursor (db/hot.py).

In a statement, `IN [names]` takes a parameter that `array` made: SQLite has no arrays, so there it is
JSON. Rows come back as the driver gives them; JSON columns are text on SQLite and values on
PostgreSQL, `from_json` reads both.

Transactions of PostgreSQL run side by side (READ COMMITTED). What changes the shape of the graph
(ingest, cascades, aborts, healing) takes the graph's lock alone; the completion of a build, which only
moves along edges that exist, takes it shared. SQLite has one writer and needs neither.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from gradient_server.db.hot import HotStatement, execute_text

__all__ = [
    "array",
    "chunks",
    "from_json",
    "is_postgresql",
    "lock_graph",
    "lock_graph_shared",
    "run",
    "run_many",
    "statement",
    "to_json",
]

T = TypeVar("T")

_ARRAY = re.compile(r"IN \[([a-z_]+)\]")
# An arbitrary number that nothing else locks: "graph" in a telephone's letters.
_GRAPH_LOCK = 47274

_LOCK_ALONE = HotStatement("SELECT 1", f"SELECT pg_advisory_xact_lock({_GRAPH_LOCK})")
_LOCK_SHARED = HotStatement("SELECT 1", f"SELECT pg_advisory_xact_lock_shared({_GRAPH_LOCK})")


def statement(sqlite: str, postgresql: str | None = None) -> HotStatement:
    """A statement in which `IN [name]` stands for membership in an array parameter."""
    return HotStatement(
        _ARRAY.sub(r"IN (SELECT value FROM json_each(:\1))", sqlite),
        _ARRAY.sub(r"= ANY(:\1)", postgresql or sqlite),
    )


def is_postgresql(connection: sa.Connection) -> bool:
    """Whether transactions run side by side here."""
    return connection.dialect.name == "postgresql"


def array(connection: sa.Connection, values: Iterable[str] | Iterable[int]) -> Any:  # noqa: ANN401 - the driver's
    """The value of an array parameter."""
    listed = list(values)
    return listed if is_postgresql(connection) else json.dumps(listed)


def run(
    connection: sa.Connection, text: HotStatement, parameters: Mapping[str, Any] | None = None
) -> list[tuple[Any, ...]]:
    """One statement's rows."""
    return execute_text(connection, text, parameters or {})


def run_many(connection: sa.Connection, text: HotStatement, rows: Sequence[Mapping[str, Any]]) -> None:
    """The same statement for each of `rows`; what it returns is dropped."""
    if not rows:
        return
    if not connection.in_transaction():
        connection.begin()
    driver: Any = connection.connection.driver_connection
    cursor = driver.cursor()
    try:
        cursor.executemany(text.text(connection.dialect.name), rows)
    finally:
        cursor.close()


def lock_graph(connection: sa.Connection) -> None:
    """Nobody else changes the graph until this transaction ends."""
    if is_postgresql(connection):
        run(connection, _LOCK_ALONE)


def lock_graph_shared(connection: sa.Connection) -> None:
    """Nobody else changes the graph's shape until this transaction ends."""
    if is_postgresql(connection):
        run(connection, _LOCK_SHARED)


def from_json(value: Any) -> Any:  # noqa: ANN401 - whatever the column holds
    """The value of a JSON column, None where it is NULL."""
    return json.loads(value) if isinstance(value, str) else value


def to_json(value: Any) -> str:  # noqa: ANN401 - whatever the column holds
    """What a JSON column is given."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """`values` in pieces of at most `size`."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
