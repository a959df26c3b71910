"""Starts and ends the processes of the demo, and waits until they are ready."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from gradient_cli.errors import CommandError, ExitCode

__all__ = ["Processes", "wait_until"]

POLL_SECS = 0.1
STOP_SECS = 15.0
SHOWN_LOG_LINES = 15


def _program(name: str) -> str:
    """A command of this installation, wherever the shell would find another of its name."""
    beside = Path(sys.executable).parent / name
    if not beside.exists():
        raise CommandError(f"{beside} is missing: install gradient-pair[server,worker]", ExitCode.USAGE)
    return str(beside)


class Processes:
    """The demo's processes, each with a log in `directory`. Ends all of them on leaving."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, program: str, arguments: Sequence[str]) -> None:
        """Starts a command of this installation in a session of its own."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GRADIENT_")}
        with self.log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                [_program(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An interrupt at the terminal is for the demo, which then ends them in order.
                start_new_session=True,
                env=environment,
            )

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self._directory / f"{name}.log"

    def check(self) -> None:
        """CommandError with the end of its log if a process ended by itself."""
        for name, process in self._running.items():
            code = process.poll()
            if code is not None:
                tail = self.log(name).read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]
                raise CommandError(f"the {name} ended with {code}:\n" + "\n".join(tail), ExitCode.FAILED)

    def stop(self) -> None:
        """Interrupts the workers, then the server, and waits; what does not end is killed."""
        server = {name: process for name, process in self._running.items() if name == "server"}
        workers = {name: process for name, process in self._running.items() if name != "server"}
        _end(workers.values(), signal.SIGINT)
        _end(server.values(), signal.SIGTERM)
        self._running.clear()


def _end(processes: Collection[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
    deadline = time.monotonic() + STOP_SECS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(what: str, ready: Callable[[], bool], processes: Processes, *, secs: float) -> None:
    """Polls `ready`. CommandError naming `what` when it does not come true in time."""
    deadline = time.monotonic() + secs
    while not ready():
        processes.check()
        if time.monotonic() > deadline:
            raise CommandError(f"{what} within {secs:.0f} s: did not happen", ExitCode.FAILED)
        time.sleep(POLL_SECS)
