"""Who may work: challenges, tokens, re-authentication and revocation (protocol.md, Handshake)."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
import structlog
from gradient_protocol.errors import ProtocolError
from gradient_protocol.handshake import Refusal, Verification
from gradient_protocol.messages.common import Error
from gradient_protocol.messages.server import AuthChallenge, AuthUpdate
from gradient_protocol.messages.worker import AuthResponse, InitConnection

from gradient_server.db.queries.claims import open_assignments
from gradient_server.db.queries.instances import OtherOwner, database_now, other_owner
from gradient_server.db.queries.registry import SERVER_PEER, registrations
from gradient_server.domain.events import Event
from gradient_server.domain.status import AbortReason
from gradient_server.graph.aborts import abort_assignments
from gradient_server.net.instances import SILENT_SECS
from gradient_server.net.revocation import assignments_without_leave
from gradient_server.net.session import Session
from gradient_server.net.sessions import Takeover

if TYPE_CHECKING:
    from gradient_server.net.services import Services

__all__ = ["Authority", "check_tokens", "reauthenticate", "worker_registered", "worker_revoked"]

log = structlog.get_logger(__name__)

UNKNOWN_WORKER: Final = 403
NO_VALID_TOKEN: Final = 401
ALREADY_CONNECTED: Final = 496
WRONG_INSTANCE: Final = 421
UNAVAILABLE: Final = 503


def check_tokens(hashes: Mapping[str, bytes], tokens: Mapping[str, str]) -> Verification:
    """Which of the registered peers' tokens hold. Pure, and in constant time for each token."""
    authorized: list[str] = []
    failed: dict[str, str] = {}
    for peer, expected in hashes.items():
        token = tokens.get(peer)
        if token is None:
            failed[peer] = "no token was sent"
        elif hmac.compare_digest(hashlib.sha256(token.encode()).digest(), expected):
            authorized.append(peer)
        else:
            failed[peer] = "the token is not the one this worker was registered with"
    return Verification(tuple(authorized), failed)


class Authority:
    """Answers the handshake's questions from the database and from who is connected."""

    def __init__(self, services: "Services") -> None:
        self._services = services

    async def peers_of(self, hello: InitConnection) -> tuple[str, ...] | Refusal:
        """The peers that registered this worker; 403 if there is none."""
        found = await self._hashes(hello.worker_id)
        if not found:
            return Refusal(UNKNOWN_WORKER, _unknown(hello.worker_id))
        return tuple(found)

    async def verify(self, hello: InitConnection, tokens: Mapping[str, str]) -> Verification | Refusal:
        """Each token on its own; then 421, 496 and 503, which only a worker that proved itself learns."""
        found = await self._hashes(hello.worker_id)
        if not found:
            return Refusal(UNKNOWN_WORKER, _unknown(hello.worker_id))
        verification = check_tokens(found, tokens)
        if not verification.authorized:
            return verification
        refusal = await self._owned_elsewhere(hello.worker_id) or await self._has_room(hello)
        # Asked last, with nothing awaited between this answer and the session's entry.
        services = self._services
        takeover = services.sessions.takeover(hello.worker_id, hello.incarnation, services.clock.monotonic())
        if takeover is Takeover.REFUSED:
            return Refusal(ALREADY_CONNECTED, "this worker id is connected already; stop the other agent")
        if refusal is not None and takeover is Takeover.FREE:
            return refusal
        return verification

    async def _owned_elsewhere(self, worker_id: str) -> Refusal | None:
        """Whoever owns the worker's jobs goes on with them (protocol.md, Several instances)."""
        services = self._services
        if services.database.dialect == "sqlite":
            return None
        await services.taking_over.passed()

        def find(connection: sa.Connection) -> OtherOwner | None:
            silent_since = database_now(connection) - SILENT_SECS
            return other_owner(connection, worker_id, but=services.instance_id, silent_since=silent_since)

        owner = await services.database.read(find)
        if owner is None:
            return None
        if owner.is_alive and owner.advertise_url is not None:
            reason = f"instance {owner.instance_id} has this worker's jobs"
            return Refusal(WRONG_INSTANCE, reason, owner.advertise_url)
        return Refusal(UNAVAILABLE, "the instance that had this worker's jobs is being succeeded")

    async def _has_room(self, hello: InitConnection) -> Refusal | None:
        services = self._services
        full = len(services.sessions) >= services.settings.proto_max_connections
        if not full and not services.draining.is_set():
            return None
        if await services.database.read(lambda connection: _owns_jobs(services, connection, hello.worker_id)):
            return None
        if services.draining.is_set():
            return Refusal(UNAVAILABLE, "the server is stopping", services.succession.elsewhere())
        return Refusal(UNAVAILABLE, "the server is full")

    async def _hashes(self, worker_id: str) -> Mapping[str, bytes]:
        return await self._services.database.read(lambda connection: registrations(connection, worker_id))


def _owns_jobs(services: "Services", connection: sa.Connection, worker_id: str) -> bool:
    return bool(open_assignments(connection, instance_id=services.instance_id, worker_id=worker_id))


def _unknown(worker_id: str) -> str:
    shown = worker_id[:64]
    return f"worker {shown} is not registered here: gradient worker register NAME --worker-id {shown}"


# In place, while the session lives


async def challenge_again(services: "Services", session: Session) -> None:
    """`ReauthRequest`, or a registration changed: ask for the tokens once more."""
    found = await services.database.read(lambda connection: registrations(connection, session.worker_id))
    if not found:
        raise ProtocolError(UNKNOWN_WORKER, "this worker's registrations were revoked")
    message = AuthChallenge(peers=list(found))
    session.order.note(message)
    session.send(message)


async def reauthenticate(services: "Services", session: Session, message: AuthResponse) -> None:
    """The answer to a fresh challenge. ProtocolError 401 or 403 when nothing holds any more."""
    found = await services.database.read(lambda connection: registrations(connection, session.worker_id))
    if not found:
        raise ProtocolError(UNKNOWN_WORKER, "this worker's registrations were revoked")
    verification = check_tokens(found, message.tokens)
    if not verification.authorized:
        raise ProtocolError(NO_VALID_TOKEN, "no valid token")
    session.peers = frozenset(verification.authorized)
    session.send(
        AuthUpdate(authorized_peers=list(verification.authorized), failed_peers=dict(verification.failed))
    )
    if session.resumed:
        services.scheduler.update_projects(session.worker_id, session.projects)


async def worker_registered(services: "Services", worker_id: str) -> None:
    """A peer registered the worker (committed): if it is connected, it is asked for the token."""
    session = services.sessions.get(worker_id)
    if session is not None:
        await _challenge_or_end(services, session)


async def worker_revoked(services: "Services", worker_id: str) -> None:
    """Registrations of the worker were revoked (committed): abort what ran by their leave alone.

    The abort is stored before anything is sent. What another peer wants too goes on.
    """

    def abort(connection: sa.Connection) -> tuple[frozenset[str], list[Event]]:
        peers = registrations(connection, worker_id)
        projects = None if SERVER_PEER in peers else frozenset(peers)
        events = abort_assignments(
            connection,
            assignments_without_leave(connection, worker_id, projects),
            AbortReason.REVOKED,
            now=services.clock.now(),
            ids=services.ids,
            text="the worker's registration was revoked",
        )
        return frozenset(peers), events

    peers = await services.transact(abort)
    log.info("registrations of a worker were revoked", worker=worker_id, left=sorted(peers))
    session = services.sessions.get(worker_id)
    if session is not None:
        session.peers &= peers
        if session.resumed:
            services.scheduler.update_projects(worker_id, session.projects)
        await _challenge_or_end(services, session)


async def _challenge_or_end(services: "Services", session: Session) -> None:
    try:
        await challenge_again(services, session)
    except ProtocolError as error:
        session.send(Error(code=error.code, reason=error.reason))
        session.end(error.reason)
