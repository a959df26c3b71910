"""Carries a handshake over a Connection, within its 10 s (protocol.md, "Handshake")."""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import trio

from gradient_protocol.connection import Connection
from gradient_protocol.errors import ProtocolError
from gradient_protocol.handshake.machine import (
    Challenge,
    HandshakeOutcome,
    Refusal,
    Rejected,
    ServerHandshake,
    Verification,
    Verify,
    WorkerHandshake,
)
from gradient_protocol.limits import HANDSHAKE_SECS
from gradient_protocol.messages.common import Error
from gradient_protocol.messages.server import InitAck, Reject
from gradient_protocol.messages.shapes import Capabilities
from gradient_protocol.messages.worker import AuthResponse, InitConnection

__all__ = ["Authority", "handshake_as_server", "handshake_as_worker"]

TIMEOUT_CODE: Final = 408
_TOO_SLOW: Final = f"the handshake took over {HANDSHAKE_SECS:g} s"


class Authority(Protocol):
    """Who knows workers and tokens, on the server."""

    async def peers_of(self, hello: InitConnection) -> tuple[str, ...] | Refusal:
        """The peers that registered this worker; Refusal 403 if it is unknown or deactivated."""
        ...

    async def verify(self, hello: InitConnection, tokens: Mapping[str, str]) -> Verification | Refusal:
        """Checks each token on its own. Refusal 421, 496 or 503, if at all, after the tokens held."""
        ...


async def handshake_as_worker(
    connection: Connection, hello: InitConnection, tokens: Mapping[str, str]
) -> HandshakeOutcome | Rejected:
    """Greets the server and answers its challenge; `connection.run` is running.

    Rejected when the server says so, or (408) says nothing in time. A server that breaks the rules is
    told so and raises ProtocolError; SessionClosed when the stream ends. The caller closes.
    """
    machine = WorkerHandshake(hello, tokens)
    with trio.move_on_after(HANDSHAKE_SECS):
        try:
            connection.send(machine.start())
            while True:
                step = machine.handle(await connection.receive())
                if isinstance(step, AuthResponse):
                    connection.send(step)
                    continue
                if isinstance(step, HandshakeOutcome):
                    connection.enable(zstd=step.capabilities.zstd)
                return step
        except ProtocolError as error:
            connection.send(Error(code=error.code, reason=error.reason))
            raise
    connection.send(Error(code=TIMEOUT_CODE, reason=_TOO_SLOW))
    return Rejected(TIMEOUT_CODE, _TOO_SLOW)


async def handshake_as_server(
    connection: Connection,
    authority: Authority,
    *,
    capabilities: Capabilities,
    instance: str,
    clock: Callable[[], float],
) -> HandshakeOutcome | Rejected:
    """Challenges the worker and admits it or not; `connection.run` is running.

    `clock` gives the server's seconds since the epoch. What was no message, or too large a one, is
    answered with `Error`, every other no with `Reject`; either is queued when this returns Rejected,
    and goes out with `connection.aclose(flush_secs=...)`. SessionClosed when the stream ends.
    """
    machine = ServerHandshake(capabilities, instance)
    with trio.move_on_after(HANDSHAKE_SECS):
        while True:
            try:
                message = await connection.receive()
            except ProtocolError as error:
                connection.send(Error(code=error.code, reason=error.reason))
                return Rejected(error.code, error.reason)
            try:
                step = machine.handle(message)
            except ProtocolError as error:
                return _reject(connection, machine.refuse(Refusal(error.code, error.reason)))
            if isinstance(step, Rejected):
                return step
            outcome = await _answer(connection, machine, authority, step, clock)
            if outcome is not None:
                return outcome
    return _reject(connection, machine.refuse(Refusal(TIMEOUT_CODE, _TOO_SLOW)))


async def _answer(
    connection: Connection,
    machine: ServerHandshake,
    authority: Authority,
    step: Challenge | Verify,
    clock: Callable[[], float],
) -> HandshakeOutcome | Rejected | None:
    """Finds out what the machine asks for and sends what follows; None while the handshake goes on."""
    if isinstance(step, Challenge):
        peers = await authority.peers_of(step.hello)
        if isinstance(peers, Refusal):
            return _reject(connection, machine.refuse(peers))
        connection.send(machine.challenge(peers))
        return None
    verification = await authority.verify(step.hello, step.tokens)
    if isinstance(verification, Refusal):
        return _reject(connection, machine.refuse(verification))
    answer = machine.admit(verification, clock())
    if not isinstance(answer, InitAck):
        return _reject(connection, answer)
    connection.send(answer)
    connection.enable(zstd=answer.capabilities.zstd)
    return machine.outcome(answer)


def _reject(connection: Connection, reject: Reject) -> Rejected:
    connection.send(reject)
    return Rejected(reject.code, reject.reason, reject.url)
