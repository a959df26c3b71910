"""What starting and watching processes takes: commands, ports, patience."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

__all__ = [
    "READY_SECS",
    "clean_environment",
    "free_port",
    "is_alive",
    "one_line",
    "program",
    "wait_until",
]

T = TypeVar("T")

# Several times what a start takes on two quiet cores.
READY_SECS = 60.0


def program(name: str) -> str:
    """A command of this installation."""
    return str(Path(sys.executable).parent / name)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without what would configure the commands."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADIENT_")}
    return {**kept, **(extra or {})}


def free_port() -> int:
    """A TCP port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that merely waits to be reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(what: str, look: Callable[[], T | None], *, secs: float = READY_SECS) -> T:
    """What `look` says once it says something; AssertionError naming `what` where it never does."""
    deadline = time.monotonic() + secs
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {secs:g} s"
        time.sleep(0.05)
    return found


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on standard error of a command that ended with `code`."""
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]
