"""`python -m bench.nar`: packing and unpacking beside bare reading and writing of the same files.

One JSON line a case; MB/s are of the archive's size (10^6 bytes), the best of three runs.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gradient_protocol.kinds import Compression
from gradient_protocol.nar import (
    NarHasher,
    NarVerifier,
    ReferenceScanner,
    Unpacker,
    compress,
    pack,
    remove_tree,
)

CASES = {"many_small": (10_000, 2_000), "few_large": (4, 64_000_000)}
HASHES = [f"{n:032d}" for n in range(500)]


def make(root: Path, files: int, size_bytes: int) -> None:
    block = (
        os.urandom(size_bytes // 2)
        + (b"some text that compresses, " * (size_bytes // 54 + 1))[: size_bytes // 2]
    )
    for n in range(files):
        directory = root / f"d{n // 100:03d}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{n:05d}").write_bytes(block)


def seconds(action: Callable[[], object], clean: Callable[[], None] = lambda: None) -> float:
    best = float("inf")
    for _ in range(3):
        clean()
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def drain(root: Path, *sinks: NarHasher | ReferenceScanner) -> None:
    for piece in pack(root):
        for sink in sinks:
            sink.feed(piece)


def bare_read(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            with (Path(directory) / name).open("rb", buffering=0) as file:
                while file.read(256 * 1024):
                    pass


def take_in(pieces: list[bytes], verifier: NarVerifier) -> None:
    for piece in pieces:
        verifier.feed(piece)
    verifier.finish()


def main() -> None:
    base = Path(tempfile.mkdtemp(prefix="bench-nar-"))
    try:
        for case, (files, size_bytes) in CASES.items():
            measure(base / case, case, files, size_bytes)
    finally:
        shutil.rmtree(base)


def measure(base: Path, case: str, files: int, size_bytes: int) -> None:
    tree, copy, bare = base / "tree", base / "copy", base / "bare"
    make(tree, files, size_bytes)
    hasher = NarHasher()
    drain(tree, hasher)
    archive = list(pack(tree))
    travelled = list(compress(archive))

    def verified(sink: Unpacker | None) -> None:
        take_in(travelled, NarVerifier(hasher.hash, hasher.size, Compression.ZSTD, sink))

    def unpack() -> None:
        unpacker = Unpacker(copy)
        for piece in archive:
            unpacker.feed(piece)
        unpacker.finish()

    def write_bare() -> None:
        shutil.copytree(tree, bare)

    speeds: dict[str, float] = {
        "bare_read": seconds(lambda: bare_read(tree)),
        "pack": seconds(lambda: drain(tree)),
        "pack_hash_scan": seconds(
            lambda: drain(tree, NarHasher(), ReferenceScanner(HASHES, [b"/var/lib/x/"]))
        ),
        "bare_copytree": seconds(write_bare, lambda: shutil.rmtree(bare, ignore_errors=True)),
        "unpack": seconds(unpack, lambda: remove_tree(copy)),
        "compress": seconds(lambda: list(compress(archive))),
        "verify_zstd": seconds(lambda: verified(None)),
        "verify_zstd_unpack": seconds(lambda: verified(Unpacker(copy)), lambda: remove_tree(copy)),
    }
    line = {"case": case, "files": files, "nar_bytes": hasher.size, "zstd_bytes": sum(map(len, travelled))}
    print(json.dumps({**line, **{f"{k}_mb_s": round(hasher.size / 1e6 / v, 1) for k, v in speeds.items()}}))


if __name__ == "__main__":
    main()
