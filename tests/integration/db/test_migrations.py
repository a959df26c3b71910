"""A migrated database is the one that the tables describe, to the last condition of an index."""

import re
import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.migration import MigrationContext
from gradient_server.db import tables
from gradient_server.db.engine import make_write_engine, parse_url
from gradient_server.db.errors import DatabaseError, DatabaseInUseError, DatabaseUnusableError
from gradient_server.db.lock import FileLock
from gradient_server.db.migrate import (
    Migration,
    _check_foreign_keys,
    current_revision,
    migrate,
    newest_revision,
)

from tests.fixtures.databases import create_schema
from tests.fixtures.postgres import PostgresServer


def read(url: str, query: str) -> set[tuple[object, ...]]:
    engine = make_write_engine(parse_url(url))
    with engine.connect() as connection:
        rows = {tuple(row) for row in connection.exec_driver_sql(query)}
    engine.dispose()
    return rows


def parts(sql: str) -> tuple[str, ...]:
    """A CREATE statement as the sorted list of what stands between its outer commas."""
    sql = re.sub(r"\s+", " ", sql)
    depth, part, found = 0, "", []
    for letter in sql:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 1:
            found.append(part.strip())
            part = ""
        else:
            part += letter
    return tuple(sorted([*found, part.strip()], key=lambda text: text.strip("() ")))


def sqlite_schema(url: str) -> set[tuple[object, ...]]:
    rows = read(url, "SELECT type, name, tbl_name, COALESCE(sql, '') FROM sqlite_master")
    described = set()
    for kind, name, table, sql in rows:
        if table in ("alembic_version", "sqlite_sequence") or str(name).startswith("sqlite_"):
            continue
        # The first and the last part carry the statement's own words and brackets.
        words = {word.strip("() ") for word in parts(str(sql).replace(f"CREATE TABLE {name}", ""))}
        described.add((kind, name, table, tuple(sorted(words))))
    return described


POSTGRES_QUERIES = [
    """
    SELECT indexname, indexdef FROM pg_indexes
    WHERE schemaname = 'public' AND tablename <> 'alembic_version'
    """,
    """
    SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND conrelid <> 'alembic_version'::regclass
    """,
    """
    SELECT table_name, column_name, ordinal_position, data_type, is_nullable, column_default
    FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version'
    """,
]


def test_sqlite_migrated_is_sqlite_described(tmp_path: Path) -> None:
    described, migrated = f"sqlite:///{tmp_path / 'described.db'}", f"sqlite:///{tmp_path / 'migrated.db'}"
    create_schema(described)
    assert migrate(migrated) == Migration(None, newest_revision())
    assert sqlite_schema(migrated) == sqlite_schema(described)
    names = {name for kind, name, *_ in sqlite_schema(described) if kind == "table"}
    assert names == set(tables.metadata.tables)


def test_postgresql_migrated_is_postgresql_described(postgres_server: PostgresServer) -> None:
    described, migrated = (postgres_server.url(postgres_server.create()) for _ in range(2))
    create_schema(described)
    migrate(migrated)
    engine = make_write_engine(parse_url(described))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE alembic_version (x text)")
    engine.dispose()
    for query in POSTGRES_QUERIES:
        assert read(migrated, query) == read(described, query)
        assert read(described, query)


def test_the_conditions_that_the_specification_names_are_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'migrated.db'}"
    migrate(url)
    indexes = {str(name): str(sql) for name, sql in read(url, "SELECT name, sql FROM sqlite_master")}
    for name, condition in {
        "idx-dispatched_job-open-job": "finished_at IS NULL",
        "idx-cluster_attempt-open": "finished_at IS NULL",
        "idx-cluster_member-evaluation": "evaluation IS NOT NULL",
        "idx-cluster_member-derivation_build": "derivation_build IS NOT NULL",
    }.items():
        assert indexes[name].startswith("CREATE UNIQUE INDEX")
        assert indexes[name].endswith(f"WHERE {condition}")


def test_migrating_again_does_nothing(database_url: str, tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnusableError, match="no revision"):
        migrate(database_url)
    url = f"sqlite:///{tmp_path / 'twice.db'}"
    assert migrate(url).changed
    assert not migrate(url).changed


def test_a_database_of_a_newer_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "newer.db"
    migrate(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(DatabaseUnusableError, match="run the newer program"):
        migrate(f"sqlite:///{path}")


def test_a_database_in_use_is_not_migrated(tmp_path: Path) -> None:
    with FileLock(tmp_path / "used.db"), pytest.raises(DatabaseInUseError):
        migrate(f"sqlite:///{tmp_path / 'used.db'}")


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "text.db"
    path.write_text("this is no database, but long enough to be taken for one" * 10)
    with pytest.raises(DatabaseUnusableError) as raised:
        migrate(f"sqlite:///{path}")
    assert "\n" not in str(raised.value)


def test_a_migration_that_breaks_a_reference_is_not_committed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'broken.db'}"
    migrate(url)
    engine = make_write_engine(parse_url(url))
    with engine.connect() as connection:
        connection.connection.driver_connection.execute("PRAGMA foreign_keys=OFF")
        transaction = connection.begin()
        values = {"id": "t", "project": "nobody", "name": "t", "created_at": 1.0}
        connection.execute(tables.task.insert(), values)
        with pytest.raises(DatabaseError, match="without its project"):
            _check_foreign_keys(connection)
        transaction.rollback()
        assert current_revision(connection) == newest_revision()
    engine.dispose()


def test_the_newest_revision_can_be_undone_and_done_again(tmp_path: Path) -> None:
    from gradient_server.db.migrate import alembic_config

    url = f"sqlite:///{tmp_path / 'back.db'}"
    migrate(url)
    before = sqlite_schema(url)
    engine = make_write_engine(parse_url(url))
    with engine.begin() as connection:
        command.downgrade(alembic_config(connection), "-1")
        assert MigrationContext.configure(connection).get_current_revision() != newest_revision()
    engine.dispose()
    migrate(url)
    assert sqlite_schema(url) == before
