"""A graph on a fresh database."""

import pytest
from gradient_protocol.ids import IdSource
from gradient_server.db.runner import Database
from gradient_server.graph.settings import GraphSettings

from tests.fixtures.times import FakeClock
from tests.integration.graph.pool import Pool


@pytest.fixture
async def pool(database: Database, clock: FakeClock, ids: IdSource) -> Pool:
    """On both databases."""
    return Pool(database, clock, ids, GraphSettings())
