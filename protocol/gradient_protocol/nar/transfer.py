"""An archive on the wire: compressing one, and taking one in (protocol.md, "Transfers")."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import zstandard

from gradient_protocol.kinds import Compression
from gradient_protocol.nar.digest import NarHasher
from gradient_protocol.nar.layout import NarError

__all__ = ["NarIntake", "NarVerifier", "Sink", "compress"]

# What RFC 8878 asks every decoder to support; a frame that wants more could make us allocate it.
_MAX_WINDOW_BYTES = 8 * 1024 * 1024
_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_BLOCK_BYTES = 128 * 1024
_RAW_BLOCK, _RLE_BLOCK, _COMPRESSED_BLOCK = 0, 1, 2


class Sink(Protocol):
    """Whatever takes an uncompressed archive in pieces: an Unpacker, a scanner."""

    def feed(self, data: bytes | memoryview, /) -> object:
        """Take the next piece."""
        ...

    def finish(self) -> None:
        """The archive was complete and is what it should be."""
        ...


def compress(chunks: Iterable[bytes], level: int = 3) -> Iterator[bytes]:
    """One zstd frame of everything in `chunks`. The same chunks give the same bytes."""
    compressor = zstandard.ZstdCompressor(level=level).compressobj()
    for chunk in chunks:
        if compressed := compressor.compress(chunk):
            yield compressed
    yield compressor.flush()


class NarIntake:
    """Takes in a NAR as it travels, before anybody has said what it should be.

    Decompresses with bounded output, stops at `limit_bytes` of archive, feeds `sink`. Raises NarError
    as soon as something is wrong. Bytes after the frame are an error, so are two frames.
    """

    def __init__(self, compression: Compression, limit_bytes: int, sink: Sink | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._sink = sink
        self._hasher = NarHasher()
        self._frame = _Frame() if compression is Compression.ZSTD else None
        self.compression = compression
        self.travelled_bytes = 0

    def feed(self, travelled: bytes | memoryview) -> None:
        """Take the next bytes as they came off the wire."""
        self.travelled_bytes += len(travelled)
        if self._frame is None:
            self._take(travelled)
        else:
            for piece in self._frame.decompress(travelled):
                self._take(piece)

    def finish(self, nar_hash: str, nar_size: int) -> None:
        """Raises NarError unless the whole NAR was fed and is the one that is declared here."""
        if self._frame is not None and not self._frame.ended:
            raise NarError("the compressed archive ends in the middle")
        if self._hasher.size != nar_size:
            raise NarError(f"the archive has {self._hasher.size} bytes, {nar_size} were declared")
        if self._hasher.hash != nar_hash:
            raise NarError(f"the archive's hash is {self._hasher.hash}, {nar_hash} was declared")
        if self._sink is not None:
            self._sink.finish()

    def _take(self, piece: bytes | memoryview) -> None:
        if self._hasher.size + len(piece) > self._limit_bytes:
            raise NarError(f"the archive is longer than the declared {self._limit_bytes} bytes")
        self._hasher.feed(piece)
        if self._sink is not None:
            self._sink.feed(piece)


class NarVerifier:
    """Takes in a NAR as it travels, and holds it to a hash and size that are declared beforehand.

    As NarIntake, of `nar_size` bytes.
    """

    def __init__(
        self, nar_hash: str, nar_size: int, compression: Compression, sink: Sink | None = None
    ) -> None:
        self._nar_hash = nar_hash
        self._nar_size = nar_size
        self._intake = NarIntake(compression, nar_size, sink)

    @property
    def travelled_bytes(self) -> int:
        """What was fed."""
        return self._intake.travelled_bytes

    def feed(self, travelled: bytes | memoryview) -> None:
        """Take the next bytes as they came off the wire."""
        self._intake.feed(travelled)

    def finish(self) -> None:
        """Raises NarError unless the whole NAR was fed and is the declared one."""
        self._intake.finish(self._nar_hash, self._nar_size)


class _Frame:
    """One zstd frame, decompressed block by block.

    A few bytes of a frame can stand for gigabytes, and the library's incremental interface gives all
    that its input yields at once. So the frame's blocks (RFC 8878, section 3.1.1) are counted off
    here and given to it one at a time: each yields 128 KiB at most.
    """

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
        # Bytes of a header that is not complete yet, and what is left of the block or checksum begun.
        self._header = b""
        self._left = 0
        self._started = False
        self._last_block = False
        self._checksum_bytes = 0
        self.ended = False

    def decompress(self, travelled: bytes | memoryview) -> Iterator[bytes]:
        data = memoryview(travelled)
        at = 0
        while at < len(data):
            if self.ended:
                raise NarError("data after the compressed archive's end")
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                yield from self._decompress(piece)
                if not self._left and self._last_block:
                    self._end_of_block()
            else:
                at = self._read_header(data, at)
                if not self._header and not self._left and self._last_block:
                    self._end_of_block()

    def _decompress(self, piece: bytes | memoryview) -> Iterator[bytes]:
        try:
            plain = self._decompressor.decompress(piece)
        except zstandard.ZstdError as error:
            raise NarError(f"the compressed archive is damaged: {error}") from None
        if plain:
            yield plain

    def _read_header(self, data: memoryview, at: int) -> int:
        """Gather a frame's or a block's header; returns where to go on."""
        wanted = 3 if self._started else _frame_header_bytes(self._header)
        piece = bytes(data[at : at + wanted - len(self._header)])
        self._header += piece
        at += len(piece)
        if len(self._header) < wanted:
            return at
        if self._started:
            self._begin_block(self._header)
        elif len(self._header) < _frame_header_bytes(self._header):
            return at
        else:
            self._started = True
            self._checksum_bytes = 4 if self._header[4] & 0b100 else 0
        for plain in self._decompress(self._header):
            raise NarError(f"the compressed archive is damaged: {len(plain)} bytes from a header")
        self._header = b""
        return at

    def _begin_block(self, header: bytes) -> None:
        value = int.from_bytes(header, "little")
        kind, size = (value >> 1) & 0b11, value >> 3
        if kind not in {_RAW_BLOCK, _RLE_BLOCK, _COMPRESSED_BLOCK} or size > _MAX_BLOCK_BYTES:
            raise NarError("the compressed archive is damaged: a bad block")
        self._last_block = bool(value & 1)
        self._left = 1 if kind == _RLE_BLOCK else size

    def _end_of_block(self) -> None:
        """The last block, or the checksum after it, is complete."""
        self._left, self._checksum_bytes = self._checksum_bytes, 0
        self.ended = not self._left


def _frame_header_bytes(start: bytes) -> int:
    """How long the frame's header is, as far as `start`, its first bytes, tells."""
    if not _MAGIC.startswith(start[:4]):
        raise NarError("the compressed archive is no zstd frame")
    if len(start) < 5:
        return 5
    descriptor = start[4]
    single_segment = descriptor >> 5 & 1
    dictionary = (0, 1, 2, 4)[descriptor & 0b11]
    content_size = (single_segment, 2, 4, 8)[descriptor >> 6]
    return 5 + (1 - single_segment) + dictionary + content_size
