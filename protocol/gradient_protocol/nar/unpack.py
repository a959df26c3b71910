"""Unpacking an archive to disk as it arrives, and removing such a tree again.

Everything is created exclusively, relative to descriptors of directories that were made here, and
no symlink is ever followed: an archive cannot write outside of its destination, whatever it holds
and whatever another process does meanwhile to names on the way.
"""

import contextlib
import errno
import os
from pathlib import Path

from gradient_protocol.nar.layout import show
from gradient_protocol.nar.read import (
    BeginDirectory,
    BeginFile,
    EndDirectory,
    EndFile,
    FileData,
    NarEvent,
    NarReader,
    Symlink,
)

__all__ = ["Unpacker", "remove_tree"]

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# All times of a store are one second past the epoch.
_TIMES_SECS = (1, 1)


class Unpacker:
    """Takes an archive in pieces and builds it at `destination`, which must not exist yet.

    Files become 0444 or 0555, directories 0555, times 1. Raises NarError for a bad archive and
    OSError for a bad disk; the caller then calls `abort`, which removes what was made.
    """

    def __init__(self, destination: Path) -> None:
        self._destination = destination
        self._root_name = os.fsencode(destination.name)
        self._reader = NarReader()
        self._file: int | None = None
        self._executable = False
        self._made = False
        self._directories = [os.open(destination.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]

    def feed(self, data: bytes | memoryview) -> None:
        """Unpack what `data` completes."""
        for event in self._reader.feed(data):
            self._take(event)
            self._made = True

    def finish(self) -> None:
        """The archive must be complete; the tree is, then."""
        self._reader.finish()
        self._close()

    def abort(self) -> None:
        """Close everything and remove what was made. Safe at any time, and again."""
        self._close()
        if self._made:
            remove_tree(self._destination)

    def _take(self, event: NarEvent) -> None:
        match event:
            case FileData(piece):
                self._write(piece)
            case BeginFile(name, executable, _):
                self._file = os.open(
                    name or self._root_name, _CREATE_FLAGS, 0o600, dir_fd=self._directories[-1]
                )
                self._executable = executable
            case EndFile():
                self._end_file()
            case BeginDirectory(name):
                self._begin_directory(name or self._root_name)
            case EndDirectory():
                descriptor = self._directories.pop()
                try:
                    os.fchmod(descriptor, 0o555)
                    os.utime(descriptor, _TIMES_SECS)
                finally:
                    os.close(descriptor)
            case Symlink(name, target):
                parent = self._directories[-1]
                os.symlink(target, name or self._root_name, dir_fd=parent)
                os.utime(name or self._root_name, _TIMES_SECS, dir_fd=parent, follow_symlinks=False)

    def _begin_directory(self, name: bytes) -> None:
        parent = self._directories[-1]
        os.mkdir(name, 0o700, dir_fd=parent)
        self._directories.append(os.open(name, _DIRECTORY_FLAGS, dir_fd=parent))

    def _write(self, piece: memoryview) -> None:
        if self._file is None:
            raise AssertionError("data outside of a file")
        while len(piece):
            piece = piece[os.write(self._file, piece) :]

    def _end_file(self) -> None:
        if self._file is None:
            raise AssertionError("the end of a file that never began")
        descriptor, self._file = self._file, None
        try:
            os.fchmod(descriptor, 0o555 if self._executable else 0o444)
            os.utime(descriptor, _TIMES_SECS)
        finally:
            os.close(descriptor)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        while self._directories:
            os.close(self._directories.pop())


def remove_tree(path: Path) -> None:
    """Remove a file, symlink or directory with everything below, read-only directories too.

    Nothing there is no error. No symlink is followed.
    """
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove(parent, os.fsencode(path.name))
    finally:
        os.close(parent)


def _remove(parent: int, name: bytes) -> None:
    # Iterative, with one open descriptor a level, so that no depth overflows the interpreter's stack.
    levels: list[tuple[int, bytes, list[bytes]]] = []
    pending = [name]
    directory = parent
    try:
        while True:
            if pending:
                child = pending.pop()
                if _unlink(directory, child):
                    continue
                levels.append((directory, child, pending))
                directory = _open_writable(directory, child)
                pending = [os.fsencode(entry) for entry in os.listdir(directory)]  # noqa: PTH208 - a descriptor
            elif levels:
                finished = directory
                directory, child, pending = levels.pop()
                os.close(finished)
                os.rmdir(child, dir_fd=directory)
            else:
                return
    finally:
        while levels:
            os.close(directory)
            directory = levels.pop()[0]


def _unlink(parent: int, name: bytes) -> bool:
    """Whether `name` is gone; False for a directory, which has to be emptied first."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except (IsADirectoryError, PermissionError):
        # EISDIR is Linux' answer, EPERM that of POSIX; a true lack of rights shows at the opening.
        return False
    return True


def _open_writable(parent: int, name: bytes) -> int:
    try:
        with contextlib.suppress(PermissionError):
            _allow_changes(parent, name)
        return os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    except NotADirectoryError:
        raise PermissionError(errno.EACCES, f"not allowed to remove {show(name)}") from None


def _allow_changes(parent: int, name: bytes) -> None:
    """Give ourselves the rights to list and empty a directory. Fails on what another user owns."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)  # noqa: PTH101 - O_PATH has no fchmod
    finally:
        os.close(descriptor)
