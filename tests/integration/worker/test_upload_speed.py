"""What an upload is measured by: from the first grant on, the wait for it being a span of its own
(scoring.md, "Worker Speed Signals").
"""

from collections.abc import Callable

import trio
from gradient_protocol.kinds import FailureKind, SpanKind, UploadOutcome
from gradient_protocol.messages import server
from gradient_protocol.messages import worker as w

from tests.fakes.agent import Rig

Assign = Callable[..., server.AssignJob]
SIZE = 3_000_000
WAIT_SECS = 0.6


async def test_the_wait_for_the_grant_is_a_span_and_no_part_of_the_speed(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        session.automatic.discard("uploads")
        session.send(assign(f"head -c {SIZE} /dev/urandom > $out"))
        request = await session.expect(w.UploadRequest)
        assert agent.shop.speeds.upload.mbps is None
        await trio.sleep(WAIT_SECS)
        session.automatic.add("uploads")
        granted_at = trio.current_time()
        session._upload(request)
        completed = await session.expect(w.JobCompleted)
        elapsed_secs = trio.current_time() - granted_at
        [wait] = [span for span in completed.spans if span.kind is SpanKind.UPLOAD_WAIT]
        [push] = [span for span in completed.spans if span.kind is SpanKind.NAR_PUSH]
        assert wait.end - wait.start >= 0.9 * WAIT_SECS
        assert wait.end <= push.start < push.end
        assert push.parent is not None
        assert completed.spans[push.parent].kind is SpanKind.COMPRESS
        mbps = agent.shop.speeds.upload.mbps
        assert mbps is not None
        assert push.nar_bytes is not None
        assert push.nar_bytes >= SIZE
        assert 0 < push.nar_bytes * 8 / 1e6 / mbps <= elapsed_secs


async def test_an_upload_that_is_refused_measures_nothing(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        session.automatic.discard("uploads")
        session.send(assign(f"head -c {SIZE} /dev/urandom > $out"))
        request = await session.expect(w.UploadRequest)
        session.send(
            server.UploadCommitted(request_id=request.request_id, outcome=UploadOutcome.REJECTED, reason="no")
        )
        failed = await session.expect(w.JobFailed)
        assert failed.kind is FailureKind.TRANSIENT
        assert agent.shop.speeds.upload.mbps is None
        assert SpanKind.NAR_PUSH not in [span.kind for span in failed.spans]
