"""Connections over real sockets, where the short way is taken."""

import socket

import pytest
import trio
import trio.testing
from gradient_protocol import limits
from gradient_protocol.at_once import read_when_ready, write_at_once
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.errors import ProtocolError, SessionClosed
from gradient_protocol.messages import common, server, worker


def socket_pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    ours, theirs = socket.socketpair()
    return (
        trio.SocketStream(trio.socket.from_stdlib_socket(ours)),
        trio.SocketStream(trio.socket.from_stdlib_socket(theirs)),
    )


async def test_a_full_socket_takes_what_it_can() -> None:
    ours, theirs = socket_pair()
    data = bytes(10_000_000)
    done = write_at_once(ours, data)
    assert 0 < done < len(data)
    assert write_at_once(ours, data) == 0
    await theirs.aclose()
    with pytest.raises(trio.BrokenResourceError):
        write_at_once(ours, data)
    await ours.aclose()
    with pytest.raises(trio.ClosedResourceError):
        write_at_once(ours, data)
    with pytest.raises(trio.ClosedResourceError):
        await read_when_ready(ours, 10)


async def test_a_read_ends_when_another_task_closes_the_stream() -> None:
    """Also where the bytes were there already, and the descriptor's number is in use again."""
    ours, theirs = socket_pair()

    async def read() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await read_when_ready(ours, 10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await ours.aclose()
    await theirs.aclose()

    for _ in range(20):
        ours, theirs = socket_pair()
        others: list[trio.SocketStream] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert write_at_once(theirs, b"late") == 4
            ours.socket.close()
            others += socket_pair()
            assert write_at_once(others[0], b"not yours") == 9
            assert write_at_once(others[1], b"not yours") == 9
        for stream in (theirs, *others):
            await stream.aclose()


async def test_everything_arrives_through_a_socket_that_is_often_full() -> None:
    ours, theirs = socket_pair()
    at_server, at_worker = Connection(ours, Side.SERVER), Connection(theirs, Side.WORKER)
    chunks = 40
    async with trio.open_nursery() as nursery:
        for end in (at_server, at_worker):
            end.enable(zstd=True)
            await nursery.start(end.run)

        async def push() -> None:
            stream = at_worker.open_bulk("r")
            for number in range(chunks):
                offset = number * limits.MAX_CHUNK_DATA
                chunk = worker.UploadChunk(request_id="r", offset=offset, data=bytes(limits.MAX_CHUNK_DATA))
                await stream.send(chunk, end_offset=offset + limits.MAX_CHUNK_DATA)
            await stream.wait_acknowledged(chunks * limits.MAX_CHUNK_DATA)

        async def hear_acknowledgements() -> None:
            with pytest.raises(SessionClosed):
                await at_worker.receive()

        nursery.start_soon(push)
        nursery.start_soon(hear_acknowledgements)
        for number in range(chunks):
            chunk = await at_server.receive()
            assert isinstance(chunk, worker.UploadChunk)
            assert chunk.offset == number * limits.MAX_CHUNK_DATA
            at_server.send(common.BulkAck(id="r", offset=chunk.offset + len(chunk.data)))
            await trio.testing.wait_all_tasks_blocked()
        await at_server.aclose(flush_secs=1)
        await at_worker.aclose()


async def test_last_words_survive_what_the_peer_still_sends() -> None:
    """Closing a socket with unread bytes resets it, and a reset would destroy the answer."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]

    async def refuse(stream: trio.SocketStream) -> None:
        connection = Connection(stream, Side.SERVER)
        async with trio.open_nursery() as nursery:
            await nursery.start(connection.run)
            with pytest.raises(ProtocolError) as caught:
                await connection.receive()
            connection.send(common.Error(code=caught.value.code, reason=caught.value.reason))
            await connection.aclose(flush_secs=5)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, refuse, listeners)
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        peer = Connection(stream, Side.WORKER)
        with trio.move_on_after(5):
            await stream.send_all(b"\0\1\0\0" + bytes(1024 * 1024))
        answer = await peer.receive()
        assert isinstance(answer, common.Error)
        assert answer.code == 413
        await peer.aclose()
        nursery.cancel_scope.cancel()


async def test_a_reset_says_so() -> None:
    ours, theirs = socket_pair()
    connection = Connection(ours, Side.SERVER)
    await theirs.aclose()
    async with trio.open_nursery() as nursery:
        await nursery.start(connection.run)
        connection.send(server.ReportAck(assignment_id="a", seq=1))
        with pytest.raises(SessionClosed, match=r"broke|closed"):
            await connection.receive()
