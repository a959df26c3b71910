"""What is learned about an archive while it passes: its hash and size, and what it refers to."""

import hashlib
from collections.abc import Iterable

__all__ = ["HASH_CHARS", "NarHasher", "ReferenceScanner"]

# Length of the hash that a store path begins with, and the letters it is made of (messages.md).
HASH_CHARS = 32
_ALPHABET = b"0123456789abcdfghijklmnpqrsvwxyz"

# Maps letters that a hash can hold to "a" and all others to " ": a candidate is then a run of 32 "a",
# which bytes.find looks for by skipping, at several GB/s.
_CLASSES = bytes(ord("a") if byte in _ALPHABET else ord(" ") for byte in range(256))
_RUN = b"a" * HASH_CHARS


class NarHasher:
    """SHA-256 and size of what is fed."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self.size = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Take in the next piece."""
        self._sha256.update(data)
        self.size += len(data)

    @property
    def hash(self) -> str:
        """`sha256:<hex>` of what was fed so far."""
        return f"sha256:{self._sha256.hexdigest()}"


class ReferenceScanner:
    """Finds which of `hashes` (32 characters each) and `markers` (any bytes) occur in what is fed.

    Occurrences across the borders of pieces are found. `found` are the hashes, `found_markers` the
    markers. More than 1 GB/s however many hashes there are.
    """

    def __init__(self, hashes: Iterable[str], markers: Iterable[bytes] = ()) -> None:
        self._wanted = {hash_part.encode() for hash_part in hashes}
        self._markers = [marker for marker in dict.fromkeys(markers) if marker]
        if any(len(hash_part) != HASH_CHARS for hash_part in self._wanted):
            raise ValueError(f"a hash must have {HASH_CHARS} characters")
        longest = max([HASH_CHARS, *map(len, self._markers)])
        self._overlap = longest - 1
        self._tail = b""
        self.found: set[str] = set()
        self.found_markers: set[bytes] = set()

    def feed(self, data: bytes | memoryview) -> None:
        """Scan the next piece."""
        # The end of the last piece is scanned again with the start of this one; the bulk of the data
        # is never copied for it.
        if self._tail:
            self._scan(self._tail + bytes(data[: self._overlap]))
        piece = bytes(data)
        self._scan(piece)
        self._tail = (
            (self._tail + piece)[-self._overlap :] if len(piece) < self._overlap else piece[-self._overlap :]
        )

    def _scan(self, piece: bytes) -> None:
        if self._markers:
            hits = [marker for marker in self._markers if marker in piece]
            self.found_markers.update(hits)
            self._markers = [marker for marker in self._markers if marker not in hits]
        if not self._wanted:
            return
        classes = piece.translate(_CLASSES)
        start = classes.find(_RUN)
        while start >= 0 and self._wanted:
            end = classes.find(b" ", start + HASH_CHARS)
            end = len(classes) if end < 0 else end
            self._look_in_run(piece, start, end)
            start = classes.find(_RUN, end)

    def _look_in_run(self, piece: bytes, start: int, end: int) -> None:
        # A long run (a file of zeros in text, a base-32 blob) is searched once per hash where that is
        # cheaper than looking at every position of it.
        wanted = self._wanted
        if end - start > 64 * len(wanted):
            hits = {hash_part for hash_part in wanted if piece.find(hash_part, start, end) >= 0}
        else:
            hits = {piece[at : at + HASH_CHARS] for at in range(start, end - HASH_CHARS + 1)} & wanted
        self.found.update(hash_part.decode() for hash_part in hits)
        wanted -= hits
