"""A member at a real agent, and its programs, as tests drive them."""

from collections.abc import Callable
from typing import TypeVar

import trio
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_worker.cluster_client import AttemptOver, Cluster, Refused, Signal, TimedOut
from gradient_worker.cluster_socket import cluster_socket_path

from tests.fakes.agent import Rig
from tests.fakes.server import FakeSession

__all__ = [
    "ATTEMPT",
    "ROSTER",
    "UNTIL_TOLD",
    "Assign",
    "Background",
    "Program",
    "barrier_signal",
    "begun",
    "end",
    "in_thread",
    "seat",
    "signal",
    "start",
]

Assign = Callable[..., server.AssignJob]
T = TypeVar("T")

ROSTER = [
    shapes.RosterEntry(role="server", index=0, worker="w0", primary=False, endpoint="10.0.0.1"),
    shapes.RosterEntry(role="client", index=0, worker="w1", primary=True),
    shapes.RosterEntry(role="client", index=1, worker="w2", primary=False),
]
ATTEMPT = "attempt"
UNTIL_TOLD = "while ! test -e go; do sleep 0.05; done; echo > $out"


def seat(*, role: str = "server", hold_secs: float = 40) -> shapes.ClusterSeat:
    return shapes.ClusterSeat(attempt=ATTEMPT, role=role, index=0, hold_secs=hold_secs)


async def start(session: FakeSession, job: server.AssignJob) -> None:
    session.send(job)
    assert (await session.expect(w.AssignJobResponse)).accepted
    session.send(server.StartCluster(attempt=ATTEMPT, roster=ROSTER))
    await session.expect(w.JobUpdate, lambda m: isinstance(m.update, shapes.Started))


async def begun(rig: Rig, job: server.AssignJob) -> None:
    """Its socket is there."""
    with trio.fail_after(10):
        while not cluster_socket_path(rig.base_dir, job.assignment_id).exists():
            await trio.sleep(0.01)
        while not (rig.base_dir / "builds" / job.assignment_id / "build").exists():
            await trio.sleep(0.01)


def end(rig: Rig, job: server.AssignJob) -> None:
    (rig.base_dir / "builds" / job.assignment_id / "build" / "go").touch()


class Program:
    """A process of the member: each call connects, asks and ends."""

    def __init__(self, rig: Rig, job: server.AssignJob) -> None:
        self._environ = {
            "GRADIENT_CLUSTER_ROLE": "server",
            "GRADIENT_CLUSTER_INDEX": "0",
            "GRADIENT_CLUSTER_SOCKET": str(cluster_socket_path(rig.base_dir, job.assignment_id)),
        }

    def send(self, topic: str, payload: str, to: str | None = None) -> None:
        with Cluster(self._environ) as cluster:
            cluster.send(topic, payload, to)

    def recv(self, topic: str | None = None, timeout_secs: float = 5) -> Signal:
        with Cluster(self._environ) as cluster:
            return cluster.recv(topic, timeout_secs=timeout_secs)

    def barrier(self, name: str, timeout_secs: float = 5) -> None:
        with Cluster(self._environ) as cluster:
            cluster.barrier(name, timeout_secs)


async def in_thread(function: Callable[[], T], within_secs: float = 15) -> T:
    with trio.fail_after(within_secs):
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)


class Background:
    """A call in a thread that goes on while the test does something else."""

    def __init__(self, nursery: trio.Nursery, function: Callable[[], object]) -> None:
        self._done = trio.Event()
        self._outcome: object = None
        nursery.start_soon(self._run, function)

    async def _run(self, function: Callable[[], object]) -> None:
        try:
            self._outcome = await in_thread(function, 30)
        except (Refused, TimedOut, AttemptOver) as error:
            self._outcome = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    async def outcome(self) -> object:
        with trio.fail_after(20):
            await self._done.wait()
        return self._outcome


def signal(
    n: int, payload: str = "", *, topic: str = "t", index: int = 0, role: str = "client"
) -> server.ClusterSignal:
    return server.ClusterSignal(
        attempt=ATTEMPT,
        n=n,
        sender=shapes.MemberAddress(role=role, index=index),
        topic=topic,
        payload=payload.encode(),
    )


def barrier_signal(n: int, name: str, index: int) -> server.ClusterSignal:
    return signal(n, name, topic="gradient.barrier", index=index)
