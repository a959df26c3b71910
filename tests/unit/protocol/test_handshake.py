"""The handshake's machine, state by state, and its drivers over memory streams."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from gradient_protocol import limits
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.errors import ProtocolError, SessionClosed
from gradient_protocol.handshake import (
    Challenge,
    HandshakeOutcome,
    HandshakeState,
    Refusal,
    Rejected,
    ServerHandshake,
    Verification,
    Verify,
    WorkerHandshake,
    answer_challenge,
    handshake_as_server,
    handshake_as_worker,
)
from gradient_protocol.handshake.machine import TRANSITIONS
from gradient_protocol.messages import common, server, shapes, worker
from trio.testing import memory_stream_pair

ALL = shapes.Capabilities(fetch=True, eval=True, build=True, zstd=True)
BUILDER = shapes.Capabilities(fetch=False, eval=False, build=True, zstd=True)
HELLO = worker.InitConnection(version=1, worker_id="w", name="n", incarnation="i", capabilities=BUILDER)
TOKENS = {"p": "right", "q": "wrong"}
INIT_ACK = server.InitAck(
    version=1, capabilities=BUILDER, authorized_peers=["p"], failed_peers={}, server_time=5.0, instance="s"
)


def run_both(machine: ServerHandshake, mine: WorkerHandshake) -> HandshakeOutcome | Rejected:
    asked = machine.handle(mine.start())
    assert asked == Challenge(HELLO)
    answer = mine.handle(machine.challenge(("p", "q", "r")))
    assert isinstance(answer, worker.AuthResponse)
    verify = machine.handle(answer)
    assert isinstance(verify, Verify)
    authorized = tuple(peer for peer, token in verify.tokens.items() if token == "right")
    failed = {peer: "wrong token" for peer in verify.tokens if peer not in authorized}
    ack = machine.admit(Verification(authorized, failed), server_time=5.0)
    outcome = mine.handle(ack)
    assert not isinstance(outcome, worker.AuthResponse)
    if isinstance(ack, server.InitAck):
        assert machine.outcome(ack) == outcome
    return outcome


def test_one_token_that_holds_is_enough() -> None:
    machine, mine = ServerHandshake(ALL, "s"), WorkerHandshake(HELLO, TOKENS)
    outcome = run_both(machine, mine)
    assert outcome == HandshakeOutcome(HELLO, BUILDER, ("p",), {"q": "wrong token"}, 5.0, "s")
    assert machine.state is mine.state is HandshakeState.READY


def test_no_token_that_holds_is_401() -> None:
    machine, mine = ServerHandshake(ALL, "s"), WorkerHandshake(HELLO, {"q": "wrong"})
    outcome = run_both(machine, mine)
    assert isinstance(outcome, Rejected)
    assert outcome.code == 401
    assert "q: wrong token" in outcome.reason
    assert machine.state is mine.state is HandshakeState.REFUSED


def test_the_star_answers_any_peer() -> None:
    assert answer_challenge({"*": "t", "p": "own"}, ["p", "q"]).tokens == {"p": "own", "q": "t"}
    assert answer_challenge({"p": "own"}, ["q"]).tokens == {}


def test_only_challenged_peers_are_verified() -> None:
    machine = ServerHandshake(ALL, "s")
    machine.handle(HELLO)
    machine.challenge(("p",))
    verify = machine.handle(worker.AuthResponse(tokens={"p": "secret", "other": "x"}))
    assert isinstance(verify, Verify)
    assert verify.tokens == {"p": "secret"}
    assert "secret" not in repr(verify)


def at_state(state: HandshakeState) -> ServerHandshake:
    machine = ServerHandshake(ALL, "s")
    if state is HandshakeState.START:
        return machine
    machine.handle(HELLO)
    if state is HandshakeState.GREETED:
        return machine
    machine.challenge(("p",))
    if state is HandshakeState.CHALLENGED:
        return machine
    machine.handle(worker.AuthResponse(tokens={"p": "right"}))
    if state is HandshakeState.ANSWERED:
        return machine
    if state is HandshakeState.READY:
        machine.admit(Verification(("p",), {}), 5.0)
    else:
        machine.refuse(Refusal(403, "unknown"))
    return machine


@pytest.mark.parametrize("state", list(HandshakeState))
def test_the_server_refuses_what_the_table_does_not_have(state: HandshakeState) -> None:
    events = [HELLO, worker.AuthResponse(tokens={}), worker.RequestJobList(), common.Draining(), INIT_ACK]
    for event in events:
        machine = at_state(state)
        if (state, type(event)) in TRANSITIONS and type(event) is not server.InitAck:
            machine.handle(event)
            continue
        with pytest.raises(ProtocolError) as caught:
            machine.handle(event)
        assert caught.value.code == 400
        assert machine.state is state


def test_the_worker_refuses_what_comes_out_of_turn() -> None:
    mine = WorkerHandshake(HELLO, TOKENS)
    for early in (server.AuthChallenge(peers=[]), INIT_ACK):
        with pytest.raises(ProtocolError):
            mine.handle(early)
    mine.start()
    for wrong in (INIT_ACK, server.ResumeAck(adopted=[], dropped=[])):
        with pytest.raises(ProtocolError):
            mine.handle(wrong)
        assert mine.state is HandshakeState.GREETED
    mine.handle(server.AuthChallenge(peers=["p"]))
    with pytest.raises(ProtocolError):
        mine.handle(server.AuthChallenge(peers=["p"]))
    assert isinstance(mine.handle(INIT_ACK), HandshakeOutcome)


def test_another_version_is_400_and_changes_nothing() -> None:
    machine = ServerHandshake(ALL, "s")
    with pytest.raises(ProtocolError, match="version 2") as caught:
        machine.handle(
            worker.InitConnection(version=2, worker_id="w", name="n", incarnation="i", capabilities=ALL)
        )
    assert caught.value.code == 400
    assert machine.state is HandshakeState.START
    mine = WorkerHandshake(HELLO, TOKENS)
    mine.start()
    mine.handle(server.AuthChallenge(peers=["p"]))
    with pytest.raises(ProtocolError, match="version 3"):
        mine.handle(
            server.InitAck(
                version=3,
                capabilities=ALL,
                authorized_peers=["p"],
                failed_peers={},
                server_time=0.0,
                instance="s",
            )
        )
    assert mine.state is HandshakeState.ANSWERED


def test_a_rejection_carries_its_url() -> None:
    mine = WorkerHandshake(HELLO, TOKENS)
    mine.start()
    assert mine.handle(server.Reject(code=421, reason="there", url="tls://b:1")) == Rejected(
        421, "there", "tls://b:1"
    )


class FakeAuthority:
    """Knows one worker, whose peers' right token is `right`."""

    def __init__(self, refusal: Refusal | None = None, delay_secs: float = 0.0) -> None:
        self.refusal = refusal
        self.delay_secs = delay_secs

    async def peers_of(self, hello: worker.InitConnection) -> tuple[str, ...] | Refusal:
        await trio.sleep(self.delay_secs)
        return ("p", "q") if hello.worker_id == "w" else Refusal(403, "unknown worker")

    async def verify(self, hello: worker.InitConnection, tokens: Mapping[str, str]) -> Verification | Refusal:
        good = tuple(peer for peer, token in tokens.items() if token == "right")
        return self.refusal or Verification(good, {peer: "wrong" for peer in tokens if peer not in good})


@asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[Connection, Connection, trio.Nursery]]:
    ours, theirs = memory_stream_pair()
    ends = Connection(ours, Side.SERVER), Connection(theirs, Side.WORKER)
    async with trio.open_nursery() as nursery:
        try:
            for end in ends:
                await nursery.start(end.run)
            yield (*ends, nursery)
        finally:
            for end in ends:
                await end.aclose()


async def meet(
    authority: FakeAuthority, hello: worker.InitConnection = HELLO
) -> tuple[HandshakeOutcome | Rejected, HandshakeOutcome | Rejected]:
    results: dict[str, HandshakeOutcome | Rejected] = {}
    async with two_ends() as (at_server, at_worker, nursery):

        async def serve() -> None:
            results["server"] = await handshake_as_server(
                at_server, authority, capabilities=ALL, instance="s", clock=lambda: 5.0
            )

        nursery.start_soon(serve)
        results["worker"] = await handshake_as_worker(at_worker, hello, TOKENS)
        await trio.testing.wait_all_tasks_blocked()
    return results["server"], results["worker"]


async def test_both_drivers_agree() -> None:
    ours, theirs = await meet(FakeAuthority())
    assert ours == theirs == HandshakeOutcome(HELLO, BUILDER, ("p",), {"q": "wrong"}, 5.0, "s")


@pytest.mark.parametrize(
    ("authority", "worker_id", "expected"),
    [
        (FakeAuthority(), "stranger", Rejected(403, "unknown worker")),
        (FakeAuthority(Refusal(496, "connected")), "w", Rejected(496, "connected")),
        (FakeAuthority(Refusal(421, "there", "tls://b:1")), "w", Rejected(421, "there", "tls://b:1")),
    ],
)
async def test_refusals_reach_the_worker(
    authority: FakeAuthority, worker_id: str, expected: Rejected
) -> None:
    hello = worker.InitConnection(version=1, worker_id=worker_id, name="n", incarnation="i", capabilities=ALL)
    assert await meet(authority, hello) == (expected, expected)


async def test_limits_rise_with_init_ack() -> None:
    async with two_ends() as (at_server, at_worker, nursery):

        async def serve() -> None:
            await handshake_as_server(
                at_server, FakeAuthority(), capabilities=ALL, instance="s", clock=lambda: 5.0
            )
            at_server.send(server.RevokeJob(job_ids=["j"] * 30_000))

        nursery.start_soon(serve)
        await handshake_as_worker(at_worker, HELLO, TOKENS)
        assert isinstance(await at_worker.receive(), server.RevokeJob)


@pytest.mark.parametrize(
    ("raw", "code", "kind"),
    [
        (b"\0\0\0\x01\xc1", 400, common.Error),
        (b"\0\1\0\0", 413, common.Error),
        (b"\0\0\0\x15\x81\xa4type\xaeRequestJobList", 400, server.Reject),
    ],
)
async def test_garbage_is_answered(raw: bytes, code: int, kind: type[common.Message]) -> None:
    ours, theirs = memory_stream_pair()
    connection, peer = Connection(ours, Side.SERVER), Connection(theirs, Side.WORKER)
    await theirs.send_all(raw)
    async with trio.open_nursery() as nursery:
        await nursery.start(connection.run)
        result = await handshake_as_server(
            connection, FakeAuthority(), capabilities=ALL, instance="s", clock=lambda: 5.0
        )
        assert isinstance(result, Rejected)
        assert result.code == code
        answer = await peer.receive()
        assert type(answer) is kind
        await peer.aclose()
        await connection.aclose(flush_secs=1)


async def test_ten_seconds_for_the_whole_of_it(autojump_clock: trio.testing.MockClock) -> None:
    async with two_ends() as (at_server, at_worker, _):
        result = await handshake_as_server(
            at_server, FakeAuthority(), capabilities=ALL, instance="s", clock=lambda: 5.0
        )
        assert isinstance(result, Rejected)
        assert result.code == 408
        assert trio.current_time() == pytest.approx(limits.HANDSHAKE_SECS)
        answer = await at_worker.receive()
        assert isinstance(answer, server.Reject)
        assert answer.code == 408
    ours, theirs = await meet(FakeAuthority(delay_secs=11))
    assert isinstance(ours, Rejected)
    assert isinstance(theirs, Rejected)
    assert ours.code == theirs.code == 408


async def test_a_server_out_of_turn_is_told_so() -> None:
    async with two_ends() as (at_server, at_worker, _):
        at_server.send(INIT_ACK)
        with pytest.raises(ProtocolError):
            await handshake_as_worker(at_worker, HELLO, TOKENS)
        assert await at_server.receive() == HELLO
        answer = await at_server.receive()
        assert isinstance(answer, common.Error)
        assert answer.code == 400


async def test_an_end_of_the_stream_ends_the_handshake() -> None:
    async with two_ends() as (at_server, at_worker, nursery):
        nursery.start_soon(at_server.aclose)
        with pytest.raises(SessionClosed):
            await handshake_as_worker(at_worker, HELLO, TOKENS)
