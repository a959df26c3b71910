"""A build's output: from its pipe into a file, up to a limit, never blocking the build.

The pipe is what makes the limit exact and the silence known without looking at files. Past the limit,
or when the disk is full, output is read and thrown away: the build does not notice. The kernel moves
the bytes (`splice`), the runner does not touch them.
"""

from __future__ import annotations

import errno
import fcntl
import os

__all__ = ["Spool"]

_MOVE_BYTES = 1 << 20
_LAST_MOVES = 64
"""A pipe holds far less than 64 MiB: whoever fills it faster than this at the end is not waited for."""


class Spool:
    """Output of one build: give `write_fd` to the child and close it, poll `read_fd`, call `drain`."""

    __slots__ = ("_file_fd", "_limit", "_splices", "_write_fd", "discarded", "kept", "last_output", "read_fd")

    def __init__(self, path: str, limit_bytes: int | None, now: float) -> None:
        """Opens `path` anew; `now` is monotonic seconds. `limit_bytes` None: no limit."""
        self.kept = 0
        self.discarded = 0
        self.last_output = now
        self._limit = limit_bytes
        self._splices = True
        self._file_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self.read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        except OSError:
            os.close(self._file_fd)
            raise
        flags = fcntl.fcntl(self.read_fd, fcntl.F_GETFL)
        fcntl.fcntl(self.read_fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)

    @property
    def write_fd(self) -> int:
        """The end that the build writes to; blocking, as programs expect."""
        return self._write_fd

    @property
    def truncated(self) -> bool:
        """Whether some output was thrown away."""
        return self.discarded > 0

    def close_write_end(self) -> None:
        """To be called once the child has its copy."""
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def drain(self, now: float) -> bool:
        """Moves what the pipe has, up to 1 MiB; False at the end of the output."""
        try:
            moved = self._move()
        except BlockingIOError:
            return True
        if moved:
            self.last_output = now
        return moved > 0

    def finish(self, now: float) -> None:
        """Moves what is left in the pipe and closes everything; who still holds the pipe is not heard."""
        self.close_write_end()
        if self.read_fd >= 0:
            for _ in range(_LAST_MOVES):
                before = self.kept + self.discarded
                if not self.drain(now) or self.kept + self.discarded == before:
                    break
            os.close(self.read_fd)
            self.read_fd = -1
        if self._file_fd >= 0:
            os.close(self._file_fd)
            self._file_fd = -1

    def _move(self) -> int:
        room = _MOVE_BYTES if self._limit is None else min(self._limit - self.kept, _MOVE_BYTES)
        if room <= 0 or self._file_fd < 0:
            return self._discard()
        try:
            return self._splice(room) if self._splices else self._copy(room)
        except BlockingIOError:
            raise
        except OSError as error:
            if self._splices and error.errno == errno.EINVAL:
                self._splices = False  # a file system that cannot take pages: copy instead
                return self._move()
            # A full or broken disk must not stop the build; the agent sees that the log is truncated.
            os.close(self._file_fd)
            self._file_fd = -1
            return self._discard()

    def _splice(self, room: int) -> int:
        moved = os.splice(self.read_fd, self._file_fd, room)
        self.kept += moved
        return moved

    def _copy(self, room: int) -> int:
        data = os.read(self.read_fd, min(room, 1 << 16))
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file_fd, data[done:])
        finally:
            self.kept += done
            self.discarded += len(data) - done
        return len(data)

    def _discard(self) -> int:
        dropped = len(os.read(self.read_fd, 1 << 16))
        self.discarded += dropped
        return dropped
