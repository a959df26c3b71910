"""Files that outlive a crash of the machine, and one error for a disk that is full."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["StorageError", "StorageFullError", "disk_errors", "make_directory", "sync_directory", "write_at"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StorageError(Exception):
    """The disk refused; one line says which file and why."""


class StorageFullError(StorageError):
    """There is no room; one line says where and what to do."""


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals into StorageError and StorageFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError(
                f"no room left for {path}: free some space there, or raise the quota"
            ) from error
        raise StorageError(f"{path}: {error.strerror or error}") from error


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`; OSError if that fails, with some of it written."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset)
        offset += written
        rest = rest[written:]


def sync_directory(path: Path) -> None:
    """Makes what was created, renamed or removed in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Makes a directory in one that exists, durably. Nothing if it is there."""
    try:
        path.mkdir()
    except FileExistsError:
        return
    sync_directory(path.parent)
