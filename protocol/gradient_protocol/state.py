"""The order of a session's messages after the handshake, one table for both sides.

The phases (protocol.md, "Handshake" and "Lost connections"):

    CAPABILITIES  after `InitAck`: the worker owes `WorkerCapabilities`
    RESUME        then `ResumeJobs`, always, even empty
    RESUMING      the server adopts or drops, and owes `ResumeAck`
    LIVE          everything else; nothing about an assignment and no `RequestJob` before it

`Error`, `Draining`, heartbeats and re-authentication are allowed in each. Each side tells its order
of what it sends and what it receives; a message that is sent before the peer could know better is
never judged wrong, because a phase begins for a side with the message that it sent or received.

Heartbeats name no assignment before LIVE. `AuthResponse` needs an open `AuthChallenge`. A message of
the handshake, or a second `ResumeJobs` or `ResumeAck`, is allowed nowhere.
"""

import enum
from typing import Final

from gradient_protocol.errors import BAD_REQUEST, ProtocolError
from gradient_protocol.messages.common import BulkAck, Draining, Error, Message, Zstd
from gradient_protocol.messages.server import (
    AuthChallenge,
    AuthUpdate,
    HeartbeatAck,
    InitAck,
    Reject,
    ResumeAck,
)
from gradient_protocol.messages.worker import (
    AuthResponse,
    InitConnection,
    ReauthRequest,
    ResumeJobs,
    WorkerCapabilities,
    WorkerMetrics,
)

__all__ = ["Phase", "SessionOrder"]


class Phase(enum.Enum):
    """How far the session's beginning has come."""

    CAPABILITIES = "WorkerCapabilities is due"
    RESUME = "ResumeJobs is due"
    RESUMING = "ResumeAck is due"
    LIVE = "live"


_ANY_TIME: Final = frozenset(
    {
        AuthChallenge,
        AuthResponse,
        AuthUpdate,
        BulkAck,
        Draining,
        Error,
        HeartbeatAck,
        ReauthRequest,
        WorkerMetrics,
        Zstd,
    }
)
_NEVER: Final = frozenset({InitAck, InitConnection, Reject, ResumeAck, ResumeJobs})

# What moves the phase, or is allowed before LIVE without being allowed at any time.
_MOVES: Final[dict[tuple[Phase, type[Message]], Phase]] = {
    (Phase.CAPABILITIES, WorkerCapabilities): Phase.RESUME,
    (Phase.RESUME, WorkerCapabilities): Phase.RESUME,
    (Phase.RESUME, ResumeJobs): Phase.RESUMING,
    (Phase.RESUMING, WorkerCapabilities): Phase.RESUMING,
    (Phase.RESUMING, ResumeAck): Phase.LIVE,
}


class SessionOrder:
    """One side's view. An illegal message raises ProtocolError 400 and changes nothing."""

    __slots__ = ("_open_challenges", "phase")

    def __init__(self) -> None:
        self.phase = Phase.CAPABILITIES
        self._open_challenges = 0

    @property
    def is_live(self) -> bool:
        """Whether `ResumeAck` was sent or received."""
        return self.phase is Phase.LIVE

    def note(self, message: Message) -> None:
        """A message is about to be sent, or was received (the decoder knows whose it may be)."""
        kind = type(message)
        following = self._following(kind)
        if kind is AuthChallenge:
            self._open_challenges += 1
        elif kind is AuthResponse:
            if not self._open_challenges:
                raise ProtocolError(BAD_REQUEST, "AuthResponse without an AuthChallenge")
            self._open_challenges -= 1
        elif isinstance(message, WorkerMetrics) and message.build_peak_ram_mb and not self.is_live:
            raise ProtocolError(BAD_REQUEST, "WorkerMetrics names assignments before ResumeAck")
        self.phase = following

    def _following(self, kind: type[Message]) -> Phase:
        if kind in _ANY_TIME or (self.phase is Phase.LIVE and kind not in _NEVER):
            return self.phase
        following = _MOVES.get((self.phase, kind))
        if following is None:
            raise ProtocolError(BAD_REQUEST, f"{kind.__name__} is not allowed now ({self.phase.value})")
        return following
