"""One connection from its first byte to the last trace of its session.

Three tasks: the reader, which never waits for database or disk; the one that works off, in order,
what needs the database; the connection's writer. Beside them lanes for logs and uploads, and
downloads, live only while they have something to do.
"""

from collections.abc import Hashable
from contextlib import suppress
from typing import Final, TypeVar

import structlog
import trio
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.errors import JobContentError, ProtocolError, ReportContentError, SessionClosed
from gradient_protocol.handshake import HandshakeOutcome, handshake_as_server
from gradient_protocol.messages.common import Error, Message
from gradient_protocol.messages.shapes import Capabilities
from gradient_protocol.messages.worker import LogChunk

from gradient_server.db.errors import database_errors, first_line
from gradient_server.db.queries.registry import note_worker_seen
from gradient_server.net.handlers import IMMEDIATE
from gradient_server.net.lanes import KeyedLanes
from gradient_server.net.logs import store_chunks
from gradient_server.net.ordered import work_off
from gradient_server.net.services import Services
from gradient_server.net.session import RefusedReport, Session

__all__ = ["serve_connection"]

log = structlog.get_logger(__name__)

E = TypeVar("E", bound=Exception)

SERVER_CAPABILITIES: Final = Capabilities(fetch=True, eval=True, build=True, zstd=True)
INTERNAL_ERROR: Final = 500
FLUSH_SECS: Final = 2.0
# From `InitAck` to `ResumeJobs`: a worker that says nothing about its jobs is of no use.
RESUME_SECS: Final = 30.0


async def serve_connection(services: Services, stream: trio.abc.Stream) -> None:
    """Everything about one connection. Never raises for what a peer does."""
    connection = Connection(stream, Side.SERVER)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(connection.run)
            try:
                await _converse(services, connection)
            except SessionClosed as closed:
                log.debug("a connection ended", reason=closed.reason)
            except Exception:
                log.exception("a connection failed")
                with suppress(SessionClosed):
                    connection.send(
                        Error(code=INTERNAL_ERROR, reason="internal error; the server's log has it")
                    )
            await connection.aclose(flush_secs=FLUSH_SECS)
            nursery.cancel_scope.cancel()
    finally:
        await connection.aclose()


async def _converse(services: Services, connection: Connection) -> None:
    outcome = await handshake_as_server(
        connection,
        services.authority,
        capabilities=SERVER_CAPABILITIES,
        instance=services.instance_id,
        clock=services.clock.now,
    )
    if not isinstance(outcome, HandshakeOutcome):
        log.info("a handshake was refused", code=outcome.code, reason=outcome.reason)
        return
    session = Session(
        connection,
        worker_id=outcome.hello.worker_id,
        name=outcome.hello.name,
        incarnation=outcome.hello.incarnation,
        capabilities=outcome.capabilities,
        peers=frozenset(outcome.authorized_peers),
    )
    with structlog.contextvars.bound_contextvars(worker=session.name):
        try:
            # Nothing may be awaited between the handshake's last answer and this.
            await services.sessions.enter(session)
            await services.graces.cancel(session.worker_id)
            log.info("a worker connected", peers=sorted(session.peers), failed=outcome.failed_peers)
            with session.scope:
                await _run_session(services, session)
        finally:
            await _close(services, session)


async def _run_session(services: Services, session: Session) -> None:
    async def handle_bulk(_key: Hashable, messages: list[Message]) -> None:
        if isinstance(messages[0], LogChunk):
            await store_chunks(services, session, messages)
        else:
            await services.uploads.store(session, messages)

    try:
        async with trio.open_nursery() as nursery:
            session.lanes = KeyedLanes(nursery, handle_bulk)
            session.nursery = nursery
            nursery.start_soon(_watch, services, session)
            nursery.start_soon(work_off, services, session)
            try:
                await _read(services, session)
            finally:
                session.is_over = True
                nursery.cancel_scope.cancel()
    except* SessionClosed as group:
        session.end_reason = session.end_reason or str(group.exceptions[0])
    except* ProtocolError as group:
        error = _first(group)
        log.warning("a session ends by a rule of the protocol", code=error.code, reason=error.reason)
        session.end_reason = session.end_reason or error.reason
        session.send(Error(code=error.code, reason=error.reason))
    except* Exception as group:
        # One session's failure is not the pool's: the worker keeps its jobs and comes back.
        log.exception("a session failed", exc_info=group)
        session.end_reason = session.end_reason or "internal error"
        session.send(Error(code=INTERNAL_ERROR, reason="internal error; the server's log has it"))


def _first(group: BaseExceptionGroup[E]) -> E:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def _read(services: Services, session: Session) -> None:
    connection = session.connection
    order = session.order
    while True:
        try:
            message = await connection.receive()
        except ReportContentError as error:
            _refuse_report(session, error)
            continue
        except JobContentError as error:  # the server's to send; a worker that names one is confused
            raise ProtocolError(error.code, error.reason) from error
        order.note(message)
        IMMEDIATE[type(message)](services, session, message)


def _refuse_report(session: Session, error: ReportContentError) -> None:
    session.count_report(error.assignment_id)
    session.work.put(RefusedReport(error.assignment_id, error.seq, error.reason))


async def _watch(services: Services, session: Session) -> None:
    """Ends a session that falls silent, or that does not say what it has (408)."""
    silence_secs = services.settings.proto_worker_heartbeat_timeout_secs
    resume_by = services.clock.monotonic() + RESUME_SECS
    while True:
        now = services.clock.monotonic()
        quiet_until = session.connection.last_received + silence_secs
        if now >= quiet_until:
            raise ProtocolError(408, f"nothing was heard for {silence_secs:g} s")
        if not session.resumed and now >= resume_by:
            raise ProtocolError(408, f"no ResumeJobs within {RESUME_SECS:g} s")
        await trio.sleep_until(quiet_until if session.resumed else min(quiet_until, resume_by))


async def _note_seen(services: Services, worker_id: str) -> None:
    now = services.clock.now()
    try:
        await services.database.run(lambda connection: note_worker_seen(connection, worker_id, now=now))
    except database_errors() as error:
        log.warning("when a worker was last seen is not recorded", reason=first_line(error))


async def _close(services: Services, session: Session) -> None:
    """Let go of everything, whatever ended the session. Nothing here waits for the worker.

    Whatever fails on the way, the session is over at the end: the worker's next one waits for that.
    """
    with trio.CancelScope(shield=True):
        was_resumed, session.resumed = session.resumed, False
        try:
            if was_resumed:
                services.scheduler.worker_disconnected(session.worker_id)
            services.downloads.session_ended(session)
            await services.uploads.session_ended(session)
            if was_resumed:
                await _note_seen(services, session.worker_id)
        finally:
            if not session.replaced:
                services.graces.arm(session.worker_id)
            services.sessions.leave(session)
    reason = "replaced by a newer session" if session.replaced else session.end_reason
    log.info("a worker's session ended", reason=reason or "cancelled")
