"""Worlds with two workers, and looks at them, for the tests of the rows of cluster-jobs.md."""

from gradient_protocol.kinds import JobKind
from gradient_server.cluster.attempts import Attempt
from gradient_server.cluster.settings import ClusterSettings
from gradient_server.db.queries.signals import StoredSignal

from tests.fakes.cluster import ClusterWorld
from tests.fakes.scheduler import worker

__all__ = ["connect", "only_attempt", "pair_world", "signal"]


def pair_world(**settings: float) -> ClusterWorld:
    """Two workers that wait, `a` and `b`."""
    world = ClusterWorld()
    if settings:
        world.runner.settings = world.runner.executor._settings = ClusterSettings(**settings)
    connect(world, "a", "b")
    return world


def connect(world: ClusterWorld, *names: str, **changes: object) -> None:
    for name in names:
        world.connect(worker(name, **changes))
        world.scheduler.request_job(name, JobKind.BUILD)


def only_attempt(world: ClusterWorld) -> Attempt:
    (attempt,) = world.runner.attempts
    return attempt


def signal(n: int, role: str = "server") -> StoredSignal:
    return StoredSignal(n=n, sender_role=role, sender_index=0, topic="t", payload=b"")
