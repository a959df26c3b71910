"""Checks of a server's handshake, and of the order of messages after it."""

import uuid

import msgpack

from tests.conformance.raw import Fields
from tests.conformance.server_session import (
    ALL,
    BACKGROUND,
    REFUSALS,
    MakeServer,
    connected,
    hello,
    live,
    resume,
    shake_hands,
    still_lives,
)


async def check_handshake(make_server: MakeServer) -> None:
    """The good way through; unknown fields and the order of keys do not matter."""
    async with make_server() as server:
        async with connected(server) as peer:
            ack = await shake_hands(peer, server, future_field={"a": [1]})
            assert ack["version"] == 1
            assert set(ack["authorized_peers"]) <= set(server.tokens)
            assert ack["authorized_peers"]
            assert isinstance(ack["failed_peers"], dict)
            assert isinstance(ack["server_time"], float)
            assert isinstance(ack["instance"], str)
            assert set(ack["capabilities"]) >= set(ALL)
            assert await resume(peer) == {"type": "ResumeAck", "adopted": [], "dropped": []}
        async with connected(server) as peer:
            fields = hello(server)
            await peer.send_payload(
                msgpack.packb({**dict(reversed(fields.items())), "type": "InitConnection"})
            )
            await peer.expect("AuthChallenge")


async def check_capabilities_are_what_both_have(make_server: MakeServer) -> None:
    """What the worker lacks is not in `InitAck`."""
    async with make_server() as server, connected(server) as peer:
        ack = await shake_hands(peer, server, capabilities={**ALL, "zstd": False, "eval": False})
        assert ack["capabilities"]["zstd"] is False
        assert ack["capabilities"]["eval"] is False


async def check_handshake_refusals(make_server: MakeServer) -> None:
    """Version, unknown worker, wrong and missing tokens, a message out of turn."""
    async with make_server() as server:
        async with connected(server) as peer:
            await peer.send("InitConnection", **hello(server, version=2))
            await peer.expect_end(400, REFUSALS)
        async with connected(server) as peer:
            await peer.send("InitConnection", **hello(server, worker_id=str(uuid.uuid4())))
            await peer.expect_end(403, ("Reject",))
        for tokens in ({}, dict.fromkeys(server.tokens, "wrong"), {"nobody": "x"}):
            async with connected(server) as peer:
                await peer.send("InitConnection", **hello(server))
                await peer.expect("AuthChallenge")
                await peer.send("AuthResponse", tokens=tokens)
                await peer.expect_end(401, ("Reject",))
        async with connected(server) as peer:
            await peer.send("RequestJobList")
            await peer.expect_end(400, REFUSALS)
        async with connected(server) as peer:
            await peer.send("InitConnection", **hello(server))
            await peer.expect("AuthChallenge")
            await peer.send("InitConnection", **hello(server))
            await peer.expect_end(400, REFUSALS)


async def check_one_good_token_is_enough(make_server: MakeServer) -> None:
    """Tokens for peers that were not asked for change nothing."""
    async with make_server() as server, connected(server) as peer:
        await peer.send("InitConnection", **hello(server))
        challenge = await peer.expect("AuthChallenge")
        assert set(challenge["peers"]) >= set(server.tokens)
        name, token = next(iter(server.tokens.items()))
        await peer.send("AuthResponse", tokens={name: token, "nobody": "x"})
        assert (await peer.expect("InitAck"))["authorized_peers"] == [name]


async def check_a_worker_id_is_connected_once(make_server: MakeServer) -> None:
    """Another incarnation is 496 while the first is heard; the same one replaces it."""
    async with make_server() as server, live(server) as first:
        async with connected(server) as other:
            await other.send("InitConnection", **hello(server, incarnation=str(uuid.uuid4())))
            message = await other.expect("AuthChallenge", "Reject")
            if message["type"] == "AuthChallenge":
                await other.send("AuthResponse", tokens=dict(server.tokens))
                message = await other.expect("Reject")
            assert message["code"] == 496
        await still_lives(first)
        async with live(server) as again:
            await first.expect_close()
            await still_lives(again)


async def check_order_before_resume_ack(make_server: MakeServer) -> None:
    """Heartbeats are answered at once; nothing about an assignment, no `RequestJob`."""
    early: list[tuple[str, Fields]] = [
        ("RequestJob", {"kind": "Build"}),
        ("RequestJobList", {}),
        ("ResumeJobs", {"running": []}),  # before the capabilities
        ("AssignJobResponse", {"assignment_id": "a", "accepted": True}),
        ("JobUpdate", {"assignment_id": "a", "update": {"type": "Started"}}),
    ]
    async with make_server() as server:
        async with connected(server) as peer:
            await shake_hands(peer, server)
            await still_lives(peer)
        for kind, fields in early:
            async with connected(server) as peer:
                await shake_hands(peer, server)
                await peer.send(kind, **fields)
                await peer.expect_end(400)
        async with live(server) as peer:
            await peer.send("ResumeJobs", running=[])
            await peer.expect_end(400)


async def check_unknown_assignments_are_dropped(make_server: MakeServer) -> None:
    """What the server does not know of is dropped, and a report about it acknowledged all the same."""
    stranger = str(uuid.uuid4())
    listed = {"assignment_id": stranger, "job_id": str(uuid.uuid4()), "state": "running", "seq": 0}
    async with make_server() as server, connected(server) as peer:
        await shake_hands(peer, server)
        ack = await resume(peer, [listed])
        assert ack["adopted"] == []
        assert ack["dropped"] == [stranger]
        await peer.send("JobUpdate", assignment_id=stranger, update={"type": "Stage", "stage": "Build"})
        await peer.send("JobCompleted", assignment_id=stranger, seq=3, spans=[], spans_dropped=0)
        ack = await peer.expect("ReportAck", passing=BACKGROUND)
        assert ack == {"type": "ReportAck", "assignment_id": stranger, "seq": 3}
        await still_lives(peer)
