"""Random clusters under random events: the rules hold after each, and in the end everything has ended."""

import sqlite3
from collections.abc import Iterator

import pytest
from gradient_server.db.engine import make_write_engine, parse_url
from gradient_server.db.tables import metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.clusters.model import Model
from tests.properties.clusters.shape import Shape

EVENTS = (
    *["claim"] * 10,
    *["start"] * 10,
    *["settle"] * 8,
    *["member_succeeds"] * 8,
    *["member_fails"] * 6,
    *["finish_single"] * 6,
    *["failed_try"] * 4,
    *["submit"] * 3,
    *["fail_single"] * 2,
    *["lose_path"] * 2,
    *["wait"] * 2,
    *["claim_member_alone"] * 2,
    "fail_prepare",
    "late_report",
    "abort_evaluation",
    "abort_member",
    "abort_cluster",
    "retention",
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """One to three members, with or without a primary."""
    size = draw(st.integers(1, 3))
    return Shape(
        size=size,
        primary=draw(st.none() | st.integers(0, size - 1)),
        on_base=draw(st.frozensets(st.integers(0, size - 1))),
        budget=draw(st.integers(0, 2)),
    )


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
    shape=shapes(),
    steps=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1_000)), min_size=8, max_size=60),
)
def test_a_cluster_runs_whole_or_not_at_all_and_always_ends(
    template: sqlite3.Connection, shape: Shape, steps: list[tuple[str, int]]
) -> None:
    engine = make_write_engine(parse_url("sqlite://"))
    try:
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            template.backup(driver)
            model = Model(connection, shape)
            for event, pick in steps:
                getattr(model, event)(pick)
                model.check()
            model.run_to_the_end()
            model.check()
    finally:
        engine.dispose()
