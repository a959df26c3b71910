"""Which message is allowed when, after the handshake."""

import pytest
from gradient_protocol.errors import ProtocolError
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages import server, worker
from gradient_protocol.messages.common import Message
from gradient_protocol.state import Phase, SessionOrder

from tests.unit.protocol.samples import sample_messages

SAMPLES = [message for side in sample_messages(full=False).values() for message in side]
CAPABILITIES = next(message for message in SAMPLES if isinstance(message, worker.WorkerCapabilities))
RESUME = worker.ResumeJobs(running=[])
RESUME_ACK = server.ResumeAck(adopted=[], dropped=[])
BEGINNING = {
    Phase.CAPABILITIES: [],
    Phase.RESUME: [CAPABILITIES],
    Phase.RESUMING: [CAPABILITIES, RESUME],
    Phase.LIVE: [CAPABILITIES, RESUME, RESUME_ACK],
}
ALWAYS = {"AuthChallenge", "AuthUpdate", "BulkAck", "Draining", "Error", "HeartbeatAck", "ReauthRequest"}
ALWAYS |= {"WorkerMetrics", "Zstd"}
NEVER = {"InitAck", "InitConnection", "Reject", "ResumeAck", "ResumeJobs", "AuthResponse"}
ALLOWED = {
    Phase.CAPABILITIES: ALWAYS | {"WorkerCapabilities"},
    Phase.RESUME: ALWAYS | {"WorkerCapabilities", "ResumeJobs"},
    Phase.RESUMING: ALWAYS | {"WorkerCapabilities", "ResumeAck"},
    Phase.LIVE: {type(message).__name__ for message in SAMPLES} - NEVER,
}


def order_at(phase: Phase) -> SessionOrder:
    order = SessionOrder()
    for message in BEGINNING[phase]:
        order.note(message)
    assert order.phase is phase
    return order


@pytest.mark.parametrize("phase", list(Phase))
def test_every_message_in_every_phase(phase: Phase) -> None:
    for message in SAMPLES:
        order = order_at(phase)
        if type(message).__name__ in ALLOWED[phase]:
            order.note(message)
            continue
        with pytest.raises(ProtocolError) as caught:
            order.note(message)
        assert caught.value.code == 400
        assert order.phase is phase


def test_an_answer_needs_its_challenge() -> None:
    order = order_at(Phase.LIVE)
    answer = worker.AuthResponse(tokens={})
    order.note(server.AuthChallenge(peers=["p"]))
    order.note(answer)
    with pytest.raises(ProtocolError, match="without an AuthChallenge"):
        order.note(answer)


@pytest.mark.parametrize("message", [worker.RequestJob(kind=JobKind.BUILD), RESUME_ACK, RESUME])
def test_nothing_of_an_assignment_before_the_resume(message: Message) -> None:
    with pytest.raises(ProtocolError):
        order_at(Phase.CAPABILITIES).note(message)


def test_heartbeats_name_no_assignment_before_the_resume() -> None:
    for peaks in (None, {}):
        order_at(Phase.RESUMING).note(worker.WorkerMetrics(n=1, lateness_secs=0.0, build_peak_ram_mb=peaks))
    named = worker.WorkerMetrics(n=1, lateness_secs=0.0, build_peak_ram_mb={"a": 5})
    with pytest.raises(ProtocolError):
        order_at(Phase.RESUMING).note(named)
    order_at(Phase.LIVE).note(named)
