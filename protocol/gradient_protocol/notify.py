"""Telling the service manager how a process is: systemd's notify protocol (sd_notify(3)).

On the standard library alone, and little of it, for the build runner uses it too. There are libraries,
but those that are Python swallow every error or block the event loop, and the others need C headers on
each host.
"""

import os
import socket
from collections.abc import MutableMapping

__all__ = ["Notifier"]

# READY and STOPPING are sent once, so they may wait for a manager that is busy; nothing else may.
_WAIT_SECS = 5.0


class Notifier:
    """Says READY, STATUS, STOPPING and WATCHDOG to whoever started this process; to nobody without one.

    `watchdog_secs`: the manager restarts a process that was silent for so long; None where it does not
    watch this one. Every method raises OSError where a manager that should be there does not listen.
    """

    __slots__ = ("_address", "watchdog_secs")

    def __init__(self, address: str | None, watchdog_secs: float | None = None) -> None:
        self._address = address
        self.watchdog_secs = watchdog_secs if address else None

    @classmethod
    def take(cls, environment: MutableMapping[str, str], pid: int) -> "Notifier":
        """From `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`, which are removed: children are
        not to speak for this process.
        """
        address = environment.pop("NOTIFY_SOCKET", None)
        usec = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", None)
        is_ours = watched is None or watched == str(pid)
        if address is not None and not address.startswith(("/", "@")):
            address = None  # vsock and the like: of virtual machines, not of services
        is_number = usec.isascii() and usec.isdigit() and int(usec) > 0
        return cls(address, int(usec) / 1_000_000 if is_ours and is_number else None)

    @property
    def is_heard(self) -> bool:
        """Whether a service manager asked to be told."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """Starting is over: whatever waits for this service may go on."""
        self._send(f"READY=1\nSTATUS={_one_line(status)}", _WAIT_SECS)

    def stopping(self, status: str) -> None:
        """The process is about to end; the manager's time for a stop runs from now."""
        self._send(f"STOPPING=1\nSTATUS={_one_line(status)}", _WAIT_SECS)

    def status(self, status: str) -> None:
        """One line for people (`systemctl status`)."""
        self._send(f"STATUS={_one_line(status)}", 0.0)

    def watchdog(self) -> None:
        """Still alive. Due at least once in half of `watchdog_secs`."""
        self._send("WATCHDOG=1", 0.0)

    def _send(self, text: str, wait_secs: float) -> None:
        if not self._address:
            return
        path = self._address
        where = f"\0{path[1:]}" if path.startswith("@") else path
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(wait_secs)
            sender.sendto(os.fsencode(text), where)


def _one_line(text: str) -> str:
    return " ".join(text.split())
