"""One server process for one SQLite database: an exclusive lock on a file beside it.

The kernel drops the lock with the process, however it ends, so a leftover file means nothing.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from gradient_server.db.errors import DatabaseInUseError, DatabaseUnusableError

__all__ = ["FileLock"]


class FileLock:
    """Held from its making to `release`. DatabaseInUseError if another process has it."""

    def __init__(self, database: Path) -> None:
        path = database.with_name(database.name + ".lock")
        try:
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DatabaseUnusableError(
                f"cannot make {path}: {error.strerror}; check that the directory exists and is writable"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            raise DatabaseInUseError(
                f"{database} is in use by another gradient-server: stop it, or give this one its own baseDir"
            ) from error

    def release(self) -> None:
        """Lets the next one in. The file stays: removing it would let two hold locks on one name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
