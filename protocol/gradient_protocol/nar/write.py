"""Packing a tree into an archive, bit-identical to `nix-store --dump`.

The tree is walked with directory descriptors and never through a symlink, so that nothing outside
of it can be packed by a race. A file's size is taken once; a file that has another length by the
time it is read is an error, for its length has been written already.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gradient_protocol.nar.layout import CHUNK_BYTES, MAX_DEPTH, NarError, padding, show, string

__all__ = ["pack", "pack_tree"]

_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_MAGIC = string(b"nix-archive-1")
_OPEN = string(b"(") + string(b"type")
_CLOSE = string(b")")
_REGULAR = _OPEN + string(b"regular") + string(b"contents")
_EXECUTABLE = _OPEN + string(b"regular") + string(b"executable") + string(b"") + string(b"contents")
_SYMLINK = _OPEN + string(b"symlink") + string(b"target")
_DIRECTORY = _OPEN + string(b"directory")
_ENTRY = string(b"entry") + string(b"(") + string(b"name")
_NODE = string(b"node")

# A directory of a listed tree: name to subtree, None for what is packed as it lies on disk.
_Listing = dict[bytes, "_Listing | None"]


def pack(path: Path, *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the archive of the file, symlink or directory at `path`, about `chunk_size` bytes each.

    Raises NarError for what an archive cannot hold and for a tree that changes meanwhile, OSError
    for what cannot be read.
    """
    target = os.fsencode(path)
    parent = os.open(os.path.dirname(target) or b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # noqa: PTH120 - bytes
    try:
        name = os.path.basename(target)  # noqa: PTH119 - bytes
        yield from _Packer(chunk_size).archive(parent, name)
    finally:
        os.close(parent)


def pack_tree(root: Path, files: Sequence[str], *, chunk_size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the archive of a directory that holds only `files`, paths relative to `root`.

    Directories are implied. A path that does not exist (git lists what was deleted but not yet
    staged) is left out; a listed directory, as git lists a repository within, becomes an empty one.
    """
    listing = _listing(root, files)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield from _Packer(chunk_size).listed(descriptor, listing)
    finally:
        os.close(descriptor)


def _listing(root: Path, files: Iterable[str]) -> _Listing:
    top: _Listing = {}
    base = os.fsencode(root)
    for file in files:
        name = os.fsencode(file)
        parts = name.rstrip(b"/").split(b"/")
        if name.startswith(b"/") or any(part in {b"", b".", b".."} for part in parts):
            raise NarError(f"not a path within the tree: {show(name)}")
        try:
            mode = os.lstat(os.path.join(base, name.rstrip(b"/"))).st_mode  # noqa: PTH118 - bytes
        except (FileNotFoundError, NotADirectoryError):
            continue
        directory = top
        for part in parts[:-1]:
            below = directory.setdefault(part, {})
            if below is None:
                raise NarError(f"listed as a file and as a directory: {show(part)}")
            directory = below
        leaf: _Listing | None = {} if stat.S_ISDIR(mode) else None
        if directory.setdefault(parts[-1], leaf) is None and leaf is not None:
            raise NarError(f"listed as a file and as a directory: {show(name)}")
    return top


class _Packer:
    """The walk. What is small is gathered into one piece; what is large passes through."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._gathered = bytearray(_MAGIC)

    def archive(self, parent: int, name: bytes) -> Iterator[bytes]:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        yield from self._node(parent, name, mode, None, 0)
        yield bytes(self._gathered)

    def listed(self, descriptor: int, listing: _Listing) -> Iterator[bytes]:
        yield from self._directory(descriptor, listing, 0)
        yield bytes(self._gathered)

    def _node(
        self, parent: int, name: bytes, mode: int, listing: _Listing | None, depth: int
    ) -> Iterator[bytes]:
        if listing is not None and not stat.S_ISDIR(mode):
            raise NarError(f"{show(name)} is on the way to a listed file, and is no directory")
        if stat.S_ISREG(mode):
            yield from self._file(parent, name)
        elif stat.S_ISLNK(mode):
            self._gathered += _SYMLINK
            self._gathered += string(os.readlink(name, dir_fd=parent))
            self._gathered += _CLOSE
        elif stat.S_ISDIR(mode):
            if depth >= MAX_DEPTH:
                raise NarError(f"more than {MAX_DEPTH} directories deep at {show(name)}")
            descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
            try:
                yield from self._directory(descriptor, listing, depth)
            finally:
                os.close(descriptor)
        else:
            raise NarError(f"{show(name)} is neither a file, a directory nor a symlink")

    def _directory(self, descriptor: int, listing: _Listing | None, depth: int) -> Iterator[bytes]:
        gathered = self._gathered
        gathered += _DIRECTORY
        names = map(os.fsencode, os.listdir(descriptor)) if listing is None else listing
        for name in sorted(names):
            gathered += _ENTRY
            gathered += string(name)
            gathered += _NODE
            below = None if listing is None else listing[name]
            try:
                mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            except FileNotFoundError:
                raise NarError(f"{show(name)} vanished while it was packed") from None
            yield from self._node(descriptor, name, mode, below, depth + 1)
            gathered += _CLOSE
            if len(gathered) >= self._chunk_size:
                yield bytes(gathered)
                gathered.clear()
        gathered += _CLOSE

    def _file(self, parent: int, name: bytes) -> Iterator[bytes]:
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=parent)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise NarError(f"{show(name)} changed its kind while it was packed")
            self._gathered += _EXECUTABLE if info.st_mode & stat.S_IXUSR else _REGULAR
            self._gathered += info.st_size.to_bytes(8, "little")
            yield from self._contents(descriptor, name, info.st_size)
            self._gathered += padding(info.st_size)
            self._gathered += _CLOSE
        finally:
            os.close(descriptor)

    def _contents(self, descriptor: int, name: bytes, size: int) -> Iterator[bytes]:
        gathered = self._gathered
        left = size
        while left:
            data = os.read(descriptor, min(left, self._chunk_size))
            if not data:
                raise NarError(f"{show(name)} became shorter while it was packed")
            left -= len(data)
            if len(gathered) + len(data) < self._chunk_size:
                gathered += data
                continue
            yield bytes(gathered)
            gathered.clear()
            yield data
        if os.read(descriptor, 1):
            raise NarError(f"{show(name)} became longer while it was packed")
