"""One session with the server, from the first byte to its end.

    handshake -> WorkerCapabilities, ResumeJobs -> ResumeAck -> live

The reader never waits for anything but the next message: what takes time is handed to a task or to a
mailbox. Its end, whatever the cause, is a value; the jobs go on (see `wire`).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
import trio
from gradient_protocol.codec import Side
from gradient_protocol.connection import Connection
from gradient_protocol.errors import JobContentError, ProtocolError, SessionClosed
from gradient_protocol.handshake import HandshakeOutcome, Rejected, handshake_as_worker
from gradient_protocol.limits import PROTO_VERSION, REQUEST_REPEAT_SECS
from gradient_protocol.messages.common import Error, Message
from gradient_protocol.messages.server import ResumeAck
from gradient_protocol.messages.shapes import Capabilities
from gradient_protocol.messages.worker import (
    BuildProgress,
    EvalProgress,
    InitConnection,
    RequestJobList,
    ResumeJobs,
)
from gradient_protocol.state import SessionOrder

from gradient_worker.agent import Agent
from gradient_worker.candidates import Candidates
from gradient_worker.heartbeat import Heartbeat
from gradient_worker.scorer import Scorer
from gradient_worker.timing import ERROR_FLUSH_SECS, PROGRESS_SECS
from gradient_worker.wakeup import Wakeup
from gradient_worker.wire import Wire

__all__ = ["Session", "SessionEnd", "run_session"]

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """How a session ended. `established`: ResumeAck had come. `code` and `url` as the server named them.

    `url` without code 421 is where a server that goes away sent this worker. `nobody_listens`: the
    address was reached, and no server at it.
    """

    reason: str
    established: bool
    code: int | None = None
    url: str | None = None
    nobody_listens: bool = False


class Session:
    """The state of one session. `handle` is what to do with a message (see `handlers`)."""

    def __init__(self, agent: Agent, connection: Connection, outcome: HandshakeOutcome) -> None:
        self.agent = agent
        self.connection = connection
        self.order = SessionOrder()
        self.wire = Wire(connection, zstd=outcome.capabilities.zstd)
        self.scorer = Scorer(agent.shop.store)
        self.candidates = Candidates(self.scorer)
        self.scores_due = Wakeup()
        self.heartbeat = Heartbeat(agent, self)
        self.listed: set[str] = set()
        self.end: SessionEnd | None = None
        self.next_url: str | None = None

    @property
    def live(self) -> bool:
        """Whether ResumeAck came."""
        return self.order.is_live

    def send(self, message: Message) -> None:
        """Send a message of the session's own. Raises SessionClosed."""
        self.order.note(message)
        self.connection.send(message)

    def stop(self, reason: str, *, code: int | None = None, url: str | None = None) -> None:
        """End the session; the first reason stands."""
        if self.end is None:
            self.end = SessionEnd(reason, self.live, code, url or self.next_url)

    def introduce(self) -> None:
        """What the worker owes after InitAck, always."""
        running = [job.resumed() for job in self.agent.jobs]
        self.listed = {entry.assignment_id for entry in running}
        self.send(self.agent.facts.capabilities)
        self.send(ResumeJobs(running=running))

    def resume(self, ack: ResumeAck) -> None:
        """The server adopts or drops each listed assignment; from here on jobs may use the session."""
        adopted = {entry.assignment_id: entry for entry in ack.adopted}
        for assignment_id in self.listed - adopted.keys():
            job = self.agent.jobs.get(assignment_id)
            if job is not None:
                logger.warning("the server dropped a job", assignment_id=assignment_id)
                self.agent.drop(job)
        for assignment_id, entry in adopted.items():
            job = self.agent.jobs.get(assignment_id)
            if job is None:
                continue
            job.reports.resume(entry.seq)
            job.acknowledged(entry.seq)
            if job.log is not None:
                job.log.resume(entry.log_offset)
            if job.reports.final_acknowledged:
                self.agent.jobs.forget(job)
        self.agent.shop.link.attach(self.wire)
        self.agent.server_draining = False
        self.agent.resumed()
        for job in self.agent.jobs:
            stage = None if job.reports.finished else job.stage_update()
            if stage is not None:
                self.send(stage)
        self.agent.jobs.flush_all()
        self.send(RequestJobList())
        self.agent.request_all()


async def run_session(
    agent: Agent,
    stream: trio.abc.Stream,
    handle: Callable[[Session, Message], None],
    *,
    established: Callable[[], None],
) -> SessionEnd:
    """Run a session to its end. `established` is called once ResumeAck came."""
    connection = Connection(stream, Side.WORKER)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(connection.run)
            end = await _greet_and_run(agent, connection, handle, established)
            await connection.aclose(flush_secs=ERROR_FLUSH_SECS)
            nursery.cancel_scope.cancel()
        return end
    finally:
        agent.shop.link.detach()
        with trio.CancelScope(shield=True):
            await connection.aclose()


async def _greet_and_run(
    agent: Agent,
    connection: Connection,
    handle: Callable[[Session, Message], None],
    established: Callable[[], None],
) -> SessionEnd:
    facts = agent.facts
    builds = facts.capabilities.max_concurrent_builds > 0
    evaluates = facts.capabilities.max_concurrent_evaluations > 0
    hello = InitConnection(
        version=PROTO_VERSION,
        worker_id=facts.worker_id,
        name=facts.name,
        incarnation=facts.incarnation,
        capabilities=Capabilities(fetch=evaluates, eval=evaluates, build=builds, zstd=True),
    )
    try:
        outcome = await handshake_as_worker(connection, hello, agent.peers.tokens)
    except ProtocolError as error:
        return SessionEnd(f"the server broke the protocol: {error.reason}", False, error.code)
    except SessionClosed as error:
        return SessionEnd(error.reason, False)
    if isinstance(outcome, Rejected):
        return SessionEnd(outcome.reason, False, outcome.code, outcome.url)
    for peer, reason in outcome.failed_peers.items():
        logger.warning("a token was refused", peer=peer, reason=reason)
    logger.info("connected", instance=outcome.instance, peers=list(outcome.authorized_peers))
    return await _run_authenticated(Session(agent, connection, outcome), handle, established)


async def _run_authenticated(
    session: Session, handle: Callable[[Session, Message], None], established: Callable[[], None]
) -> SessionEnd:
    token = trio.lowlevel.current_trio_token()

    def paths_changed(paths: tuple[str, ...]) -> None:  # in whichever thread changed the store
        session.scorer.note_changes(paths)
        token.run_sync_soon(session.scores_due.set, idempotent=True)

    unsubscribe = session.agent.shop.store.subscribe(paths_changed)
    try:
        session.introduce()
        async with trio.open_nursery() as nursery:
            scope = nursery.cancel_scope
            tasks = (
                session.heartbeat.run,
                lambda: _send_scores(session),
                lambda: _repeat(session),
                lambda: _tell_progress(session),
                lambda: session.agent.jobs.pump(session.wire),
            )
            for task in tasks:
                nursery.start_soon(_until_closed, task, scope)
            await _read(session, handle, established)
            scope.cancel()
    except SessionClosed as error:
        session.stop(error.reason)
    finally:
        unsubscribe()
    assert session.end is not None
    return session.end


async def _until_closed(task: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    """A session's own task: its return ends the session, its end is the reader's to explain."""
    try:
        await task()
        scope.cancel()
    except SessionClosed:
        return


async def _read(
    session: Session, handle: Callable[[Session, Message], None], established: Callable[[], None]
) -> None:
    while session.end is None:
        try:
            message = await session.connection.receive()
            session.order.note(message)
            was_live = session.live
            handle(session, message)
            if isinstance(message, ResumeAck) and was_live:
                established()
        except JobContentError as error:
            _say(session, Error(code=error.code, reason=error.reason, assignment_id=error.assignment_id))
        except ProtocolError as error:
            logger.error("the server broke the protocol", code=error.code, reason=error.reason)
            session.stop(f"the server broke the protocol: {error.reason}", code=error.code)
            _say(session, Error(code=error.code, reason=error.reason))
        except SessionClosed as error:
            session.stop(error.reason)


def _say(session: Session, error: Error) -> None:
    try:
        session.send(error)
    except SessionClosed as closed:
        session.stop(closed.reason)


async def _send_scores(session: Session) -> None:
    while True:
        await session.scores_due.wait()
        while session.live:
            await session.connection.control_room()
            scores = session.candidates.due()
            if scores is None:
                break
            session.connection.send(scores)


async def _repeat(session: Session) -> None:
    """A free slot is named again every 10 s, whatever else runs."""
    while True:
        await trio.sleep(REQUEST_REPEAT_SECS)
        if session.live:
            session.agent.request_all()


async def _tell_progress(session: Session) -> None:
    """What has changed of how far jobs are; all of it to each new session, for it is live state."""
    told: dict[str, BuildProgress | EvalProgress] = {}
    while True:
        await trio.sleep(PROGRESS_SECS)
        if not session.live or not session.connection.control_has_room:
            continue
        unfinished = [job for job in session.agent.jobs if not job.reports.finished]
        progress = {job.assignment_id: job.progress_message() for job in unfinished}
        now = {assignment: message for assignment, message in progress.items() if message is not None}
        for assignment, message in now.items():
            if told.get(assignment) != message:
                session.connection.send(message)
        told = now
