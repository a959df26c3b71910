"""Taking in a NAR from the wire."""

import os
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from gradient_protocol.kinds import Compression
from gradient_protocol.nar import NarError, NarHasher, NarVerifier, Unpacker, compress, pack

from tests.unit.nar.archives import MAGIC, regular


def described(archive: bytes) -> tuple[str, int]:
    hasher = NarHasher()
    hasher.feed(archive)
    return hasher.hash, hasher.size


def take_in(travelled: bytes, verifier: NarVerifier, step: int = 255 * 1024) -> None:
    for at in range(0, len(travelled), step):
        verifier.feed(travelled[at : at + step])
    verifier.finish()


ARCHIVE = MAGIC + regular(os.urandom(300_000) + bytes(700_000))
TRAVELLED = b"".join(compress([ARCHIVE]))


@pytest.mark.parametrize("step", [1 << 20, 1000, 7])
def test_a_nar_passes_through_to_its_sink(tmp_path: Path, step: int) -> None:
    verifier = NarVerifier(*described(ARCHIVE), Compression.ZSTD, Unpacker(tmp_path / "file"))
    take_in(TRAVELLED, verifier, step)
    assert b"".join(pack(tmp_path / "file")) == ARCHIVE
    assert verifier.travelled_bytes == len(TRAVELLED)


def test_a_plain_nar_passes_too() -> None:
    take_in(ARCHIVE, NarVerifier(*described(ARCHIVE), Compression.NONE))


@pytest.mark.parametrize("level", [1, 3, 9, 19])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("content_size", [True, False])
@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000, 2_000_000])
def test_every_kind_of_frame_header_is_understood(
    level: int, checksum: bool, content_size: bool, size: int
) -> None:
    plain = (os.urandom(1000) * (size // 1000 + 1))[:size]
    frame = zstandard.ZstdCompressor(
        level=level, write_checksum=checksum, write_content_size=content_size
    ).compress(plain)
    take_in(frame, NarVerifier(*described(plain), Compression.ZSTD), step=11)


@pytest.mark.parametrize("compression", list(Compression))
def test_truncation_extension_and_damage_are_noticed(compression: Compression) -> None:
    travelled = TRAVELLED if compression is Compression.ZSTD else ARCHIVE
    damaged = bytearray(travelled)
    damaged[len(damaged) // 4] ^= 1
    for wrong in (travelled[:-1], travelled[: len(travelled) // 2], b"", travelled + b"x", bytes(damaged)):
        with pytest.raises(NarError):
            take_in(wrong, NarVerifier(*described(ARCHIVE), compression))


def test_a_second_frame_is_refused() -> None:
    half = len(ARCHIVE) // 2
    two = b"".join(compress([ARCHIVE[:half]])) + b"".join(compress([ARCHIVE[half:]]))
    with pytest.raises(NarError, match="after the compressed archive's end"):
        take_in(two, NarVerifier(*described(ARCHIVE), Compression.ZSTD))


def test_another_hash_and_another_size_are_told_apart() -> None:
    nar_hash, nar_size = described(ARCHIVE)
    with pytest.raises(NarError, match="hash is"):
        take_in(TRAVELLED, NarVerifier("sha256:" + "0" * 64, nar_size, Compression.ZSTD))
    with pytest.raises(NarError, match="longer than"):
        take_in(TRAVELLED, NarVerifier(nar_hash, nar_size - 1, Compression.ZSTD))
    with pytest.raises(NarError, match="were declared"):
        take_in(TRAVELLED, NarVerifier(nar_hash, nar_size + 1, Compression.ZSTD))


def test_a_bomb_is_stopped_at_the_declared_size_in_bounded_memory() -> None:
    bomb = b"".join(compress(bytes(1 << 20) for _ in range(2000)))
    assert len(bomb) < 200_000
    tracemalloc.start()
    try:
        with pytest.raises(NarError, match="longer than the declared 1000000 bytes"):
            NarVerifier("sha256:" + "0" * 64, 1_000_000, Compression.ZSTD).feed(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_frame_that_wants_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = wide.compress(os.urandom(100_000)) + wide.flush()
    with pytest.raises(NarError, match="damaged"):
        NarVerifier("sha256:" + "0" * 64, 1_000_000, Compression.ZSTD).feed(frame)


def test_compressing_again_gives_the_same_bytes() -> None:
    pieces = [ARCHIVE[at : at + 10_000] for at in range(0, len(ARCHIVE), 10_000)]
    assert b"".join(compress(pieces)) == b"".join(compress(pieces))
