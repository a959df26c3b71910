"""What lost connections, restarts of the agent and odd servers do to a real agent's jobs."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio
from gradient_protocol.codec import encode
from gradient_protocol.framing import frame
from gradient_protocol.handshake import Refusal
from gradient_protocol.kinds import FailureKind, JobKind, ResumeState
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import Draining, Error
from gradient_worker import shutdown

from tests.fakes.agent import Rig, store_path
from tests.fakes.server import PEER

Assign = Callable[..., server.AssignJob]


async def test_a_lost_connection_loses_nothing(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign(f"echo before; while ! test -e {go}; do sleep 0.05; done; echo after; echo > $out")
        session.send(job)
        with trio.fail_after(5):
            while not rig.server.logs:
                await trio.sleep(0.01)
        session.scope.cancel()
        go.touch()
        await trio.sleep(0.3)
        session = await rig.server.session(nursery, resume=False)
        listed = await session.resume()
        assert [(one.assignment_id, one.job_id) for one in listed.running] == [
            (job.assignment_id, job.job_id)
        ]
        await session.expect(w.JobCompleted)
        assert bytes(rig.server.logs[job.assignment_id]) == b"before\nafter\n"
        assert [report.seq for report in rig.server.reports[job.assignment_id]] == [1, 2]


async def test_reports_that_were_not_acknowledged_come_again(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.automatic.discard("reports")
        job = assign("exit 1")
        session.send(job)
        await session.expect(w.JobFailed)
        session.scope.cancel()
        session = await rig.server.session(nursery, resume=False)
        listed = await session.resume()
        assert [(one.state, one.seq) for one in listed.running] == [(ResumeState.DONE, 0)]
        assert (await session.expect(w.JobFailed)).seq == 1


async def test_a_dropped_job_is_stopped_and_forgotten(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        job = assign("echo begun; sleep 60")
        session.send(job)
        with trio.fail_after(5):
            while not rig.server.logs:
                await trio.sleep(0.01)
        session.scope.cancel()
        session = await rig.server.session(nursery, resume=False)
        await session.expect(w.ResumeJobs)
        session.send(server.ResumeAck(adopted=[], dropped=[job.assignment_id]))
        await session.expect_none(w.JobFailed)
        with trio.fail_after(5):
            while len(agent.jobs):
                await trio.sleep(0.01)
        assert not (await (await agent.shop.runner.client()).list())


def seat(attempt: str, *, hold_secs: float = 40) -> shapes.ClusterSeat:
    return shapes.ClusterSeat(attempt=attempt, role="r", index=0, hold_secs=hold_secs)


async def test_a_hold_is_never_taken_up_again(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    job = assign("true", cluster=seat("attempt"))
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(job)
        await session.expect(w.AssignJobResponse, lambda m: m.accepted)
    async with rig.agent():
        session = await rig.server.session(nursery, resume=False)
        listed = await session.resume()
        assert [one.state for one in listed.running] == [ResumeState.DONE]
        failed = await session.expect(w.JobFailed)
        assert failed.kind is FailureKind.ABORTED


async def test_a_held_job_starts_when_it_is_told_to(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("echo > $out", cluster=seat("attempt"))
        session.send(job)
        assert (await session.expect(w.AssignJobResponse)).accepted
        second = assign("echo > $out", cluster=seat("attempt"))
        session.send(second)
        assert not (await session.expect(w.AssignJobResponse)).accepted
        await session.expect_none(w.JobUpdate)
        session.send(server.StartCluster(attempt="attempt", roster=[]))
        started = await session.expect(w.JobUpdate)
        assert isinstance(started.update, shapes.Started)
        await session.expect(w.JobCompleted)


async def test_a_hold_expires_even_without_a_connection(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign("true", cluster=seat("attempt", hold_secs=0.2)))
        assert (await session.expect(w.AssignJobResponse)).accepted
        session.scope.cancel()
        await trio.sleep(0.3)
        session = await rig.server.session(nursery, resume=False)
        assert [one.state for one in (await session.resume()).running] == [ResumeState.DONE]
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.error) == (FailureKind.ABORTED, "cluster start timed out")


async def test_an_aborted_attempt_drops_its_hold_without_a_report(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        session.send(assign("true", cluster=seat("attempt")))
        await session.expect(w.AssignJobResponse)
        session.send(server.AbortCluster(attempt="attempt", reason="a member rejected"))
        await session.expect_none(w.JobFailed)
        assert not len(agent.jobs)
        session.send(assign("true", cluster=seat("attempt")))
        assert not (await session.expect(w.AssignJobResponse)).accepted


async def test_an_upload_goes_on_where_the_server_says(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("head -c 5000000 /dev/urandom > $out")
        session.automatic.discard("uploads")
        session.send(job)
        request = await session.expect(w.UploadRequest)
        session.send(server.UploadGrant(request_id=request.request_id, target=server.Relay(offset=0)))
        chunks = [await session.expect(w.UploadChunk) for _ in range(4)]
        kept = b"".join(chunk.data for chunk in chunks)
        session.scope.cancel()
        session = await rig.server.session(nursery, resume=False)
        rig.server.begin_upload(request, kept)
        await session.resume()
        again = await session.expect(w.UploadRequest)
        assert again.request_id == request.request_id
        first = await session.expect(w.UploadChunk)
        assert first.offset == len(kept)
        await session.expect(w.JobCompleted)
        assert job.job.outputs[0].path in rig.server.paths


async def test_slots_are_named_and_never_exceeded(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    rig.settings["build_max_concurrent"] = "1"
    async with rig.agent():
        session = await rig.server.session(nursery)
        await session.expect(w.RequestJob, lambda m: m.kind is JobKind.BUILD)
        await session.expect(w.RequestJob, lambda m: m.kind is JobKind.EVAL)
        first = assign("sleep 0.3; echo > $out")
        session.send(first)
        session.send(first)
        for _ in range(2):
            assert (await session.expect(w.AssignJobResponse)).accepted
        session.send(assign("true"))
        assert not (await session.expect(w.AssignJobResponse)).accepted
        await session.expect(w.JobCompleted)
        await session.expect(w.RequestJob, lambda m: m.kind is JobKind.BUILD)


async def test_candidates_are_scored_once_and_again_when_the_store_changes(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("echo > $out")
        path = job.job.outputs[0].path
        needs = server.Candidate(
            job_id="needs",
            kind=JobKind.BUILD,
            required_paths=[server.RequiredPath(path=path, nar_size=120)],
            output_paths=[store_path("z", "other")],
        )
        session.send(server.JobListChunk(candidates=[needs], is_final=True))
        answer = await session.expect(w.CandidateScores)
        assert answer.is_final
        assert (answer.scores[0].missing_count, answer.scores[0].missing_nar_size) == (1, 120)
        session.send(server.JobOffer(candidates=[], is_final=True))
        assert (await session.expect(w.CandidateScores)) == w.CandidateScores(scores=[], is_final=True)
        session.send(job)
        changed = await session.expect(w.CandidateScores)
        assert not changed.is_final
        assert changed.scores[0].missing_count == 0


@pytest.mark.parametrize("junk", [b"\xc1", b"\x81\xa4type\xa4Nope", b"\xdd\xff\xff\xff\xff" * 100])
async def test_a_malformed_frame_ends_the_session_with_a_word_and_the_agent_comes_again(
    rig: Rig, assign: Assign, nursery: trio.Nursery, junk: bytes
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        await session.raw(frame(junk))
        assert (await session.expect(Error)).code in (400, 413)
        await rig.server.session(nursery)


async def test_a_job_that_cannot_be_read_is_answered_and_the_session_lives(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        good = assign("echo > $out")
        fields = msgspec.msgpack.decode(encode(good))
        fields["job"]["command"] = 7
        fields["assignment_id"] = "unreadable"
        await session.raw(frame(msgspec.msgpack.encode(fields)))
        error = await session.expect(Error)
        assert error.assignment_id == "unreadable"
        session.send(good)
        await session.expect(w.JobCompleted)


async def test_a_refused_report_is_replaced_by_a_permanent_failure(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.automatic -= {"reports", "uploads"}
        job = assign("echo > $out")
        session.send(job)
        output = await session.expect(w.JobUpdate, lambda m: m.seq == 1)
        assert output
        session.send(Error(code=400, reason="no such output", assignment_id=job.assignment_id, seq=1))
        failed = await session.expect(w.JobFailed)
        assert (failed.seq, failed.kind) == (1, FailureKind.PERMANENT)
        assert "no such output" in failed.error
        await session.expect(w.RequestJob)


@pytest.mark.parametrize("code", [401, 403, 496, 503])
async def test_a_refused_worker_comes_again(rig: Rig, nursery: trio.Nursery, code: int) -> None:
    rig.server.refusal = Refusal(code, "not now")
    async with rig.agent():
        session = await rig.server.session(nursery, resume=False)
        assert session.rejected is not None
        rig.server.refusal = None
        await rig.server.session(nursery)


async def test_a_changed_peers_file_is_told_and_answered(
    rig: Rig, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradient_worker.upkeep.PEERS_POLL_SECS", 0.05)
    async with rig.agent():
        session = await rig.server.session(nursery)
        (rig.base_dir / "peers").write_text(f"{PEER}:new\nother:two\n")
        await session.expect(w.ReauthRequest)
        session.send(server.AuthChallenge(peers=["other", "unknown"]))
        assert (await session.expect(w.AuthResponse)).tokens == {"other": "two"}


async def test_three_unanswered_heartbeats_are_a_dead_server(
    rig: Rig, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradient_worker.heartbeat.HEARTBEAT_SECS", 0.05)
    async with rig.agent():
        session = await rig.server.session(nursery)
        beat = await session.expect_beat()
        assert beat.build_peak_ram_mb is None
        session.automatic.discard("heartbeat")
        await rig.server.session(nursery)


async def test_a_drain_lets_jobs_end_and_releases_holds(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        job, held = assign("sleep 0.3; echo > $out"), assign("true", cluster=seat("attempt"))
        session.send(job)
        session.send(held)
        for _ in range(2):
            await session.expect(w.AssignJobResponse)
        session.messages.clear()
        nursery.start_soon(shutdown.drain, agent, 60, trio.Event())
        released = await session.expect(w.JobFailed)
        assert (released.assignment_id, released.error) == (held.assignment_id, "worker draining")
        await session.expect(Draining)
        session.send(assign("true"))
        assert not (await session.expect(w.AssignJobResponse)).accepted
        await session.expect(w.JobCompleted)
        await session.expect_none(w.RequestJob)


async def test_a_drain_cancels_what_does_not_end_in_time(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        session.send(assign("sleep 60"))
        await session.expect(w.AssignJobResponse)
        with trio.fail_after(5):
            await shutdown.drain(agent, 0.2, trio.Event())
        assert (await session.expect(w.JobFailed)).kind is FailureKind.CANCELED


async def test_nothing_about_an_assignment_is_said_before_resume_ack(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("sleep 0.2; exit 1")
        session.send(job)
        await session.expect(w.AssignJobResponse)
        session.scope.cancel()
        session = await rig.server.session(nursery, resume=False)
        await session.expect(w.ResumeJobs)
        await trio.sleep(0.5)
        assert all(isinstance(message, w.WorkerCapabilities) for message in session.messages)
        adopted = server.AdoptedJob(assignment_id=job.assignment_id, seq=0, log_offset=0, started=True)
        session.send(server.ResumeAck(adopted=[adopted], dropped=[]))
        await session.expect(w.JobFailed)
