"""Rows that windows and predictions read: assignments, spans and metrics, at chosen times."""

import itertools

import sqlalchemy as sa
from gradient_server.db import tables

from tests.fixtures.graph import make_derivation

__all__ = ["add_assignment", "add_metric", "add_span"]

_numbers = itertools.count(1)


def add_metric(connection: sa.Connection, at: float, derivation: int | None = None, **values: object) -> None:
    """One row of a real build."""
    values = {
        "history_name": "package",
        "architecture": "any",
        "oom_killed": False,
        "concurrent_builds": 0,
    } | values
    connection.execute(
        tables.derivation_metric.insert().values(
            derivation=derivation or make_derivation(connection),
            assignment=f"measured-{next(_numbers)}",
            created_at=at,
            **values,
        )
    )


def add_assignment(
    connection: sa.Connection,
    at: float,
    *,
    build: str | None = None,
    evaluation: str | None = None,
    **values: object,
) -> str:
    """A closed assignment, made at `at`."""
    assignment = f"closed-{next(_numbers)}"
    values = {"status": "Completed", "finished_at": at + 1.0} | values
    connection.execute(
        tables.dispatched_job.insert().values(
            id=assignment,
            job_key=f"build:{build}" if build else f"eval:{evaluation}",
            derivation_build=build,
            evaluation=evaluation,
            worker="w",
            instance="i",
            assigned_at=at,
            **values,
        )
    )
    return assignment


def add_span(
    connection: sa.Connection, assignment: str, kind: str, start: float, end: float, **values: object
) -> int:
    """A span, and its position."""
    position = next(_numbers)
    values = {"position": position} | values
    connection.execute(
        tables.span.insert().values(assignment=assignment, kind=kind, start=start, end=end, **values)
    )
    return position
