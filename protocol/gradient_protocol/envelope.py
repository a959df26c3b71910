"""The `Zstd` envelope around one large control message (protocol.md, "Stream")."""

import zstandard

from gradient_protocol.codec import encode
from gradient_protocol.errors import BAD_REQUEST, TOO_LARGE, ProtocolError
from gradient_protocol.limits import MAX_MESSAGE
from gradient_protocol.messages.common import Zstd

__all__ = ["unwrap", "wrap"]

_LEVEL = 3
_compress = zstandard.ZstdCompressor(level=_LEVEL).compress
_decompressor = zstandard.ZstdDecompressor(max_window_size=2 * MAX_MESSAGE)


def wrap(payload: bytes) -> bytes:
    """The encoded envelope of one encoded message."""
    return encode(Zstd(data=_compress(payload)))


def unwrap(envelope: Zstd, limit: int = MAX_MESSAGE) -> bytes:
    """The encoded message inside. ProtocolError 413 over `limit` bytes, 400 for what is not one frame.

    A frame that declares its size is decompressed in one piece, after that size was judged; one that
    does not is read through a stream first, to one byte beyond `limit`.
    """
    data = envelope.data
    try:
        declared = zstandard.frame_content_size(data)
        if declared < 0:
            with _decompressor.stream_reader(data) as reader:
                declared = len(reader.read(limit + 1))
        if declared > limit:
            raise ProtocolError(TOO_LARGE, f"Zstd: over {limit} bytes inside")
        if not declared:
            raise ProtocolError(BAD_REQUEST, "Zstd: nothing inside")
        return _decompressor.decompress(data, max_output_size=declared, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(BAD_REQUEST, f"Zstd: not one frame: {error}") from None
