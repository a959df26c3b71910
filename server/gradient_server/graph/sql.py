"""How the graph writes SQL: text for both databases, run on the driver's cursor (db/hot.py).

In a statement, `IN [names]` takes a parameter that `array` made: SQLite has no arrays, so there it is
JSON; and where the array has one element, the statement says `= :names`. Rows come back as the driver
gives them; JSON columns are text on SQLite and values on PostgreSQL, `from_json` reads both.

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
    "Array",
    "GraphStatement",
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


class Array(list[Any]):
    """The value of an array parameter: texts or integers."""

    __slots__ = ()


class GraphStatement:
    """A statement with arrays, and the same for arrays of one: most jobs end one at a time."""

    __slots__ = ("many", "one")

    def __init__(self, sqlite: str, postgresql: str | None) -> None:
        postgresql = postgresql or sqlite
        self.many = HotStatement(
            _ARRAY.sub(r"IN (SELECT value FROM json_each(:\1))", sqlite),
            _ARRAY.sub(r"= ANY(:\1)", postgresql),
        )
        self.one = HotStatement(_ARRAY.sub(r"= :\1", sqlite), _ARRAY.sub(r"= :\1", postgresql))


def statement(sqlite: str, postgresql: str | None = None) -> GraphStatement:
    """A statement in which `IN [name]` stands for membership in an array parameter."""
    return GraphStatement(sqlite, postgresql)


_LOCK_ALONE = statement("SELECT 1", f"SELECT pg_advisory_xact_lock({_GRAPH_LOCK})")
_LOCK_SHARED = statement("SELECT 1", f"SELECT pg_advisory_xact_lock_shared({_GRAPH_LOCK})")


def is_postgresql(connection: sa.Connection) -> bool:
    """Whether transactions run side by side here."""
    return connection.dialect.name == "postgresql"


def array(connection: sa.Connection, values: Iterable[str] | Iterable[int]) -> Array:
    """The value of an array parameter."""
    del connection
    return Array(values)


def run(
    connection: sa.Connection, text: GraphStatement, parameters: Mapping[str, Any] | None = None
) -> list[tuple[Any, ...]]:
    """One statement's rows."""
    if not parameters:
        return execute_text(connection, text.one, {})
    arrays = {name: value for name, value in parameters.items() if type(value) is Array}
    if all(len(value) == 1 for value in arrays.values()):
        singles = {name: value[0] for name, value in arrays.items()}
        return execute_text(connection, text.one, {**parameters, **singles})
    if not is_postgresql(connection):
        lists = {name: json.dumps(value) for name, value in arrays.items()}
        return execute_text(connection, text.many, {**parameters, **lists})
    return execute_text(connection, text.many, {**parameters, **{n: list(v) for n, v in arrays.items()}})


def run_many(connection: sa.Connection, text: GraphStatement, rows: Sequence[Mapping[str, Any]]) -> None:
    """The same statement, which has no arrays, for each of `rows`; what it returns is dropped."""
    if not rows:
        return
    if not connection.in_transaction():
        connection.begin()
    driver: Any = connection.connection.driver_connection
    cursor = driver.cursor()
    try:
        cursor.executemany(text.one.text(connection.dialect.name), rows)
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
