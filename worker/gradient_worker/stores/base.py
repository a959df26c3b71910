"""What the worker asks of a store, whichever kind it is.

A path travels as `<32 characters>-<name>`; `real_path` gives where it lies on this host. `info`,
`take_packed`, `pin` and `unpin` are quick and may be called from the event loop; everything else reads
or writes the disk and belongs in a thread. All of it may be called from any thread.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gradient_protocol.kinds import Compression

__all__ = ["BadOutputError", "GarbageReport", "NarReceiver", "PathInfo", "Store", "StoreError"]


class StoreError(Exception):
    """The store cannot do what was asked. One clear line."""


class BadOutputError(StoreError):
    """What a build made cannot be stored (missing, or of a kind no archive holds): the build's fault."""


@dataclass(frozen=True, slots=True)
class PathInfo:
    """A valid path. `nar_size` in bytes, `nar_hash` as `sha256:<hex>`, both of the plain archive.

    `contains_store_dir`: the worker's own base directory was found in an output that it built, so
    that the output works on this host alone (operations.md, "Recipes").
    """

    path: str
    nar_hash: str
    nar_size: int
    references: tuple[str, ...]
    contains_store_dir: bool = False


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What a collection removed, and how many bytes of archives are held after it."""

    removed: tuple[str, ...]
    freed_bytes: int
    held_bytes: int


class NarReceiver(Protocol):
    """Takes in one archive as it travels. Sync, for a thread; one caller at a time."""

    def feed(self, travelled: bytes, /) -> None:
        """The next bytes off the wire. Raises NarError for a bad archive, OSError for a bad disk."""
        ...

    def commit(self) -> PathInfo:
        """Verify length and hash, and make the path valid in one step. Raises like `feed`."""
        ...

    def abort(self) -> None:
        """Remove what was unpacked. Safe at any time, and again; without effect after `commit`."""
        ...


class Store(Protocol):
    """A worker's store."""

    @property
    def directory(self) -> Path:
        """Where the paths lie."""
        ...

    def real_path(self, path: str) -> Path:
        """Where `path` lies, or would. Raises StoreError for what is no store path."""
        ...

    def info(self, path: str) -> PathInfo | None:
        """What is known of a valid path, else None. From memory."""
        ...

    def paths(self) -> list[str]:
        """All valid paths."""
        ...

    def closure(self, paths: Iterable[str]) -> list[str]:
        """Those of `paths` that are valid, with every valid path that they refer to, in turn."""
        ...

    def receive(
        self, path: str, nar_hash: str, nar_size: int, references: Iterable[str], compression: Compression
    ) -> NarReceiver:
        """Begin to take in `path`. Each receiver must end in `commit` or `abort`."""
        ...

    def register_output(self, path: str, built: Path, candidates: Iterable[str]) -> PathInfo:
        """Move what a build made at `built` into the store as `path`, and make it valid.

        References are looked for among `candidates` (the inputs' closure and all outputs of the
        build) and `path` itself. Raises BadOutputError where the build is at fault.
        """
        ...

    def take_unregistered(self, path: str) -> Path | None:
        """What an earlier process had made of `path` when it ended before it was registered, once.

        Of this boot of the host alone, until the next opening or the second collection. Not verified:
        `register_output` takes it as it takes what a build made. What is taken is not collected.
        """
        ...

    def pack(self, path: str) -> Iterator[bytes]:
        """The archive of a valid path, in pieces. Raises StoreError for any other."""
        ...

    def take_packed(self, info: PathInfo) -> Sequence[bytes] | None:
        """The same pieces, once, if the path is small and was registered just now. From memory."""
        ...

    def pin(self, holder: str, paths: Iterable[str]) -> None:
        """Keep these paths, and all they refer to, from collection until `unpin`; adds to earlier ones.

        A path that is not there yet may be pinned.
        """
        ...

    def unpin(self, holder: str) -> None:
        """Drop all pins of `holder`, which need not have any."""
        ...

    def collect_garbage(self, max_bytes: int) -> GarbageReport:
        """Remove what was used least recently until at most `max_bytes` of archives are held.

        Never a pinned path or what one refers to; a path goes before those it refers to.
        """
        ...

    def subscribe(self, listener: Callable[[tuple[str, ...]], None]) -> Callable[[], None]:
        """Call `listener` with paths that came or went, after the fact; returns how to stop that.

        Called from whichever thread made the change, which waits: it must be quick. What it hears
        may be older than what `info` says by then; so it should ask `info`, here or later.
        """
        ...
