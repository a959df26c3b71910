"""Random graphs under random events: the rules hold after each, and in the end everything has ended."""

import sqlite3
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from gradient_server.db.engine import make_write_engine, parse_url
from gradient_server.db.tables import metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.graph.model import Model

EVENTS = (
    "submit",
    "claim",
    "claim",
    "claim",
    "stream",
    "stream",
    "stream",
    "succeed",
    "succeed",
    "succeed",
    "fail",
    "fail",
    "lose",
    "reject",
    "abort_evaluation",
    "abort_job",
    "drain_one",
    "reap",
    "ask_for_import",
    "complete_without_outputs",
    "resume_empty",
    "lose_path",
    "wait",
)


@st.composite
def graphs(draw: st.DrawFn) -> list[list[tuple[int, bool]]]:
    """Up to nine nodes; each needs some of those before it, a few at run time only."""
    size = draw(st.integers(1, 9))
    rare = st.integers(0, 4).map(lambda number: number == 4)
    return [
        draw(st.lists(st.tuples(st.integers(0, number - 1), rare), max_size=3)) if number else []
        for number in range(size)
    ]


@pytest.fixture(scope="module")
def template() -> Iterator[sqlite3.Connection]:
    """The schema in memory, made once."""
    engine = make_write_engine(parse_url("sqlite://"))
    with engine.begin() as connection:
        metadata.create_all(connection)
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        yield driver
    engine.dispose()


@settings(max_examples=120, deadline=None)
@given(
    edges=graphs(),
    steps=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1_000)), min_size=10, max_size=80),
)
def test_every_evaluation_ends_and_no_build_starts_too_early(
    template: sqlite3.Connection, edges: list[list[tuple[int, bool]]], steps: list[tuple[str, int]]
) -> None:
    engine = make_write_engine(parse_url("sqlite://"))
    try:
        with engine.connect() as connection:
            _fill(connection, template)
            model = Model(connection, edges)
            model.submit(0)
            for event, pick in steps:
                getattr(model, event)(pick)
                model.check()
            model.settle()
            model.check()
            model.check_settled()
    finally:
        engine.dispose()


def _fill(connection: sa.Connection, template: sqlite3.Connection) -> None:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    template.backup(driver)
