"""Every hot statement finds its rows by an index, on SQLite, whatever the size of the tables."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import gradient_server.graph
import pytest
import sqlalchemy as sa
from gradient_server.db.engine import make_read_engine, parse_url
from gradient_server.db.hot import HotStatement
from gradient_server.db.queries import cached_paths, claims
from gradient_server.graph.sql import GraphStatement

# What is made within the statement may be read from end to end.
OWN = {"reached", "json_each"}
# Statements of the graph that may read a table: what people look up by name or by a part of an id, and
# passes that come once an hour.
WHOLE = {
    "cluster_views._LATEST",
    "cluster_views._BY_ID",
    "cluster_views._BY_NAME",
    "cluster_views._USUAL",
    "garbage._OLD_EVALUATIONS",
    "job_views._BUILDS_BY_ID",
    "job_views._EVALUATIONS_BY_ID",
    "job_views._BUILD_BY_NAME",
    "lifting._LOWER",
    "retention._DELETE_EMPTY",
    "views._LATEST",
    "views._BY_STATUS",
    "views._FIND",
}


def graph_statements() -> dict[str, HotStatement]:
    found: dict[str, HotStatement] = {}
    for module in pkgutil.iter_modules(gradient_server.graph.__path__):
        for name, value in vars(importlib.import_module(f"gradient_server.graph.{module.name}")).items():
            if isinstance(value, GraphStatement) and f"{module.name}.{name}" not in WHOLE:
                found[f"{module.name}.{name}"] = value.many
                found[f"{module.name}.{name} of one"] = value.one
    return found


def statements() -> dict[str, HotStatement]:
    found: dict[str, HotStatement] = {}
    for module in (claims, cached_paths):
        for name, value in vars(module).items():
            if isinstance(value, HotStatement):
                found[f"{module.__name__}.{name}"] = value
    for kind, jobs in claims._JOBS.items():
        found |= {f"claim {kind}": jobs.claim, f"assign {kind}": jobs.assign, f"requeue {kind}": jobs.requeue}
    return found


@pytest.fixture(scope="module")
def schema(sqlite_template: Path) -> Iterator[sa.Connection]:
    engine = make_read_engine(parse_url(f"sqlite:///{sqlite_template}"))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


ALL = statements() | graph_statements()


@pytest.mark.parametrize("name", sorted(ALL))
def test_no_table_is_read_from_end_to_end(schema: sa.Connection, name: str) -> None:
    text = ALL[name].text("sqlite")
    parameters = dict.fromkeys(re.findall(r":([a-z_]+)", text), "[]")
    rows = schema.connection.execute(f"EXPLAIN QUERY PLAN {text}", parameters)  # type: ignore[attr-defined]  # of sqlite3
    own = OWN | set(re.findall(r"(\w+)\([\w, ]+\) AS \(", text))
    scanned = {
        step
        for step in (row[3] for row in rows)
        if (match := re.match(r"SCAN (\w+)", step))
        # What is open is little, and has indices of its own.
        and not re.search("VIRTUAL TABLE|USING (COVERING )?INDEX idx-[a-z_]+-open|CONSTANT ROW", step)
        and match[1] not in own
    }
    assert not scanned
