"""Connections over memory streams: what arrives, in which order, and how sessions end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
import trio
import trio.testing
from gradient_protocol import limits
from gradient_protocol.codec import Side, encode
from gradient_protocol.connection import Connection
from gradient_protocol.errors import ProtocolError, SessionClosed
from gradient_protocol.framing import frame
from gradient_protocol.messages import common, server, worker
from trio.testing import MemoryReceiveStream, MemorySendStream, memory_stream_pair

ACK = server.ReportAck(assignment_id="a", seq=1)


@dataclass
class Pair:
    """Both ends of one session, and the stream below the server's."""

    server: Connection
    worker: Connection
    server_stream: trio.StapledStream[MemorySendStream, MemoryReceiveStream]


@asynccontextmanager
async def connected(*, enabled: bool = True, writers: bool = True) -> AsyncIterator[Pair]:
    ours, theirs = memory_stream_pair()
    pair = Pair(Connection(ours, Side.SERVER), Connection(theirs, Side.WORKER), ours)
    async with trio.open_nursery() as nursery:
        for connection in (pair.server, pair.worker):
            if enabled:
                connection.enable(zstd=True)
            if writers:
                await nursery.start(connection.run)
        try:
            yield pair
        finally:
            await pair.server.aclose()
            await pair.worker.aclose()


async def stop_reading(pair: Pair) -> trio.Event:
    """Makes the server's writes block until the event is set."""
    event = trio.Event()
    sender = pair.server_stream.send_stream
    pump = sender.send_all_hook
    assert pump is not None

    async def wait() -> None:
        await event.wait()
        await pump()

    sender.send_all_hook = wait
    return event


def log_chunk(size: int, offset: int = 0) -> worker.LogChunk:
    return worker.LogChunk(assignment_id="a", offset=offset, data=b"x" * size)


def count_writes(pair: Pair) -> list[int]:
    """A list that grows by one with each write of the server's."""
    writes: list[int] = []
    sender = pair.server_stream.send_stream
    pump = sender.send_all_hook
    assert pump is not None

    async def count() -> None:
        writes.append(1)
        await pump()

    sender.send_all_hook = count
    return writes


async def test_messages_arrive_in_order() -> None:
    async with connected() as pair:
        for seq in range(1, 100):
            pair.server.send(server.ReportAck(assignment_id="a", seq=seq))
        for seq in range(1, 100):
            assert await pair.worker.receive() == server.ReportAck(assignment_id="a", seq=seq)


async def test_small_messages_share_a_write() -> None:
    async with connected() as pair:
        writes = count_writes(pair)
        for _ in range(100):
            pair.server.send(ACK)
        for _ in range(100):
            await pair.worker.receive()
        assert len(writes) == 1


async def test_a_large_control_message_travels_compressed() -> None:
    async with connected() as pair:
        message = server.RevokeJob(job_ids=["job"] * 50_000)
        pair.server.send(message)
        assert pair.server.pending_control_bytes < len(encode(message)) / 10
        assert await pair.worker.receive() == message


async def test_without_the_capability_it_travels_plain() -> None:
    async with connected() as pair:
        pair.server.enable(zstd=False)
        message = server.RevokeJob(job_ids=["job"] * 50_000)
        pair.server.send(message)
        assert pair.server.pending_control_bytes > len(encode(message))
        assert await pair.worker.receive() == message


async def test_an_envelope_is_refused_before_init_ack() -> None:
    async with connected(enabled=False) as pair:
        pair.server.send(common.Zstd(data=b"x"))
        with pytest.raises(ProtocolError, match="Zstd before InitAck") as caught:
            await pair.worker.receive()
        assert caught.value.code == 400


async def test_the_limit_before_init_ack() -> None:
    async with connected(enabled=False) as pair:
        big = server.RevokeJob(job_ids=["j" * 16 * 1024])
        with pytest.raises(ValueError, match="16384"):
            pair.server.send(big)
        pair.server.enable(zstd=False)
        pair.server.send(big)
        with pytest.raises(ProtocolError) as caught:
            await pair.worker.receive()
        assert caught.value.code == 413


async def test_end_of_stream_says_whether_a_message_was_cut() -> None:
    for sent, reason in ((b"", "closed the connection$"), (b"\0\0\0\x10abc", "in the middle of a message")):
        ours, theirs = memory_stream_pair()
        connection = Connection(ours, Side.SERVER)
        await theirs.send_all(sent or b"\0\0")
        if not sent:
            ours, theirs = memory_stream_pair()
            connection = Connection(ours, Side.SERVER)
        await theirs.aclose()
        with pytest.raises(SessionClosed, match=reason):
            await connection.receive()
        with pytest.raises(SessionClosed, match=reason):
            connection.send(ACK)
        await connection.aclose()


async def test_control_goes_before_bulk_that_waits() -> None:
    async with connected() as pair:
        streams = [pair.worker.open_bulk(f"log-{n}") for n in range(3)]
        for stream in streams:
            await stream.send(log_chunk(1000), end_offset=1000)
        pair.worker.send(worker.RequestJobList())
        assert isinstance(await pair.server.receive(), worker.RequestJobList)
        for _ in streams:
            assert isinstance(await pair.server.receive(), worker.LogChunk)


async def test_a_window_closes_at_4_mib_and_opens_with_the_acknowledgement() -> None:
    async with connected() as pair, trio.open_nursery() as nursery:
        heard: list[int] = []
        stream = pair.worker.open_bulk("a", 0, heard.append)
        sent = 0

        async def sender() -> None:
            nonlocal sent
            while sent < 2 * limits.BULK_WINDOW:
                end = sent + limits.MAX_CHUNK_DATA
                await stream.send(log_chunk(limits.MAX_CHUNK_DATA, sent), end_offset=end)
                sent = end

        async def reader() -> None:
            await pair.worker.receive()

        nursery.start_soon(sender)
        nursery.start_soon(reader)
        received = 0
        while received + limits.MAX_CHUNK_DATA <= limits.BULK_WINDOW:
            message = await pair.server.receive()
            assert isinstance(message, worker.LogChunk)
            received += len(message.data)
        await trio.testing.wait_all_tasks_blocked()
        assert sent == received
        pair.server.send(common.BulkAck(id="a", offset=received - 1000))
        pair.server.send(common.BulkAck(id="a", offset=10))  # late, and says nothing new
        await stream.wait_acknowledged(received - 1000)
        await trio.testing.wait_all_tasks_blocked()
        assert heard == [received - 1000]
        assert stream.acknowledged == received - 1000
        assert sent > received
        nursery.cancel_scope.cancel()


async def test_an_acknowledgement_of_what_was_never_sent_is_a_breach() -> None:
    async with connected() as pair:
        pair.worker.open_bulk("a")
        pair.server.send(common.BulkAck(id="unknown", offset=10))
        pair.server.send(common.BulkAck(id="a", offset=10))
        with pytest.raises(ProtocolError, match="only 0 was sent"):
            await pair.worker.receive()


async def test_wait_written_precedes_the_final_report() -> None:
    async with connected() as pair:
        stream = pair.worker.open_bulk("a")
        await stream.send(log_chunk(10), end_offset=10)
        await stream.wait_written()
        pair.worker.send(worker.JobCompleted(assignment_id="a", seq=1, spans=[], spans_dropped=0))
        assert isinstance(await pair.server.receive(), worker.LogChunk)
        assert isinstance(await pair.server.receive(), worker.JobCompleted)


async def test_what_is_queued_of_a_stream_at_once_shares_a_write() -> None:
    async with connected() as pair:
        writes = count_writes(pair)
        chunks = [server.NarPush(transfer_id="t", offset=at, data=b"data", last=at == 4) for at in (0, 4)]
        stream = pair.server.open_bulk("t")
        await stream.send(*chunks, end_offset=8)
        assert [await pair.worker.receive() for _ in chunks] == chunks
        assert len(writes) == 1


async def test_a_closed_stream_still_writes_what_is_queued() -> None:
    async with connected() as pair:
        stream = pair.worker.open_bulk("a")
        await stream.send(log_chunk(10), end_offset=10)
        stream.close()
        again = pair.worker.open_bulk("a", 10)
        await again.send(log_chunk(20, 10), end_offset=30)
        for size in (10, 20):
            message = await pair.server.receive()
            assert isinstance(message, worker.LogChunk)
            assert len(message.data) == size
        with pytest.raises(SessionClosed, match="is closed"):
            await stream.send(log_chunk(1, 10), end_offset=11)


async def test_an_overflowing_control_lane_ends_the_session() -> None:
    async with connected() as pair:
        await stop_reading(pair)
        pair.server.enable(zstd=False)
        big = server.RevokeJob(job_ids=["j" * (limits.MAX_MESSAGE - 100)])
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            pair.server.send(big)
        with pytest.raises(SessionClosed, match="control messages were waiting"):
            pair.server.send(ACK)
        with pytest.raises(SessionClosed, match="control messages were waiting"):
            await pair.server.receive()


async def test_control_room_waits_and_lets_one_through_at_a_time() -> None:
    async with connected() as pair:
        gate = await stop_reading(pair)
        pair.server.enable(zstd=False)
        big = server.RevokeJob(job_ids=["j" * (limits.MAX_MESSAGE - 100)])
        most = 0

        async def sender() -> None:
            nonlocal most
            for _ in range(3):
                await pair.server.control_room()
                pair.server.send(big)
                most = max(most, pair.server.pending_control_bytes)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(sender)
            await trio.testing.wait_all_tasks_blocked()
            assert not pair.server.control_has_room
            gate.set()
            for _ in range(12):
                await pair.worker.receive()
        assert most < limits.CONTROL_ROOM + limits.MAX_MESSAGE + 8


@pytest.mark.parametrize("idle_secs", [0, 10, 45])
async def test_a_write_without_progress_ends_the_session(
    idle_secs: float, autojump_clock: trio.testing.MockClock
) -> None:
    async with connected() as pair:
        await stop_reading(pair)
        await trio.sleep(idle_secs)
        stream = pair.server.open_bulk("t")
        pair.server.send(ACK)
        with pytest.raises(SessionClosed, match="no progress for 30 s"):
            await stream.wait_acknowledged(1)
        with pytest.raises(SessionClosed, match="no progress for 30 s"):
            await pair.server.receive()
        assert trio.current_time() == pytest.approx(idle_secs + limits.WRITE_STALL_SECS)


async def test_last_words_go_out_before_the_close() -> None:
    async with connected() as pair:
        pair.server.send(common.Error(code=400, reason="no"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: pair.server.aclose(flush_secs=1))
            assert await pair.worker.receive() == common.Error(code=400, reason="no")
            with pytest.raises(SessionClosed):
                await pair.worker.receive()
            await pair.worker.aclose()


async def test_last_words_go_out_without_a_writer() -> None:
    async with connected(writers=False) as pair:
        pair.server.send(common.Error(code=400, reason="no"))
        with trio.CancelScope() as scope:
            scope.cancel()
            await pair.server.aclose(flush_secs=0.05)
        assert await pair.worker.receive() == common.Error(code=400, reason="no")


async def test_a_flush_gives_up_at_its_deadline(autojump_clock: trio.testing.MockClock) -> None:
    async with connected() as pair:
        await stop_reading(pair)
        pair.server.send(ACK)
        await pair.server.aclose(flush_secs=2)
        assert trio.current_time() == pytest.approx(2)
        assert pair.server.closed_reason == "closed"


async def test_the_peers_last_words_are_read_though_writing_is_broken() -> None:
    async with connected() as pair:
        await pair.server_stream.send_all(frame(encode(common.Error(code=503, reason="full"))))
        await pair.server_stream.aclose()
        pair.worker.send(worker.RequestJobList())
        await trio.testing.wait_all_tasks_blocked()
        assert await pair.worker.receive() == common.Error(code=503, reason="full")
        with pytest.raises(SessionClosed):
            await pair.worker.receive()


async def test_a_canceled_writer_leaves_the_stream_whole_or_ends_the_session() -> None:
    ours, theirs = memory_stream_pair()
    connection = Connection(ours, Side.SERVER)
    async with trio.open_nursery() as nursery:
        await nursery.start(connection.run)
        nursery.cancel_scope.cancel()
    connection.send(ACK)
    await connection.aclose(flush_secs=0.05)
    assert await theirs.receive_some() == frame(encode(ACK))

    ours, theirs = memory_stream_pair()
    connection = Connection(ours, Side.SERVER)
    ours.send_stream.send_all_hook = trio.sleep_forever
    async with trio.open_nursery() as nursery:
        await nursery.start(connection.run)
        connection.send(ACK)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    with pytest.raises(SessionClosed, match="canceled in the middle"):
        connection.send(ACK)
    await theirs.aclose()


async def test_bulk_of_impossible_size_or_order_is_refused_at_the_sender() -> None:
    async with connected() as pair:
        stream = pair.worker.open_bulk("a")
        with pytest.raises(ValueError, match="bytes of data"):
            await stream.send(log_chunk(limits.MAX_CHUNK_DATA + 1), end_offset=10)
        with pytest.raises(ValueError, match="of the stream"):
            await stream.send(log_chunk(1), end_offset=limits.BULK_WINDOW + 1)
        await stream.send(log_chunk(10), end_offset=10)
        with pytest.raises(ValueError, match="after one that ended"):
            await stream.send(log_chunk(5), end_offset=5)
        with pytest.raises(ValueError, match="open already"):
            pair.worker.open_bulk("a")


async def test_frames_are_msgspec_messages() -> None:
    """The stream can be read by anything that knows MessagePack."""
    async with connected() as pair:
        pair.server.send(ACK)
        payload = b""
        while len(payload) < 4 + len(encode(ACK)):
            payload += await pair.worker._stream.receive_some()
        assert int.from_bytes(payload[:4], "big") == len(payload) - 4
        assert msgspec.msgpack.decode(payload[4:]) == {"type": "ReportAck", "assignment_id": "a", "seq": 1}
