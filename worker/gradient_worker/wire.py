"""What jobs see of a session: messages out, answers in, and the end of it.

Jobs outlive sessions (protocol.md, "Lost connections"). A job asks the Link for the Wire of the
present session; what it waits for on that wire raises SessionClosed when the session ends, and the
job asks again on the next.
"""

import math
from typing import Final, Generic, TypeVar

import trio
from gradient_protocol.connection import Connection
from gradient_protocol.errors import ProtocolError, SessionClosed
from gradient_protocol.limits import BULK_WINDOW
from gradient_protocol.messages.common import Message

__all__ = ["Link", "Mailbox", "Wire"]

MAX_MAILBOX_MESSAGES: Final = 8192
"""Answers that wait for one job; a full window of chunks of half a KiB."""

M = TypeVar("M", bound=Message)


class Mailbox(Generic[M]):
    """The answers to one query, download or upload, in order."""

    def __init__(self, wire: "Wire", key: str) -> None:
        self._wire = wire
        self._key = key
        self._send, self._receive = trio.open_memory_channel[M](math.inf)
        self._waiting = 0
        self._unacknowledged_bytes = 0

    def put(self, message: M, data_bytes: int = 0) -> None:
        """Called by the reader, which never waits: a peer over the bounds ends the session."""
        self._waiting += 1
        self._unacknowledged_bytes += data_bytes
        if self._unacknowledged_bytes > BULK_WINDOW or self._waiting > MAX_MAILBOX_MESSAGES:
            raise ProtocolError(413, f"more than the window allows came for {self._key}")
        self._send.send_nowait(message)

    async def receive(self) -> M:
        """The next answer. Raises SessionClosed when the session ended."""
        try:
            message = await self._receive.receive()
        except trio.EndOfChannel:
            raise SessionClosed("the session ended") from None
        self._waiting -= 1
        return message

    def receive_nowait(self) -> M | None:
        """The next answer if it is there already."""
        try:
            message = self._receive.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            return None
        self._waiting -= 1
        return message

    def acknowledged(self, data_bytes: int) -> None:
        """So many bytes of chunks are stored: the window opens by as much."""
        self._unacknowledged_bytes -= data_bytes

    def hang_up(self) -> None:
        """No more answers: the session ended."""
        self._send.close()

    def close(self) -> None:
        """Take no more answers; later ones are ignored."""
        self._wire.forget(self._key)
        self._send.close()
        self._receive.close()


class Wire:
    """One session after its handshake. `zstd`: both sides have it."""

    def __init__(self, connection: Connection, *, zstd: bool) -> None:
        self.connection = connection
        self.zstd = zstd
        self._mailboxes: dict[str, Mailbox[Message]] = {}
        self.ended = trio.Event()

    def open(self, key: str) -> Mailbox[Message]:
        """A mailbox for the answers to this id. Raises SessionClosed when the session ended."""
        if self.ended.is_set():
            raise SessionClosed("the session ended")
        mailbox: Mailbox[Message] = Mailbox(self, key)
        self._mailboxes[key] = mailbox
        return mailbox

    def send(self, message: Message) -> None:
        """Queue a control message. Raises SessionClosed when the session ended."""
        self.connection.send(message)

    def deliver(self, key: str, message: Message, data_bytes: int = 0) -> None:
        """An answer came. One that nobody waits for any more is ignored."""
        mailbox = self._mailboxes.get(key)
        if mailbox is not None:
            mailbox.put(message, data_bytes)

    def forget(self, key: str) -> None:
        """Nobody waits for this id any more."""
        self._mailboxes.pop(key, None)

    def close(self) -> None:
        """The session ended: everyone who waits on it learns so."""
        self.ended.set()
        for mailbox in list(self._mailboxes.values()):
            mailbox.hang_up()
        self._mailboxes.clear()


class Link:
    """The wire of the present session, from its ResumeAck to its end."""

    def __init__(self) -> None:
        self._wire: Wire | None = None
        self._attached = trio.Event()

    @property
    def current(self) -> Wire | None:
        """The wire, or None between sessions."""
        return self._wire

    def attach(self, wire: Wire) -> None:
        """ResumeAck came: jobs may use the session."""
        self._wire = wire
        self._attached.set()

    def detach(self) -> None:
        """The session is over."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
            self._attached = trio.Event()

    async def wire(self) -> Wire:
        """The wire of the present session, or of the next one."""
        while self._wire is None:
            await self._attached.wait()
        return self._wire

    def post(self, message: Message) -> bool:
        """Send live state that is worth nothing later. False where no session carried it."""
        if self._wire is None:
            return False
        try:
            self._wire.send(message)
        except SessionClosed:
            return False
        return True
