"""Is this a worker? Checks that play a server in raw frames (protocol.md, messages.md).

`check_worker(make_worker)` runs them all; each of CHECKS can be run alone. `make_worker` is a
function without arguments whose async context manager yields a `WorkerUnderTest`: a fresh worker,
which connects to the check.
"""

import uuid
from collections.abc import Awaitable, Callable

import msgpack

from tests.conformance.raw import Fields, nested
from tests.conformance.worker_session import (
    MakeWorker,
    PlayedServer,
    WorkerUnderTest,
    admit,
    challenge,
    greet,
    met,
    played,
)

__all__ = ["CHECKS", "MakeWorker", "WorkerUnderTest", "check_worker"]

HELLO = "echo hello; echo hello > $out"
EARLY = ("RequestJob", "RequestJobList", "CandidateScores", "JobUpdate", "JobCompleted", "JobFailed")


async def check_handshake(make_worker: MakeWorker) -> None:
    """Tokens for its own peers alone; then capabilities and `ResumeJobs`; nothing more before `ResumeAck`."""
    async with make_worker() as worker, met(worker) as peer:
        answer = await challenge(peer, worker)
        assert answer["tokens"] == dict(worker.tokens)
        await admit(peer, worker)
        capabilities = await peer.expect("WorkerCapabilities", passing=("WorkerMetrics",))
        assert capabilities["max_concurrent_builds"] > 0
        assert all(isinstance(system, str) for system in capabilities["architectures"])
        resumed = await peer.expect("ResumeJobs", passing=("WorkerMetrics",))
        assert resumed["running"] == []
        await peer.silence(EARLY, secs=0.5)
        await peer.send("ResumeAck", adopted=[], dropped=[])
        awaited = {"RequestJobList", "RequestJob"}
        while awaited:
            message = await peer.expect("RequestJobList", "RequestJob", passing=("WorkerMetrics",))
            awaited.discard(message["type"])


async def check_it_comes_again(make_worker: MakeWorker) -> None:
    """After a `Reject`, after a lost connection, and after an `Error`."""
    async with make_worker() as worker:
        async with met(worker) as peer:
            await peer.expect("InitConnection")
            await peer.send("Reject", code=503, reason="full")
            await peer.expect_close()
        async with met(worker) as peer:
            await peer.expect("InitConnection")
        async with played(worker) as server:
            await server.peer.send("Error", code=500, reason="internal")
            await server.peer.expect_close()
        async with played(worker) as server:
            await server.next("RequestJob")


async def check_a_server_that_breaks_the_rules(make_worker: MakeWorker) -> None:
    """It is told so, and the session ends."""
    offer = {"type": "JobOffer", "candidates": [], "is_final": True}
    breaches: list[tuple[bytes, int]] = [
        (msgpack.packb({"type": "Unheard"}), 400),
        (msgpack.packb({"type": "ResumeAck", "adopted": [], "dropped": []}), 400),
        (msgpack.packb({**offer, "x": nested(16)}), 413),
    ]
    async with make_worker() as worker:
        for payload, code in breaches:
            async with played(worker) as server:
                await server.peer.send_payload(payload)
                await server.peer.expect_end(code)
        async with played(worker) as server:
            await server.peer.send_bytes((4 * 1024 * 1024 + 1).to_bytes(4, "big"))
            await server.peer.expect_end(413)


async def check_a_handshake_that_breaks_the_rules(make_worker: MakeWorker) -> None:
    """Another version, and a message out of turn."""
    async with make_worker() as worker:
        async with met(worker) as peer:
            await challenge(peer, worker)
            await admit(peer, worker, version=2)
            await peer.expect_end(400)
        async with met(worker) as peer:
            await peer.expect("InitConnection")
            await peer.send("ResumeAck", adopted=[], dropped=[])
            await peer.expect_end(400)


async def check_heartbeats(make_worker: MakeWorker) -> None:
    """They count, and are not sent less often than every 10 s."""
    async with make_worker() as worker, played(worker) as server:
        server.peer.patience_secs = 12.0
        first = await server.next("WorkerMetrics")
        second = await server.next("WorkerMetrics")
        assert second["n"] > first["n"]
        assert isinstance(second["lateness_secs"], float | int)
        assert second.get("ram_free_mb") != 0, "unknown is absent, never 0"


async def check_offers_are_answered(make_worker: MakeWorker) -> None:
    """A score for each candidate, and an answer that is final, even an empty one."""
    candidate = {
        "job_id": str(uuid.uuid4()),
        "kind": "Build",
        "required_paths": [{"path": "0" * 32 + "-nowhere", "nar_size": 1000}],
        "output_paths": ["1" * 32 + "-nowhere"],
    }
    async with make_worker() as worker, played(worker) as server:
        for candidates in ([candidate], []):
            await server.peer.send("JobOffer", candidates=candidates, is_final=True)
            scores: list[Fields] = []
            while True:
                message = await server.next("CandidateScores")
                scores += message["scores"]
                if message["is_final"]:
                    break
            expected = {"missing_count": 1, "missing_nar_size": 1000, "outputs_present": False}
            assert scores == [{"job_id": c["job_id"], **expected} for c in candidates]


async def check_job_loop(make_worker: MakeWorker) -> None:
    """One job's whole life: acceptance, stages, log, output, upload, final report; then it asks again."""
    async with make_worker() as worker, played(worker) as server:
        job = worker.build(HELLO)
        assignment_id = await server.assign(job)
        reports = await server.final_report(assignment_id)
        assert [report["seq"] for report in reports] == [1, 2]
        output, final = reports
        assert final["type"] == "JobCompleted", final
        assert output["update"]["type"] == "BuildOutput"
        (built,) = output["update"]["outputs"]
        assert built["path"] == job["outputs"][0]["path"]
        (uploaded,) = server.committed
        assert (uploaded["nar_hash"], uploaded["nar_size"]) == (built["nar_hash"], built["nar_size"])
        assert server.log[assignment_id] == len("hello\n")
        for report in reports:
            await server.acknowledge(assignment_id, report["seq"])
        await server.next("RequestJob")


async def check_an_assignment_is_started_once(make_worker: MakeWorker) -> None:
    """Assigned again, it is accepted again, and runs once."""
    async with make_worker() as worker, played(worker) as server:
        job = worker.build("sleep 0.5; " + HELLO)
        assignment_id = await server.assign(job)
        await server.assign(job, assignment_id)
        reports = await server.final_report(assignment_id)
        assert [report["seq"] for report in reports] == [1, 2]
        await server.acknowledge(assignment_id, 2)
        assert server.log[assignment_id] == len("hello\n")


async def check_reports_outlive_the_session(make_worker: MakeWorker) -> None:
    """What was not acknowledged is listed after a lost connection, and sent again once it is adopted."""
    async with make_worker() as worker:
        async with played(worker) as server:
            assignment_id = await server.assign(worker.build(HELLO))
            before = await server.final_report(assignment_id)
            await server.acknowledge(assignment_id, 1)
        async with met(worker) as peer:
            (listed,) = (await greet(peer, worker))["running"]
            assert listed["assignment_id"] == assignment_id
            assert listed["seq"] in (0, 1)  # the acknowledgement may have been lost with the connection
            assert listed["state"] in ("running", "done")
            adopted = {"assignment_id": assignment_id, "seq": 1, "log_offset": 6, "started": False}
            await peer.send("ResumeAck", adopted=[adopted], dropped=[])
            again = await PlayedServer(peer).final_report(assignment_id)
            assert [report["seq"] for report in again] == [2]
            assert again[-1]["type"] == before[-1]["type"]
            await peer.send("ReportAck", assignment_id=assignment_id, seq=2)
            await peer.send("ReportAck", assignment_id=assignment_id, seq=2)  # repeated, and ignored
            await PlayedServer(peer).assign(worker.build(HELLO))


async def check_a_dropped_job_is_forgotten(make_worker: MakeWorker) -> None:
    """It is stopped without a report."""
    async with make_worker() as worker:
        async with played(worker) as server:
            assignment_id = await server.assign(worker.build("sleep 60; " + HELLO))
        async with met(worker) as peer:
            (listed,) = (await greet(peer, worker))["running"]
            assert (listed["assignment_id"], listed["state"]) == (assignment_id, "running")
            await peer.send("ResumeAck", adopted=[], dropped=[assignment_id])
            await peer.silence(("JobFailed", "JobCompleted"), secs=1.0)
            await PlayedServer(peer).assign(worker.build(HELLO))


async def check_aborts(make_worker: MakeWorker) -> None:
    """A running job ends as Aborted; an unknown one is ignored."""
    async with make_worker() as worker, played(worker) as server:
        await server.peer.send("AbortJob", assignment_id=str(uuid.uuid4()), reason="never heard of")
        assignment_id = await server.assign(worker.build("sleep 60; " + HELLO))
        await server.peer.send("AbortJob", assignment_id=assignment_id, reason="a user")
        reports = await server.final_report(assignment_id)
        assert reports[-1]["type"] == "JobFailed"
        assert reports[-1]["kind"] == "Aborted"


async def check_failures(make_worker: MakeWorker) -> None:
    """A command that fails, and one that does not make its output, are Permanent."""
    async with make_worker() as worker, played(worker) as server:
        for script in ("exit 3", "true"):
            assignment_id = await server.assign(worker.build(script))
            (report,) = await server.final_report(assignment_id)
            assert (report["type"], report["kind"], report["seq"]) == ("JobFailed", "Permanent", 1)
            assert report["error"]
            await server.acknowledge(assignment_id, 1)


async def check_an_unreadable_job(make_worker: MakeWorker) -> None:
    """It is named, and the session lives."""
    async with make_worker() as worker, played(worker) as server:
        peer = server.peer
        assignment_id = str(uuid.uuid4())
        unreadable = {**worker.build(HELLO), "inputs": 5}
        await peer.send("AssignJob", job_id="j", assignment_id=assignment_id, job=unreadable)
        error = await peer.wait_for("Error")
        assert (error["code"], error["assignment_id"]) == (400, assignment_id)
        await server.assign(worker.build(HELLO))


async def check_unknown_ids_are_ignored(make_worker: MakeWorker) -> None:
    """Whatever names an id that the worker does not have changes nothing."""
    stranger = str(uuid.uuid4())
    async with make_worker() as worker, played(worker) as server:
        peer = server.peer
        await peer.send("ReportAck", assignment_id=stranger, seq=5)
        await peer.send("BulkAck", id=stranger, offset=5)
        await peer.send("RevokeJob", job_ids=[stranger])
        await peer.send("UploadGrant", request_id=stranger, target={"type": "Skip"})
        await peer.send("NarUnavailable", transfer_id=stranger, reason="no")
        await peer.send("NarPush", transfer_id=stranger, offset=0, data=b"x", last=True)
        await peer.send("CacheStatus", query_id=stranger, paths={})
        await peer.send("AbortCluster", attempt=stranger, reason="no")
        await server.assign(worker.build(HELLO))


CHECKS: tuple[Callable[[MakeWorker], Awaitable[None]], ...] = (
    check_handshake,
    check_it_comes_again,
    check_a_server_that_breaks_the_rules,
    check_a_handshake_that_breaks_the_rules,
    check_heartbeats,
    check_offers_are_answered,
    check_job_loop,
    check_an_assignment_is_started_once,
    check_reports_outlive_the_session,
    check_a_dropped_job_is_forgotten,
    check_aborts,
    check_failures,
    check_an_unreadable_job,
    check_unknown_ids_are_ignored,
)


async def check_worker(make_worker: MakeWorker) -> None:
    """Runs every check, each against a worker of its own."""
    for check in CHECKS:
        await check(make_worker)
