"""Every hot statement finds its rows by an index, on SQLite, whatever the size of the tables."""

import re

import pytest
import sqlalchemy as sa
from gradient_server.db.hot import HotStatement
from gradient_server.db.queries import cached_paths, claims
from gradient_server.db.runner import Database

# What is made within the statement may be read from end to end.
OWN = {"reached", "json_each"}


def statements() -> dict[str, HotStatement]:
    found: dict[str, HotStatement] = {}
    for module in (claims, cached_paths):
        for name, value in vars(module).items():
            if isinstance(value, HotStatement):
                found[f"{module.__name__}.{name}"] = value
    for kind, jobs in claims._JOBS.items():
        found |= {f"claim {kind}": jobs.claim, f"assign {kind}": jobs.assign, f"requeue {kind}": jobs.requeue}
    return found


@pytest.mark.parametrize("name", sorted(statements()))
async def test_no_table_is_read_from_end_to_end(sqlite_database: Database, name: str) -> None:
    text = statements()[name].text("sqlite")
    parameters = dict.fromkeys(re.findall(r":([a-z_]+)", text), "[]")

    def plan(connection: sa.Connection) -> list[str]:
        driver = connection.connection.driver_connection
        assert driver is not None
        return [row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {text}", parameters)]

    scanned = {
        match[1]
        for step in await sqlite_database.read(plan)
        if (match := re.match(r"SCAN (\w+)", step)) and "VIRTUAL TABLE" not in step
    }
    assert scanned <= OWN
