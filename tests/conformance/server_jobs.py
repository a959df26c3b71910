"""Checks of a server's job loop: assignment, log, output, upload, numbered reports, resume."""

import hashlib
import uuid
from collections.abc import Mapping

import zstandard

from tests.conformance.raw import Closed, Fields, RawPeer
from tests.conformance.server_session import (
    BACKGROUND,
    MakeServer,
    ServerUnderTest,
    connected,
    live,
    resume,
    shake_hands,
    still_lives,
)


def nar_of(text: bytes) -> bytes:
    """The NAR of one regular file."""

    def string(value: bytes) -> bytes:
        return len(value).to_bytes(8, "little") + value + bytes(-len(value) % 8)

    words = (b"nix-archive-1", b"(", b"type", b"regular", b"contents", text, b")")
    return b"".join(map(string, words))


def describe_output(output: Mapping[str, str], nar: bytes) -> Fields:
    """An entry of `BuildOutput.outputs`."""
    return {
        "name": output["name"],
        "path": output["path"],
        "nar_hash": "sha256:" + hashlib.sha256(nar).hexdigest(),
        "nar_size": len(nar),
        "references": [],
        "contains_store_dir": False,
    }


async def get_assigned(peer: RawPeer, server: ServerUnderTest) -> Fields:
    """Submits a job, scores what is offered, asks for work, accepts; the `AssignJob`."""
    await server.submit_noop()
    await peer.send("RequestJobList")
    assigned: Fields | None = None
    await peer.send("RequestJob", kind="Build")
    while assigned is None:
        message = await peer.wait_for("AssignJob", "JobListChunk", "JobOffer")
        if message["type"] == "AssignJob":
            assigned = message
            break
        scores = [
            {"job_id": c["job_id"], "missing_count": 0, "missing_nar_size": 0, "outputs_present": False}
            for c in message["candidates"]
        ]
        await peer.send("CandidateScores", scores=scores, is_final=True)
    assert assigned["job"]["type"] == "Build"
    assert assigned.get("cluster") is None
    await peer.send("AssignJobResponse", assignment_id=assigned["assignment_id"], accepted=True)
    return assigned


async def report_outputs(peer: RawPeer, assigned: Fields, seq: int) -> bytes:
    """Reports what was built under `seq`; the NAR of every output."""
    nar = nar_of(assigned["assignment_id"].encode())
    outputs = [describe_output(output, nar) for output in assigned["job"]["outputs"]]
    update = {"type": "BuildOutput", "outputs": outputs, "products": [], "substituted": False}
    await peer.send("JobUpdate", assignment_id=assigned["assignment_id"], seq=seq, update=update)
    return nar


async def upload(peer: RawPeer, assigned: Fields, nar: bytes) -> None:
    """Uploads every output over the session, or is told that it is held."""
    travels = zstandard.ZstdCompressor().compress(nar)
    for output in assigned["job"]["outputs"]:
        request_id = str(uuid.uuid4())
        await peer.send(
            "UploadRequest",
            request_id=request_id,
            assignment_id=assigned["assignment_id"],
            path=output["path"],
            size_estimate=len(nar),
        )
        grant = await peer.wait_for("UploadGrant")
        assert grant["request_id"] == request_id
        if grant["target"]["type"] == "Skip":
            continue
        assert grant["target"] == {"type": "Relay", "offset": 0}
        await peer.send("UploadChunk", request_id=request_id, offset=0, data=travels)
        described = describe_output(output, nar)
        await peer.send(
            "UploadFinished",
            request_id=request_id,
            nar_hash=described["nar_hash"],
            nar_size=len(nar),
            file_size=len(travels),
            references=[],
            etags=[],
        )
        committed = await peer.wait_for("UploadCommitted")
        assert committed["request_id"] == request_id
        assert committed["outcome"] == "Ok", committed


async def complete(peer: RawPeer, assignment_id: str, seq: int) -> None:
    """The final report of a success, acknowledged."""
    await peer.send("JobCompleted", assignment_id=assignment_id, seq=seq, spans=[], spans_dropped=0)
    await acknowledged(peer, assignment_id, seq)


async def acknowledged(peer: RawPeer, assignment_id: str, seq: int) -> None:
    """A `ReportAck` of exactly this `seq` arrives."""
    while True:
        message = await peer.wait_for("ReportAck")
        if message["assignment_id"] == assignment_id and message["seq"] == seq:
            assert message.get("refused") is None
            return


async def fail_job(peer: RawPeer, assignment_id: str, seq: int) -> None:
    """The final report of a permanent failure, acknowledged: leaves nothing to retry."""
    await peer.send(
        "JobFailed",
        assignment_id=assignment_id,
        seq=seq,
        kind="Permanent",
        error="given up by the check",
        missing_paths=[],
        spans=[],
        spans_dropped=0,
    )
    await acknowledged(peer, assignment_id, seq)


async def check_job_loop(make_server: MakeServer) -> None:
    """One job's whole life: offer, assignment, stages, log, output, upload, final report."""
    async with make_server() as server, live(server) as peer:
        assigned = await get_assigned(peer, server)
        job = assigned["job"]
        assert isinstance(assigned["job_id"], str)
        assert job["outputs"]
        assert isinstance(job["timeout_secs"], float | int)
        assignment_id = assigned["assignment_id"]
        for stage in ("Prefetch", "Build"):
            await peer.send(
                "JobUpdate", assignment_id=assignment_id, update={"type": "Stage", "stage": stage}
            )
        line = b"hello\n"
        data = zstandard.ZstdCompressor().compress(line)
        await peer.send("LogChunk", assignment_id=assignment_id, offset=0, data=data)
        nar = await report_outputs(peer, assigned, seq=1)
        await acknowledged(peer, assignment_id, 1)
        await peer.send("JobUpdate", assignment_id=assignment_id, update={"type": "Stage", "stage": "Upload"})
        await upload(peer, assigned, nar)
        await complete(peer, assignment_id, seq=2)
        await still_lives(peer)


async def check_log_chunks(make_server: MakeServer) -> None:
    """A chunk is acknowledged by the log's offset, one already stored ignored, a gap refused."""
    compress = zstandard.ZstdCompressor().compress
    async with make_server() as server, live(server) as peer:
        assignment_id = (await get_assigned(peer, server))["assignment_id"]
        big = b"line\n" * 30_000  # twice this is over the window's quarter, at which an answer is due
        for offset in range(0, 10 * len(big), len(big)):
            await peer.send("LogChunk", assignment_id=assignment_id, offset=offset, data=compress(big))
        ack = await peer.wait_for("BulkAck")
        assert ack["id"] == assignment_id
        assert 0 < ack["offset"] <= 10 * len(big)
        await peer.send("LogChunk", assignment_id=assignment_id, offset=0, data=compress(big))
        await still_lives(peer)
        await peer.send("LogChunk", assignment_id=assignment_id, offset=20 * len(big), data=compress(big))
        await peer.expect_end(400)


async def check_numbered_reports(make_server: MakeServer) -> None:
    """Repeated and stale reports are acknowledged and change nothing; a gap ends the session."""
    async with make_server() as server, live(server) as peer:
        assigned = await get_assigned(peer, server)
        assignment_id = assigned["assignment_id"]
        for _ in range(2):
            nar = await report_outputs(peer, assigned, seq=1)
            await acknowledged(peer, assignment_id, 1)
        await upload(peer, assigned, nar)
        await complete(peer, assignment_id, seq=2)
        await report_outputs(peer, assigned, seq=1)  # stale
        message = await peer.wait_for("ReportAck")
        assert message["assignment_id"] == assignment_id
        await complete(peer, assignment_id, seq=2)  # repeated
        assigned = await get_assigned(peer, server)
        await report_outputs(peer, assigned, seq=2)
        error = await peer.expect_end(400)
        assert error.get("assignment_id") is None


async def check_refused_reports(make_server: MakeServer) -> None:
    """Bad content is answered by name, what follows dropped until `JobFailed`; the session lives."""
    async with make_server() as server, live(server) as peer:
        assigned = await get_assigned(peer, server)
        assignment_id = assigned["assignment_id"]
        bad = {"type": "BuildOutput", "outputs": 5, "products": [], "substituted": False}
        await peer.send("JobUpdate", assignment_id=assignment_id, seq=1, update=bad)
        while (error := await peer.receive())["type"] in BACKGROUND:
            pass
        assert error["type"] == "Error", error
        assert (error["code"], error["assignment_id"], error["seq"]) == (400, assignment_id, 1)
        await peer.send("JobCompleted", assignment_id=assignment_id, seq=2, spans=[], spans_dropped=0)
        await still_lives(peer)
        await fail_job(peer, assignment_id, seq=1)
        await still_lives(peer)


async def check_resume(make_server: MakeServer) -> None:
    """A broken connection loses nothing: the job is adopted, and goes on where it was."""
    async with make_server() as server:
        async with live(server) as peer:
            assigned = await get_assigned(peer, server)
            await report_outputs(peer, assigned, seq=1)
            await acknowledged(peer, assigned["assignment_id"], 1)
        async with connected(server) as peer:
            await shake_hands(peer, server)
            listed = {"assignment_id": assigned["assignment_id"], "job_id": assigned["job_id"]}
            ack = await resume(peer, [{**listed, "state": "running", "seq": 1}])
            assert ack["dropped"] == []
            adopted = [
                {"assignment_id": assigned["assignment_id"], "seq": 1, "log_offset": 0, "started": False}
            ]
            assert ack["adopted"] == adopted
            nar = await report_outputs(peer, assigned, seq=1)  # sent again all the same
            await acknowledged(peer, assigned["assignment_id"], 1)
            await upload(peer, assigned, nar)
            await complete(peer, assigned["assignment_id"], seq=2)


async def check_a_rejected_assignment_leaves_the_session(make_server: MakeServer) -> None:
    """A worker may say no; an answer about an unknown assignment is ignored."""
    async with make_server() as server, live(server) as peer:
        assigned = await get_assigned(peer, server)
        await fail_job(peer, assigned["assignment_id"], seq=1)
        await peer.send(
            "AssignJobResponse", assignment_id=str(uuid.uuid4()), accepted=False, reason="no such"
        )
        await peer.send("UploadCancel", request_id=str(uuid.uuid4()))
        await still_lives(peer)


async def check_draining_and_errors(make_server: MakeServer) -> None:
    """A draining worker gets no more jobs; a worker's `Error` ends the session."""
    async with make_server() as server:
        async with live(server) as peer:
            await peer.send("Draining", reason="going home")
            await server.submit_noop()
            await peer.send("RequestJobList")
            await peer.silence(("AssignJob",), secs=0.3)
        async with live(server) as peer:
            await peer.send("Error", code=500, reason="internal")
            try:
                await peer.expect_close()
            except Closed:
                return
