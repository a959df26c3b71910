"""Pools on a fresh database each."""

import pytest
from gradient_protocol.ids import IdSource
from gradient_server.db.runner import Database
from gradient_server.graph.settings import GraphSettings

from tests.fixtures.times import FakeClock
from tests.integration.graph.pool import Pool


@pytest.fixture
def settings() -> GraphSettings:
    return GraphSettings()


@pytest.fixture
async def pool(database: Database, clock: FakeClock, ids: IdSource, settings: GraphSettings) -> Pool:
    """On both databases."""
    return Pool(database, clock, ids, settings)
