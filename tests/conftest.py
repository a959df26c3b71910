"""Fixtures that every test may ask for; they are written in `tests/fixtures`."""

from tests.fixtures.databases import (
    database,
    database_url,
    postgres_database,
    postgres_server,
    postgres_template,
    postgres_url,
    sqlite_database,
    sqlite_template,
)
from tests.fixtures.times import clock, ids

__all__ = [
    "clock",
    "database",
    "database_url",
    "ids",
    "postgres_database",
    "postgres_server",
    "postgres_template",
    "postgres_url",
    "sqlite_database",
    "sqlite_template",
]
