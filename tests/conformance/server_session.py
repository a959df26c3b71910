"""What every check of a server needs: connections, handshakes and live sessions in raw frames."""

import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import trio

from tests.conformance.raw import Fields, RawPeer


class ServerUnderTest(Protocol):
    """What a check needs to know of a server."""

    worker_id: str  # registered
    tokens: Mapping[str, str]  # peer -> its right token for that worker; at least one

    async def connect(self) -> trio.abc.Stream:
        """A new connection to it."""
        ...

    async def submit_noop(self) -> None:
        """Queues one build that any worker can take: no inputs, one output, nothing to do."""
        ...


MakeServer = Callable[[], AbstractAsyncContextManager[ServerUnderTest]]

SYSTEM = "x86_64-linux"
# What a server may say at any time to a worker that is connected.
BACKGROUND = (
    "HeartbeatAck",
    "JobOffer",
    "JobListChunk",
    "RevokeJob",
    "BulkAck",
    "AuthChallenge",
    "AuthUpdate",
)
ALL = {"fetch": True, "eval": True, "build": True, "zstd": True}
REFUSALS = ("Reject", "Error")
# All sessions of one run are of one start of an agent, so that a new one replaces one that lingers.
INCARNATION = str(uuid.uuid4())


def hello(server: ServerUnderTest, **changes: object) -> Fields:
    """The fields of an `InitConnection`."""
    fields: Fields = {
        "version": 1,
        "worker_id": server.worker_id,
        "name": "conformance",
        "incarnation": INCARNATION,
        "capabilities": ALL,
    }
    return {**fields, **changes}


@asynccontextmanager
async def connected(server: ServerUnderTest) -> AsyncIterator[RawPeer]:
    """A new connection, closed at the end."""
    stream = await server.connect()
    try:
        yield RawPeer(stream)
    finally:
        await trio.aclose_forcefully(stream)


async def shake_hands(peer: RawPeer, server: ServerUnderTest, **changes: object) -> Fields:
    """A handshake that succeeds; the `InitAck`."""
    await peer.send("InitConnection", **hello(server, **changes))
    challenge = await peer.expect("AuthChallenge")
    tokens = {name: server.tokens[name] for name in challenge["peers"] if name in server.tokens}
    assert tokens, f"none of the worker's peers was challenged: {challenge}"
    await peer.send("AuthResponse", tokens=tokens)
    return await peer.expect("InitAck")


async def resume(peer: RawPeer, running: list[Fields] | None = None) -> Fields:
    """What a worker sends next, always; the `ResumeAck`."""
    await peer.send(
        "WorkerCapabilities",
        architectures=[SYSTEM],
        system_features=[],
        max_concurrent_builds=2,
        max_concurrent_evaluations=1,
        cpu_count=2,
        ram_total_mb=4096,
        build_memory=False,
        cpu_core_score=3000.0,
    )
    await peer.send("ResumeJobs", running=running or [])
    return await peer.expect("ResumeAck", passing=BACKGROUND)


@asynccontextmanager
async def live(server: ServerUnderTest, **changes: object) -> AsyncIterator[RawPeer]:
    """A session after its `ResumeAck`."""
    async with connected(server) as peer:
        await shake_hands(peer, server, **changes)
        await resume(peer)
        yield peer


async def still_lives(peer: RawPeer, n: int = 77) -> None:
    """The session answers a heartbeat."""
    await peer.send("WorkerMetrics", n=n, lateness_secs=0.0)
    while (await peer.wait_for("HeartbeatAck"))["n"] != n:
        pass
