"""The directory of one build on the runner's side: making, handing over, removing; records in it.

Records are msgpack maps, written at once and not synced: they outlive processes, not the host.
"""

# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH106, PTH108, PTH114, PTH123, PTH208
# (pathlib would cost this small process 1 MiB)

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Callable

import msgpack

from gradient_worker.runner import layout
from gradient_worker.runner.spawn import HANDLED

__all__ = [
    "hand_over",
    "names",
    "read_record",
    "run_aside",
    "throw_away",
    "write_record",
]

_PARTS = (layout.BUILD, layout.HOME, layout.TMP, layout.OUTPUTS)
_FDS_MAX = 4096
_RECORDS = (layout.PROCESS, layout.RESULT)


class Skeletons:
    """Makes the directories of builds, and keeps those of ended ones that are as good as new.

    Making and removing directories and files costs more than the fork of a short build (ext4 slows down
    where many inodes were freed in the last seconds); renaming a directory is a tenth of it. A log that
    something was written to is not kept: whoever still reads it must not see the next build's. At most
    `limit` are kept.
    """

    __slots__ = ("_builds_dir", "_limit", "_made", "_spare")

    def __init__(self, builds_dir: str, limit: int = 16) -> None:
        self._builds_dir = builds_dir
        self._limit = limit
        self._made = 0
        self._spare: list[tuple[int, str]] = []

    def make(self, root: str, uid: int, gid: int) -> None:
        """Makes `root` with its parts, the parts owned by the build's user. Raises OSError."""
        for entry in self._spare:
            if entry[0] == uid and not os.path.lexists(root):
                self._spare.remove(entry)
                try:
                    os.rename(entry[1], root)
                except OSError:
                    break  # somebody cleared up here: make one
                return
        os.makedirs(root, mode=0o711, exist_ok=True)
        for part in _PARTS:
            path = f"{root}/{part}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            if uid != os.getuid():
                os.chown(path, uid, gid, follow_symlinks=False)

    def remove(self, root: str) -> bool:
        """Removes a build's directory if nothing but our own files is in it; False if there is more."""
        try:
            log = f"{root}/{layout.LOG}"
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(log).st_size:
                    os.unlink(log)
            uid = _owner_if_untouched(root) if len(self._spare) < self._limit else None
            if uid is None:
                return _remove_empty(root)
            for name in _RECORDS:
                os.truncate(f"{root}/{name}", 0)
            self._made += 1
            spare = f"{self._builds_dir}/{layout.SPARE_PREFIX}{os.getpid()}-{self._made}"
            os.rename(root, spare)
            self._spare.append((uid, spare))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Removes what is kept."""
        for _, path in self._spare:
            _remove_empty(path)
        self._spare.clear()


def _owner_if_untouched(root: str) -> int | None:
    """The owner of the parts if all are as they were made, and empty."""
    found = names(root)
    if [name for name in found if name != layout.LOG] != sorted((*_PARTS, *_RECORDS)):
        return None
    for name in found:
        if name in _PARTS:
            continue
        state = os.lstat(f"{root}/{name}")
        if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1 or state.st_uid != os.getuid():
            return None
    owners = set()
    for part in _PARTS:
        state = os.lstat(f"{root}/{part}")
        if state.st_mode != stat.S_IFDIR | 0o700 or names(f"{root}/{part}"):
            return None
        owners.add(state.st_uid)
    return owners.pop() if len(owners) == 1 else None


def _remove_empty(root: str) -> bool:
    try:
        for name in (*_RECORDS, layout.LOG):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{root}/{name}")
        for part in _PARTS:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(f"{root}/{part}")
        os.rmdir(root)
    except OSError:
        return False
    return True


def names(directory: str) -> list[str]:
    """Names in a directory, sorted; empty when it is not there."""
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def write_record(path: str, record: dict[str, object]) -> None:
    """Writes a map into a file that is empty or not there, whole or not at all. Raises OSError.

    One write of less than a page: a reader sees nothing or all of it, whenever this process is killed.
    """
    data = msgpack.packb(record)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        if os.write(fd, data) != len(data):
            os.ftruncate(fd, 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    finally:
        os.close(fd)


def read_record(path: str) -> dict[str, object] | None:
    """The map in a file; None where there is none (no file, or an empty one) or it cannot be read."""
    try:
        with open(path, "rb") as file:
            record = msgpack.unpackb(file.read())
    except (OSError, ValueError):  # msgpack's own errors are ValueErrors
        return None
    return record if isinstance(record, dict) else None


def hand_over(directory: str, from_uid: int, uid: int, gid: int) -> None:
    """Gives all that `from_uid` owns below `directory` to another user.

    What belongs to somebody else (a hard link made into the outputs) stays as it is.
    """
    for _, folders, others, dir_fd in os.fwalk(directory, follow_symlinks=False):
        for name in (".", *folders, *others):
            if os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_uid == from_uid:
                os.chown(name, uid, gid, dir_fd=dir_fd, follow_symlinks=False)


def throw_away(path: str) -> None:
    """Removes a tree whatever the modes of its directories are. Raises OSError."""
    import shutil  # noqa: PLC0415 - only ever in a helper process; it would double the runner's memory

    os.chmod(path, 0o700)
    for directory, folders, _ in os.walk(path):
        for name in folders:
            inner = f"{directory}/{name}"
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)  # before the walk goes into it
    shutil.rmtree(path)


def run_aside(work: Callable[[], None]) -> int:
    """Runs `work` in a child of its own, for what may take long; its pid, to be reaped by the caller."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        pid = os.fork()
        if pid == 0:
            status = 1
            os.closerange(3, _FDS_MAX)  # the runner's lock and socket must not outlive the runner
            try:
                work()
                status = 0
            except OSError as error:
                os.write(2, f"helper: {error}\n".encode())
            finally:
                os._exit(status)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return pid
