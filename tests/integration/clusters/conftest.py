"""A pool whose evaluation has made a cluster."""

import pytest
from gradient_protocol.ids import IdSource
from gradient_server.db.runner import Database
from gradient_server.graph.settings import GraphSettings

from tests.fixtures.times import FakeClock
from tests.integration.clusters.group import ClusterPool


@pytest.fixture
def pool(database: Database, clock: FakeClock, ids: IdSource) -> ClusterPool:
    return ClusterPool(database, clock, ids, GraphSettings(largest_worker_ram_mb=lambda: 8_000))
