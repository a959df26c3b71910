"""Processes as /proc shows them: what a build left behind when it has no cgroup of its own.

The runner is a subreaper: a process whose parent has ended becomes the runner's child. So what the
runner has as children, and did not start itself, was forked off by some build.
"""

# ruff: noqa: PTH123, PTH208
# (pathlib would cost this small process 1 MiB)

from __future__ import annotations

import os
import signal

__all__ = [
    "become_subreaper",
    "children_of",
    "environment_of",
    "kill_tree",
    "mentioning",
    "session_of",
    "start_ticks",
]

_PR_SET_CHILD_SUBREAPER = 36
_DEPTH_MAX = 64


def become_subreaper() -> None:
    """From now on, orphans below this process become its children. Raises OSError."""
    import ctypes  # noqa: PLC0415 - the one call that the standard library has no function for

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children_of(pid: int) -> list[int]:
    """The children of a process with one thread; empty when it is gone."""
    text = _read(f"/proc/{pid}/task/{pid}/children")
    if text is not None:
        return [int(word) for word in text.split()]
    # A kernel without CONFIG_PROC_CHILDREN: look at every process.
    return [other for other in _all_pids() if (fields := _stat(other)) and int(fields[1]) == pid]


def session_of(pid: int) -> int | None:
    """The session's id of a process, None when it is gone."""
    fields = _stat(pid)
    return int(fields[3]) if fields else None


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid it names the process for good."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def environment_of(pid: int) -> bytes:
    """The environment that a process was started with, empty when it cannot be read."""
    return _read(f"/proc/{pid}/environ") or b""


def mentioning(needle: bytes) -> list[int]:
    """All processes whose environment names `needle`, this one apart."""
    own = os.getpid()
    return [pid for pid in _all_pids() if pid != own and needle in environment_of(pid)]


def kill_tree(pid: int, depth: int = 0) -> None:
    """SIGKILL to a process and all below it, as far as they may be killed."""
    if depth < _DEPTH_MAX:
        for child in children_of(pid):
            kill_tree(child, depth + 1)
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the third (state) on; the name before may hold anything."""
    text = _read(f"/proc/{pid}/stat")
    return text.rpartition(b")")[2].split() if text else []


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
