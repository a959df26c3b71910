"""The handshake: `InitConnection` -> `AuthChallenge` -> `AuthResponse` -> `InitAck` or `Reject`.

`machine` decides and does nothing else; `drive` moves its messages over a Connection.
"""

from gradient_protocol.handshake.drive import Authority, handshake_as_server, handshake_as_worker
from gradient_protocol.handshake.machine import (
    Challenge,
    HandshakeOutcome,
    HandshakeState,
    Refusal,
    Rejected,
    ServerHandshake,
    Verification,
    Verify,
    WorkerHandshake,
    answer_challenge,
)

__all__ = [
    "Authority",
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
    "handshake_as_server",
    "handshake_as_worker",
]
