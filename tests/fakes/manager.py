"""The receiving end of what services tell systemd."""

import socket

__all__ = ["Manager"]


class Manager:
    """A notify socket; `address` as it stands in NOTIFY_SOCKET, with @ for an abstract one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def close(self) -> None:
        """Nobody listens any more."""
        self._socket.close()

    def heard(self) -> list[str]:
        """What came since the last call."""
        found: list[str] = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return found
