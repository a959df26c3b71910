"""The handshake as one pure machine for both sides (protocol.md, "Handshake").

Both sides walk the same states, each message being an event that one side sends and the other
receives:

    START       nothing was said; the worker speaks first
    GREETED     `InitConnection` is out; the server looks the worker up
    CHALLENGED  `AuthChallenge` is out, with the peers that registered this worker
    ANSWERED    `AuthResponse` is out; the server checks each token on its own
    READY       `InitAck` is out: the session lives with the peers whose tokens held
    REFUSED     `Reject` is out (or `Error`, for what was no message at all): the end

The server may refuse in every state but the two last. One token that holds is enough, none is 401.
A version other than ours is 400. Any other event is ProtocolError 400 and changes nothing.

The server's machine knows neither workers nor tokens: `handle` returns `Challenge` or `Verify`,
which say what to find out, and `challenge`, `admit` or `refuse` take the answer.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gradient_protocol.errors import BAD_REQUEST, ProtocolError
from gradient_protocol.limits import PROTO_VERSION
from gradient_protocol.messages.common import Error, Message
from gradient_protocol.messages.server import AuthChallenge, InitAck, Reject
from gradient_protocol.messages.shapes import Capabilities
from gradient_protocol.messages.worker import AuthResponse, InitConnection

__all__ = [
    "ANY_PEER",
    "TRANSITIONS",
    "Challenge",
    "HandshakeOutcome",
    "HandshakeState",
    "Refusal",
    "Rejected",
    "ServerHandshake",
    "Verification",
    "Verify",
    "WorkerHandshake",
    "answer_challenge",
]

UNAUTHORIZED: Final = 401
ANY_PEER: Final = "*"  # in the peers file: this token answers every peer


class HandshakeState(enum.Enum):
    """What was said last."""

    START = "start"
    GREETED = "greeted"
    CHALLENGED = "challenged"
    ANSWERED = "answered"
    READY = "ready"
    REFUSED = "refused"


_OPEN: Final = (
    HandshakeState.START,
    HandshakeState.GREETED,
    HandshakeState.CHALLENGED,
    HandshakeState.ANSWERED,
)

TRANSITIONS: Final[dict[tuple[HandshakeState, type[Message]], HandshakeState]] = {
    (HandshakeState.START, InitConnection): HandshakeState.GREETED,
    (HandshakeState.GREETED, AuthChallenge): HandshakeState.CHALLENGED,
    (HandshakeState.CHALLENGED, AuthResponse): HandshakeState.ANSWERED,
    (HandshakeState.ANSWERED, InitAck): HandshakeState.READY,
    **{(state, Reject): HandshakeState.REFUSED for state in _OPEN},
    **{(state, Error): HandshakeState.REFUSED for state in _OPEN},
}


@dataclass(frozen=True, slots=True)
class HandshakeOutcome:
    """The session lives. `capabilities` is what both sides have; `hello` is what the worker said."""

    hello: InitConnection
    capabilities: Capabilities
    authorized_peers: tuple[str, ...]
    failed_peers: dict[str, str]  # peer -> reason
    server_time: float
    instance: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The handshake was refused. `url` with 421 only."""

    code: int
    reason: str
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An authority's no, on its way into a `Reject`."""

    code: int
    reason: str
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """Which of the challenged peers' tokens held, and why the others did not."""

    authorized: tuple[str, ...]
    failed: dict[str, str]


@dataclass(frozen=True, slots=True)
class Challenge:
    """To find out: which peers registered this worker, or why it is refused."""

    hello: InitConnection


@dataclass(frozen=True, slots=True)
class Verify:
    """To find out: which of these tokens hold. Only peers that were challenged are here."""

    hello: InitConnection
    peers: tuple[str, ...]
    tokens: Mapping[str, str] = field(repr=False)


def answer_challenge(tokens: Mapping[str, str], peers: list[str]) -> AuthResponse:
    """A token for each challenged peer that has one; the one for `*` answers the others."""
    default = tokens.get(ANY_PEER)
    found = {peer: tokens.get(peer, default) for peer in peers}
    return AuthResponse(tokens={peer: token for peer, token in found.items() if token is not None})


class _Machine:
    """The table, and the state that only it moves."""

    def __init__(self) -> None:
        self.state = HandshakeState.START

    @property
    def is_over(self) -> bool:
        """Whether the handshake ended, well or not."""
        return self.state in (HandshakeState.READY, HandshakeState.REFUSED)

    def _next(self, event: type[Message]) -> HandshakeState:
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise ProtocolError(BAD_REQUEST, f"{event.__name__} is not allowed ({self.state.value})")
        return following


class WorkerHandshake(_Machine):
    """The worker's side. `tokens` are those of the peers file: peer, or `*`, to token."""

    def __init__(self, hello: InitConnection, tokens: Mapping[str, str]) -> None:
        super().__init__()
        self._hello = hello
        self._tokens = tokens

    def start(self) -> InitConnection:
        """The first message."""
        self.state = self._next(InitConnection)
        return self._hello

    def handle(self, message: Message) -> AuthResponse | HandshakeOutcome | Rejected:
        """What to send, or how it ended. ProtocolError 400 for what the state does not allow."""
        following = self._next(type(message))
        if isinstance(message, AuthChallenge):
            self.state = HandshakeState.ANSWERED
            return answer_challenge(self._tokens, message.peers)
        if isinstance(message, InitAck):
            if message.version != PROTO_VERSION:
                raise ProtocolError(BAD_REQUEST, _version_text(message.version))
            self.state = following
            return HandshakeOutcome(
                hello=self._hello,
                capabilities=message.capabilities,
                authorized_peers=tuple(message.authorized_peers),
                failed_peers=message.failed_peers,
                server_time=message.server_time,
                instance=message.instance,
            )
        if isinstance(message, Reject | Error):
            self.state = following
            return Rejected(message.code, message.reason, message.url)
        raise ProtocolError(BAD_REQUEST, f"{type(message).__name__} is not the server's to send")


class ServerHandshake(_Machine):
    """The server's side. `capabilities` are its own, `instance` is its id."""

    def __init__(self, capabilities: Capabilities, instance: str) -> None:
        super().__init__()
        self._capabilities = capabilities
        self._instance = instance
        self._hello: InitConnection | None = None
        self._peers: tuple[str, ...] = ()

    def handle(self, message: Message) -> Challenge | Verify | Rejected:
        """What to find out next; Rejected when the worker gave up with an `Error`.

        ProtocolError 400 for what the state does not allow, and for another version.
        """
        following = self._next(type(message))
        if isinstance(message, InitConnection):
            if message.version != PROTO_VERSION:
                raise ProtocolError(BAD_REQUEST, _version_text(message.version))
            self.state = following
            self._hello = message
            return Challenge(message)
        if isinstance(message, AuthResponse):
            self.state = following
            tokens = {peer: message.tokens[peer] for peer in self._peers if peer in message.tokens}
            return Verify(self._known_hello(), self._peers, tokens)
        if isinstance(message, Error):
            self.state = following
            return Rejected(message.code, message.reason)
        raise ProtocolError(BAD_REQUEST, f"{type(message).__name__} is not the worker's to send")

    def challenge(self, peers: tuple[str, ...]) -> AuthChallenge:
        """Answers `Challenge`: the peers that registered this worker."""
        self.state = self._next(AuthChallenge)
        self._peers = peers
        return AuthChallenge(peers=list(peers))

    def admit(self, verification: Verification, server_time: float) -> InitAck | Reject:
        """Answers `Verify`. `InitAck` if one token held, else `Reject` 401."""
        if not verification.authorized:
            reasons = ", ".join(f"{peer}: {reason}" for peer, reason in verification.failed.items())
            return self.refuse(Refusal(UNAUTHORIZED, f"no valid token ({reasons or 'none was sent'})"))
        self.state = self._next(InitAck)
        theirs = self._known_hello().capabilities
        ours = self._capabilities
        return InitAck(
            version=PROTO_VERSION,
            capabilities=Capabilities(
                fetch=ours.fetch and theirs.fetch,
                eval=ours.eval and theirs.eval,
                build=ours.build and theirs.build,
                zstd=ours.zstd and theirs.zstd,
            ),
            authorized_peers=list(verification.authorized),
            failed_peers=dict(verification.failed),
            server_time=server_time,
            instance=self._instance,
        )

    def refuse(self, refusal: Refusal) -> Reject:
        """Answers either question with a no. Allowed in every state but the two last."""
        self.state = self._next(Reject)
        return Reject(code=refusal.code, reason=refusal.reason, url=refusal.url)

    def outcome(self, ack: InitAck) -> HandshakeOutcome:
        """What `ack`, which `admit` made, means for the session."""
        return HandshakeOutcome(
            hello=self._known_hello(),
            capabilities=ack.capabilities,
            authorized_peers=tuple(ack.authorized_peers),
            failed_peers=ack.failed_peers,
            server_time=ack.server_time,
            instance=ack.instance,
        )

    def _known_hello(self) -> InitConnection:
        if self._hello is None:
            raise ProtocolError(BAD_REQUEST, "nothing before InitConnection")
        return self._hello


def _version_text(version: int) -> str:
    return f"protocol version {version}, this side speaks {PROTO_VERSION}: use matching releases"
