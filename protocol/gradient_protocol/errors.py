"""What can go wrong with a session, as exceptions.

`ProtocolError` is the peer's fault, and says what to answer it with. `SessionClosed` is nobody's in
particular: the stream ended, and every call that waits for it learns why.
"""

__all__ = ["JobContentError", "ProtocolError", "ReportContentError", "SessionClosed"]

BAD_REQUEST = 400
TOO_LARGE = 413


class ProtocolError(Exception):
    """The peer broke a rule: answer `Error {code, reason}`, then close.

    `code` is one of protocol.md's table ("Handshake"), `reason` one line without secrets.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


class ReportContentError(ProtocolError):
    """A numbered report whose ids could be read and whose content is refused. The session lives.

    Answer `Error {code, reason, assignment_id, seq}` (protocol.md, "Reports that must not be lost").
    """

    def __init__(self, reason: str, *, assignment_id: str, seq: int) -> None:
        super().__init__(BAD_REQUEST, reason)
        self.assignment_id = assignment_id
        self.seq = seq


class JobContentError(ProtocolError):
    """An `AssignJob` whose job cannot be read. The session lives.

    Answer `Error {code, reason, assignment_id}`.
    """

    def __init__(self, reason: str, *, assignment_id: str) -> None:
        super().__init__(BAD_REQUEST, reason)
        self.assignment_id = assignment_id


class SessionClosed(Exception):  # noqa: N818 - it is an event, not an error
    """The session is over: EOF, reset, closed by us, a stalled write, a control lane that overflowed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
