"""What every cluster, and every ingest, passes finds its rows by an index, whatever the tables hold."""

import re

import pytest
import sqlalchemy as sa
from gradient_server.db.hot import HotStatement
from gradient_server.db.queries import clusters, reservations, signals
from gradient_server.db.runner import Database
from gradient_server.graph import (
    cluster_checks,
    cluster_ends,
    cluster_load,
    cluster_revival,
    cluster_rows,
    cluster_status,
    member_reports,
    sql,
    verdict_rows,
    verdicts,
)
from gradient_server.graph import clusters as batch_clusters
from gradient_server.graph import signals as graph_signals

MODULES = (
    clusters,
    reservations,
    signals,
    cluster_checks,
    cluster_ends,
    cluster_load,
    cluster_revival,
    cluster_rows,
    cluster_status,
    member_reports,
    verdict_rows,
    verdicts,
    batch_clusters,
    graph_signals,
)
# Made within the statement, or of one row.
SMALL = {"json_each", "cluster_reservation", "CONSTANT"}
HOURLY = {"_DELETE_OLD"}


def statements() -> dict[str, HotStatement | sql.GraphStatement]:
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            if name in HOURLY:
                continue
            values = value.values() if isinstance(value, dict) else [value]
            for place, statement in enumerate(values):
                if isinstance(statement, HotStatement | sql.GraphStatement):
                    found[f"{module.__name__}.{name}.{place}"] = statement
    return found


def test_there_are_statements_to_look_at() -> None:
    assert len(statements()) > 40


@pytest.mark.parametrize("name", sorted(statements()))
async def test_no_table_is_read_from_end_to_end(sqlite_database: Database, name: str) -> None:
    def plan(connection: sa.Connection) -> list[str]:
        text = sqlite_text(statements()[name])
        if text.startswith(("SAVEPOINT", "ROLLBACK", "RELEASE")):
            return []
        parameters = dict.fromkeys(re.findall(r":([a-z_]+)", text), "[]")
        driver = connection.connection.driver_connection
        assert driver is not None
        return [row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {text}", parameters)]

    scanned = {
        match[1]
        for step in await sqlite_database.read(plan)
        if (match := re.match(r"SCAN (\w+)", step)) and "VIRTUAL TABLE" not in step
    }
    assert scanned <= SMALL


def sqlite_text(statement: HotStatement | sql.GraphStatement) -> str:
    found = statement.many if isinstance(statement, sql.GraphStatement) else statement
    return found.text("sqlite").strip()
