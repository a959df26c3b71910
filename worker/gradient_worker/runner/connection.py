"""One agent's connection at the runner: requests in, answers out, both bounded, neither ever waiting."""

from __future__ import annotations

import socket

import msgpack

__all__ = ["BadRequest", "Connection"]

_REQUEST_BYTES_MAX = 8 << 20
_UNSENT_BYTES_MAX = 16 << 20


class BadRequest(Exception):  # noqa: N818 - what the other side did, not a fault here
    """The other side does not speak as agreed; the connection ends."""


class Connection:
    """Requests and answers are msgpack maps, one after the other; an answer carries the request's `id`."""

    __slots__ = ("_unpacker", "_unsent", "socket", "watched")

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self._unpacker = msgpack.Unpacker(max_buffer_size=_REQUEST_BYTES_MAX)
        self._unsent = bytearray()
        self.watched = 0
        """The events that its owner's selector looks for."""

    @property
    def wants_to_write(self) -> bool:
        """Whether answers wait for room in the socket."""
        return bool(self._unsent)

    def receive(self) -> list[dict[str, object]] | None:
        """The requests that have come; None at the end. Raises OSError, BadRequest."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        if not data:
            return None
        requests = []
        try:
            self._unpacker.feed(data)
            for request in self._unpacker:
                if not isinstance(request, dict):
                    raise BadRequest("a request is a map")
                requests.append(request)
        except (ValueError, msgpack.BufferFull) as error:
            raise BadRequest(str(error)) from error
        return requests

    def send(self, answer: dict[str, object]) -> None:
        """Keeps an answer for the next `flush`. Raises BadRequest."""
        self._unsent += msgpack.packb(answer)
        if len(self._unsent) > _UNSENT_BYTES_MAX:
            raise BadRequest("the agent does not read its answers")

    def flush(self) -> None:
        """Sends what the socket takes and keeps the rest. Raises OSError."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return
