"""Logs of jobs: stored in a file, acknowledged, announced (protocol.md, Lanes and flow)."""

from collections.abc import Sequence
from typing import Final

import structlog
import trio
import zstandard
from gradient_protocol.errors import ProtocolError
from gradient_protocol.limits import MAX_CHUNK_DATA
from gradient_protocol.messages.common import BulkAck, Message
from gradient_protocol.messages.worker import LogChunk

from gradient_server.domain.events import LogGrew
from gradient_server.net.services import Services
from gradient_server.net.session import Session
from gradient_server.storage.durable import StorageError
from gradient_server.storage.logs import LogError, LogGapError

__all__ = ["store_chunks"]

log = structlog.get_logger(__name__)

_BAD_REQUEST: Final = 400


async def store_chunks(services: Services, session: Session, messages: Sequence[Message]) -> None:
    """Store chunks of one assignment's log, in order, and acknowledge them together.

    What names no assignment of this session is ignored. ProtocolError 400 for a gap, or for a chunk
    that cannot be read.
    """
    piece = [message for message in messages if isinstance(message, LogChunk)]
    held = session.held_or_ended(piece[0].assignment_id)
    if held is None:
        return
    compressed = session.capabilities.zstd

    def store() -> int:
        offset = held.log_bytes
        for chunk in piece:
            offset = services.logs.append(
                chunk.assignment_id, chunk.offset, chunk.data, compressed=compressed
            )
        return offset

    try:
        if held.log_broken:
            held.log_bytes = _end_of(piece[-1], compressed=compressed)
        else:
            held.log_bytes = await trio.to_thread.run_sync(store, limiter=services.log_threads)
    except (LogGapError, LogError) as error:
        raise ProtocolError(_BAD_REQUEST, f"log of {held.assignment_id}: {error}") from error
    except StorageError as error:
        # A build never waits for its log: from here on it is acknowledged, and missing.
        log.error("a log cannot be stored", assignment=held.assignment_id, reason=str(error))
        held.log_broken = True
        held.log_bytes = _end_of(piece[-1], compressed=compressed)
    session.send(BulkAck(id=held.assignment_id, offset=held.log_bytes))
    services.bus.publish([LogGrew(held.assignment_id, held.job_id, held.log_bytes)])


def _end_of(chunk: LogChunk, *, compressed: bool) -> int:
    """Where a chunk ends, in uncompressed bytes."""
    if not compressed:
        return chunk.offset + len(chunk.data)
    try:
        plain = zstandard.ZstdDecompressor().decompress(chunk.data, max_output_size=MAX_CHUNK_DATA)
    except zstandard.ZstdError as error:
        raise ProtocolError(_BAD_REQUEST, f"log of {chunk.assignment_id}: {error}") from error
    return chunk.offset + len(plain)
