"""What every check of a worker needs: the server's part of a session, in raw frames."""

import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import trio
import zstandard

from tests.conformance.raw import Fields, RawPeer


class WorkerUnderTest(Protocol):
    """What a check needs to know of a worker. It can build, and has nothing to do."""

    worker_id: str
    tokens: Mapping[str, str]  # peer -> the token that its peers file has; at least one, no `*`

    async def accept(self) -> trio.abc.Stream:
        """The next connection that it makes."""
        ...

    def build(self, script: str) -> Fields:
        """A `job` that it can run: no inputs, one output, `script` run by a shell that knows `$out`."""
        ...


MakeWorker = Callable[[], AbstractAsyncContextManager[WorkerUnderTest]]

ALL = {"fetch": True, "eval": True, "build": True, "zstd": True}
STRANGER = "a peer that never registered it"


class PlayedServer:
    """One session with a worker: answers what needs no thought, and keeps what was uploaded."""

    def __init__(self, peer: RawPeer) -> None:
        self.peer = peer
        self.uploads: dict[str, bytearray] = {}  # request id -> bytes as they travelled
        self.committed: list[Fields] = []  # each UploadFinished
        self.log: dict[str, int] = {}  # assignment id -> bytes acknowledged

    async def next(self, *kinds: str) -> Fields:
        """The next message of these kinds; everything before it is answered as a server would."""
        deadline = trio.current_time() + self.peer.patience_secs
        while trio.current_time() < deadline:
            message = await self.peer.receive()
            await self._answer(message)
            if message["type"] in kinds:
                return message
            assert message["type"] != "Error", f"{message} where {kinds} is due"
        raise AssertionError(f"no {kinds} in time, only {self.peer.heard[-10:]}")

    async def final_report(self, assignment_id: str) -> list[Fields]:
        """All numbered reports of an assignment up to its final one, none of them acknowledged."""
        reports: list[Fields] = []
        while True:
            message = await self.next("JobUpdate", "JobCompleted", "JobFailed")
            if message["assignment_id"] == assignment_id and message.get("seq") is not None:
                reports.append(message)
                if message["type"] != "JobUpdate":
                    return reports

    async def acknowledge(self, assignment_id: str, seq: int) -> None:
        """Everything up to `seq` is stored."""
        await self.peer.send("ReportAck", assignment_id=assignment_id, seq=seq)

    async def assign(self, job: Fields, assignment_id: str | None = None) -> str:
        """Assigns a job and waits until it is accepted; the assignment's id."""
        assignment_id = assignment_id or str(uuid.uuid4())
        await self.peer.send("AssignJob", job_id=str(uuid.uuid4()), assignment_id=assignment_id, job=job)
        answer = await self.next("AssignJobResponse")
        assert answer["assignment_id"] == assignment_id
        assert answer["accepted"] is True, answer
        return assignment_id

    async def _answer(self, message: Fields) -> None:
        match message["type"]:
            case "WorkerMetrics":
                await self.peer.send("HeartbeatAck", n=message["n"], server_time=1.0)
            case "CacheQuery":
                status = {path: {"held": False} for path in message["paths"]}
                await self.peer.send("CacheStatus", query_id=message["query_id"], paths=status)
            case "UploadRequest":
                self.uploads[message["request_id"]] = bytearray()
                target = {"type": "Relay", "offset": 0}
                await self.peer.send("UploadGrant", request_id=message["request_id"], target=target)
            case "UploadChunk":
                stored = self.uploads[message["request_id"]]
                assert message["offset"] == len(stored)
                assert len(message["data"]) <= 255 * 1024
                stored += message["data"]
                await self.peer.send("BulkAck", id=message["request_id"], offset=len(stored))
            case "UploadFinished":
                self._check_upload(message)
                await self.peer.send("UploadCommitted", request_id=message["request_id"], outcome="Ok")
            case "LogChunk":
                await self._store_log(message)

    def _check_upload(self, finished: Fields) -> None:
        travelled = bytes(self.uploads[finished["request_id"]])
        assert finished["file_size"] == len(travelled)
        with zstandard.ZstdDecompressor().stream_reader(travelled) as reader:
            nar = reader.read(finished["nar_size"] + 1)
        assert len(nar) == finished["nar_size"]
        assert finished["nar_hash"] == "sha256:" + hashlib.sha256(nar).hexdigest()
        self.committed.append(finished)

    async def _store_log(self, chunk: Fields) -> None:
        stored = self.log.setdefault(chunk["assignment_id"], 0)
        assert chunk["offset"] <= stored, "a gap in the log"
        with zstandard.ZstdDecompressor().stream_reader(chunk["data"]) as reader:
            size = len(reader.read(255 * 1024 + 1))
        assert size <= 255 * 1024
        self.log[chunk["assignment_id"]] = max(stored, chunk["offset"] + size)
        await self.peer.send("BulkAck", id=chunk["assignment_id"], offset=self.log[chunk["assignment_id"]])


@asynccontextmanager
async def met(worker: WorkerUnderTest) -> AsyncIterator[RawPeer]:
    """The worker's next connection, closed at the end."""
    with trio.fail_after(30):
        stream = await worker.accept()
    try:
        yield RawPeer(stream)
    finally:
        await trio.aclose_forcefully(stream)


async def challenge(peer: RawPeer, worker: WorkerUnderTest) -> Fields:
    """Greeting and challenge; the `AuthResponse`."""
    greeting = await peer.expect("InitConnection")
    assert greeting["version"] == 1
    assert greeting["worker_id"] == worker.worker_id
    assert isinstance(greeting["name"], str)
    assert uuid.UUID(greeting["incarnation"])
    assert {name: type(value) for name, value in greeting["capabilities"].items()} == dict.fromkeys(ALL, bool)
    await peer.send("AuthChallenge", peers=[*worker.tokens, STRANGER])
    return await peer.expect("AuthResponse")


async def admit(peer: RawPeer, worker: WorkerUnderTest, **changes: object) -> None:
    """`InitAck`, with what every session has in common."""
    fields: Fields = {
        "version": 1,
        "capabilities": ALL,
        "authorized_peers": list(worker.tokens),
        "failed_peers": {},
        "server_time": 1.0,
        "instance": "conformance",
    }
    await peer.send("InitAck", **{**fields, **changes})


async def greet(peer: RawPeer, worker: WorkerUnderTest) -> Fields:
    """A whole handshake and the worker's beginning; its `ResumeJobs`."""
    await challenge(peer, worker)
    await admit(peer, worker)
    await peer.expect("WorkerCapabilities", passing=("WorkerMetrics",))
    return await peer.expect("ResumeJobs", passing=("WorkerMetrics",))


@asynccontextmanager
async def played(worker: WorkerUnderTest) -> AsyncIterator[PlayedServer]:
    """A session in which nothing is to be resumed."""
    async with met(worker) as peer:
        resumed = await greet(peer, worker)
        dropped = [listed["assignment_id"] for listed in resumed["running"]]
        await peer.send("ResumeAck", adopted=[], dropped=dropped)
        yield PlayedServer(peer)
