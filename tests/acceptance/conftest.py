"""Pools of real processes; where a test of one fails, the ends of its logs are in the report."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.acceptance.counting import Cost
from tests.acceptance.pool import Pool
from tests.fixtures.cgroups import made_memory_cgroup

HERE = Path(__file__).parent
# Emulates a whole machine, for whoever names a kernel; a skip elsewhere would look like a gap in CI.
collect_ignore = [] if os.environ.get("GRADIENT_CLOUD_KERNEL") else ["test_cloud_kernel.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this directory is one of acceptance."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.acceptance)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the logs of the pools that a failed test had."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Pool):
                report.sections.append((f"logs of {name}", value.logs()))
    return report


@pytest.fixture
def cost(request: pytest.FixtureRequest) -> Cost:
    """What the fault of this test costs."""
    name: str = request.node.originalname
    return Cost(f"acceptance/{request.path.name}::{name}")


@pytest.fixture
def empty_pool() -> Iterator[Pool]:
    """Nothing runs yet."""
    with Pool() as made:
        yield made


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """A server and one worker, `host-a` with four slots, shared by the tests that leave both alone.

    The policy is the one that does not hold builds back while something else keeps this host busy.
    """
    with Pool() as made:
        made.start_server("--build-retry-backoff-secs", "0.2", "--scheduler-scoring-policy", "simple")
        made.start_worker("host-a", "--build-max-concurrent", "4")
        yield made


@pytest.fixture(scope="module")
def memory_cgroup() -> Iterator[Path]:
    """A cgroup of our own with the memory controller, on v1 or v2."""
    with made_memory_cgroup("acceptance") as path:
        yield path
