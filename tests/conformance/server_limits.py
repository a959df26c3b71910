"""Checks of a server's limits: what is no message, what is too large, what hides in an envelope."""

import msgpack
import zstandard

from tests.conformance.raw import RawPeer, nested
from tests.conformance.server_session import ALL, REFUSALS, MakeServer, connected, live, shake_hands

BROKEN = {
    "an unused byte": b"\xc1",
    "an array": msgpack.packb([1]),
    "no type": msgpack.packb({"version": 1}),
    "an unknown type": msgpack.packb({"type": "Unheard"}),
    "a server's message": msgpack.packb({"type": "HeartbeatAck", "n": 1, "server_time": 1.0}),
    "trailing bytes": msgpack.packb({"type": "RequestJobList"}) + b"\xc0",
    "truncated": msgpack.packb({"type": "RequestJob", "kind": "Build"})[:-1],
    "a missing field": msgpack.packb({"type": "RequestJob"}),
    "an ill-typed field": msgpack.packb({"type": "RequestJob", "kind": 5}),
    "an unknown word": msgpack.packb({"type": "RequestJob", "kind": "Nap"}),
    "a float for an int": msgpack.packb({"type": "WorkerMetrics", "n": 1.0, "lateness_secs": 0.0}),
    "an ext type": msgpack.packb({"type": "RequestJobList", "x": msgpack.ExtType(1, b"x")}),
}
TOO_LARGE = {
    "nested 17 deep": msgpack.packb({"type": "RequestJobList", "x": nested(16)}),
    "a nested bomb": b"\x82\xa4type\xafCandidateScores\xa6scores" + b"\x91" * 5000,
}


async def check_malformed_before_init_ack(make_server: MakeServer) -> None:
    """400 for what is no message, 413 for what breaks a limit; then the close."""
    async with make_server() as server:
        for payload in BROKEN.values():
            async with connected(server) as peer:
                await peer.send_payload(payload)
                await peer.expect_end(400, REFUSALS)
        for payload in TOO_LARGE.values():
            async with connected(server) as peer:
                await peer.send_payload(payload)
                await peer.expect_end(413, REFUSALS)
        async with connected(server) as peer:
            await peer.send_bytes((16 * 1024 + 1).to_bytes(4, "big"))
            await peer.expect_end(413, REFUSALS)


async def check_malformed_after_resume(make_server: MakeServer) -> None:
    """The same in a live session, with the limits of a live session."""
    async with make_server() as server:
        for payload in BROKEN.values():
            async with live(server) as peer:
                await peer.send_payload(payload)
                await peer.expect_end(400)
        elements = {"type": "RequestJobList", "x": [0] * 100_001}
        chunk = {"type": "UploadChunk", "request_id": "r", "offset": 0, "data": bytes(255 * 1024 + 1)}
        for payload in (*TOO_LARGE.values(), msgpack.packb(elements), msgpack.packb(chunk)):
            async with live(server) as peer:
                await peer.send_payload(payload)
                await peer.expect_end(413)
        async with live(server) as peer:
            await peer.send_bytes((4 * 1024 * 1024 + 1).to_bytes(4, "big"))
            await peer.expect_end(413)


async def check_zstd_envelope(make_server: MakeServer) -> None:
    """One message, after `InitAck`, never nested, bounded as it would be outside."""
    compress = zstandard.ZstdCompressor().compress
    padding = "x" * 20_000
    metrics = RawPeer.payload("WorkerMetrics", n=5, lateness_secs=0.0, padding=padding)
    async with make_server() as server:
        async with live(server) as peer:
            await peer.send("Zstd", data=compress(metrics))
            assert (await peer.wait_for("HeartbeatAck"))["n"] == 5
            without_size = zstandard.ZstdCompressor(write_content_size=False).compress(metrics)
            await peer.send("Zstd", data=without_size)
            assert (await peer.wait_for("HeartbeatAck"))["n"] == 5
        bomb = compress(RawPeer.payload("RequestJobList", x="x" * 5_000_000))
        nested_once = compress(RawPeer.payload("Zstd", data=compress(metrics)))
        for data, code in (
            (bomb, 413),
            (nested_once, 400),
            (b"no frame", 400),
            (compress(metrics)[:-4], 400),
        ):
            async with live(server) as peer:
                await peer.send("Zstd", data=data)
                await peer.expect_end(code)
        async with connected(server) as peer:
            await shake_hands(peer, server, capabilities={**ALL, "zstd": False})
            await peer.send("Zstd", data=compress(metrics))
            await peer.expect_end(400)
