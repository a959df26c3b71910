"""Transactions that run side by side, as PostgreSQL runs them: held open over each other on purpose.

SQLite has one writer; there is nothing to race.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.shapes import EvalResult
from gradient_protocol.messages.worker import JobCompleted, JobUpdate
from gradient_server.db.engine import make_write_engine, parse_url
from gradient_server.db.runner import Database
from gradient_server.domain.job import eval_key
from gradient_server.graph.aborts import abort_evaluation
from gradient_server.graph.reports import Report, apply_report
from gradient_server.graph.settings import GraphSettings

from tests.fixtures.times import FakeClock
from tests.integration.graph.pool import INSTANCE, Pool, derivation, output_path

BLOCKED_SECS = 0.3
JOIN_SECS = 20.0


@pytest.fixture
async def pool(postgres_database: Database, clock: FakeClock, ids: IdSource) -> Pool:
    return Pool(postgres_database, clock, ids, GraphSettings())


@pytest.fixture
def engine(postgres_url: str) -> Iterator[sa.Engine]:
    """Connections of the test's own to the pool's database."""
    made = make_write_engine(parse_url(postgres_url))
    yield made
    made.dispose()


def overlap(
    engine: sa.Engine, first: Callable[[sa.Connection], Any], second: Callable[[sa.Connection], Any]
) -> None:
    """Runs `first`, begins `second` before the first has committed, then commits both."""
    failed: list[BaseException] = []

    def run_second() -> None:
        try:
            with engine.begin() as connection:
                second(connection)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the test's thread
            failed.append(error)

    thread = threading.Thread(target=run_second)
    with engine.begin() as connection:
        first(connection)
        thread.start()
        thread.join(BLOCKED_SECS)
    thread.join(JOIN_SECS)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def reporting(pool: Pool, worker_id: str, message: Report) -> Callable[[sa.Connection], None]:
    def report(connection: sa.Connection) -> None:
        outcome = apply_report(
            connection,
            worker_id=worker_id,
            instance_id=INSTANCE,
            message=message,
            now=pool.clock.now(),
            ids=pool.ids,
        )
        assert outcome.error is None
        assert outcome.refused is None

    return report


async def about_to_complete(pool: Pool, name: str) -> Callable[[sa.Connection], None]:
    """A build that is all but reported as completed."""
    assignment = await pool.claim(await pool.key(name))
    assert assignment is not None
    await pool.hold(output_path(name))
    message = JobCompleted(assignment_id=assignment, seq=1, spans=[], spans_dropped=0)
    return reporting(pool, await pool.worker("w1"), message)


async def test_two_dependencies_that_finish_at_once_promote_their_dependent(
    pool: Pool, engine: sa.Engine
) -> None:
    await pool.evaluate(await pool.submit(), [derivation("a"), derivation("b"), derivation("c", "a", "b")])
    overlap(engine, await about_to_complete(pool, "a"), await about_to_complete(pool, "b"))
    assert await pool.statuses() == {"a": "Completed", "b": "Completed", "c": "Queued"}


async def test_the_last_two_builds_of_an_evaluation_end_it(pool: Pool, engine: sa.Engine) -> None:
    evaluation = await pool.submit()
    await pool.evaluate(evaluation, [derivation("a"), derivation("b")])
    overlap(engine, await about_to_complete(pool, "a"), await about_to_complete(pool, "b"))
    assert await pool.evaluation_status(evaluation) == "Completed"


@pytest.mark.parametrize("walk_first", [True, False])
async def test_a_dependent_that_is_stored_while_its_dependency_finishes_is_promoted(
    pool: Pool, engine: sa.Engine, walk_first: bool
) -> None:
    await pool.evaluate(await pool.submit(), [derivation("a")])
    finishes = await about_to_complete(pool, "a")
    walking = await pool.claim(eval_key(await pool.submit()))
    assert walking is not None
    batch = EvalResult(
        derivations=[derivation("a"), derivation("b", "a")], clusters=[], warnings=[], errors=[]
    )
    message = JobUpdate(assignment_id=walking, seq=1, update=batch)
    walks = reporting(pool, await pool.worker("w1"), message)
    overlap(engine, *((walks, finishes) if walk_first else (finishes, walks)))
    assert await pool.statuses() == {"a": "Completed", "b": "Queued"}


@pytest.mark.parametrize("walk_first", [True, False])
async def test_a_build_that_is_joined_while_its_last_wish_is_taken_back_is_not_lost(
    pool: Pool, engine: sa.Engine, walk_first: bool
) -> None:
    first, second = await pool.submit(), await pool.submit()
    await pool.evaluate(first, [derivation("a")])
    walking = await pool.claim(eval_key(second))
    assert walking is not None
    batch = EvalResult(derivations=[derivation("a")], clusters=[], warnings=[], errors=[])
    message = JobUpdate(assignment_id=walking, seq=1, update=batch)
    walks = reporting(pool, await pool.worker("w1"), message)

    def aborts(connection: sa.Connection) -> None:
        assert abort_evaluation(connection, first, now=pool.clock.now(), ids=pool.ids) is not None

    overlap(engine, *((walks, aborts) if walk_first else (aborts, walks)))
    wished = await pool.scalar(
        "SELECT b.status FROM build_job j JOIN derivation_build b ON b.id = j.build WHERE j.evaluation = :id",
        id=second,
    )
    assert wished == "Queued"
