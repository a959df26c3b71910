"""Making a build's output fit for the store: owner, modes and times (messages.md).

Nothing outside of the output may be touched: symlinks are not followed, and a file with a second
name elsewhere (a build may have hard-linked one of its inputs, or a file of the host) is replaced
by a copy before its mode is changed.
"""

import contextlib
import os
import stat

from gradient_protocol.nar.layout import MAX_DEPTH, show

from gradient_worker.stores.base import BadOutputError

__all__ = ["canonicalise"]

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_TIMES_SECS = (1, 1)
_COPY_BYTES = 1024 * 1024


def canonicalise(parent: int, name: bytes) -> None:
    """Put `name` in the directory `parent` (a descriptor) into the form of a store.

    Files become 0444 or 0555 by their owner's execute bit, directories 0555, times 1, all owned by
    this process's user. Raises BadOutputError for what no archive can hold. Copies are made in `parent`,
    never in the output, which whoever is killed in the middle would leave with one file more.
    """
    _canonicalise(parent, parent, name, 0)


def _canonicalise(aside: int, parent: int, name: bytes, depth: int) -> None:
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    executable = bool(info.st_mode & stat.S_IXUSR)
    if stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
        _break_hard_link(aside, parent, name)
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if info.st_uid != os.geteuid():
        os.chown(name, os.geteuid(), os.getegid(), dir_fd=parent, follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        os.utime(name, _TIMES_SECS, dir_fd=parent, follow_symlinks=False)
    elif stat.S_ISREG(info.st_mode):
        os.chmod(name, 0o555 if executable else 0o444, dir_fd=parent)
        os.utime(name, _TIMES_SECS, dir_fd=parent, follow_symlinks=False)
    elif stat.S_ISDIR(info.st_mode):
        _directory(aside, parent, name, depth)
    else:
        raise BadOutputError(f"{show(name)} is neither a file, a directory nor a symlink")


def _directory(aside: int, parent: int, name: bytes, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise BadOutputError(f"more than {MAX_DEPTH} directories deep at {show(name)}")
    os.chmod(name, 0o700, dir_fd=parent)
    descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    try:
        for entry in os.listdir(descriptor):  # noqa: PTH208 - a descriptor
            _canonicalise(aside, descriptor, os.fsencode(entry), depth + 1)
        os.fchmod(descriptor, 0o555)
        os.utime(descriptor, _TIMES_SECS)
    finally:
        os.close(descriptor)


def _break_hard_link(aside: int, parent: int, name: bytes) -> None:
    copy = b".gradient-copy-%d" % os.getpid()
    with contextlib.suppress(FileNotFoundError):  # of an agent that was killed, and had this one's id
        os.unlink(copy, dir_fd=aside)
    source = os.open(name, _FILE_FLAGS, dir_fd=parent)
    try:
        target = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=aside)
        try:
            while data := os.read(source, _COPY_BYTES):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(target, rest) :]
        finally:
            os.close(target)
        os.rename(copy, name, src_dir_fd=aside, dst_dir_fd=parent)
    finally:
        os.close(source)
