"""Messages that go both ways."""

from gradient_protocol.messages.shapes import Count, Shape

__all__ = ["BulkAck", "Draining", "Error", "Message", "NarAbort", "Zstd"]


class Message(Shape, frozen=True):
    """Base of every message. The class's tag is the message's `type`."""


class Error(Message, frozen=True, tag="Error"):
    """Ends the session, unless it names an `assignment_id`: then only that job is lost.

    `url` is the server's alone (code 421).
    """

    code: Count
    reason: str
    url: str | None = None
    assignment_id: str | None = None
    seq: Count | None = None


class Draining(Message, frozen=True, tag="Draining"):
    """The sender takes (worker) or gives (server) no more jobs. `url` is the server's alone."""

    reason: str | None = None
    url: str | None = None


class BulkAck(Message, frozen=True, tag="BulkAck"):
    """Everything before `offset` of this transfer, request or assignment's log is stored."""

    id: str
    offset: Count


class NarAbort(Message, frozen=True, tag="NarAbort"):
    """Ends a download half-way."""

    transfer_id: str
    reason: str


class Zstd(Message, frozen=True, tag="Zstd"):
    """One control message over 16 KiB, compressed. Never nested."""

    data: bytes
