"""What each message of the server does: small functions of (session, message), by its class.

None of them waits. Messages about an assignment, attempt or query that is not here are ignored
(protocol.md, "Jobs and holds at the worker"); what order allows a message is `gradient_protocol.state`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import structlog
import trio
from gradient_protocol.errors import TOO_LARGE, ProtocolError
from gradient_protocol.handshake import answer_challenge
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages import server
from gradient_protocol.messages.common import Draining, Error, Message, NarAbort
from gradient_protocol.messages.shapes import BuildJob
from gradient_protocol.messages.worker import AssignJobResponse

from gradient_worker.executor.job import Stop, StopCause
from gradient_worker.member_signals import Receipt
from gradient_worker.session import Session

__all__ = ["handle"]

logger = structlog.get_logger(__name__)


def handle(session: Session, message: Message) -> None:
    """Act on one message. ProtocolError for one that only a broken server sends."""
    _HANDLERS[type(message)](session, message)


def _resume_ack(session: Session, message: server.ResumeAck) -> None:
    session.resume(message)


def _assign_job(session: Session, message: server.AssignJob) -> None:
    agent = session.agent
    reason = agent.accept(message)
    session.send(
        AssignJobResponse(assignment_id=message.assignment_id, accepted=reason is None, reason=reason)
    )
    if reason is not None:
        logger.info("assignment rejected", assignment_id=message.assignment_id, reason=reason)
        return
    logger.debug("assigned", assignment_id=message.assignment_id, job_id=message.job_id)
    agent.begin(message.assignment_id)
    agent.request(JobKind.BUILD if isinstance(message.job, BuildJob) else JobKind.EVAL)


def _start_cluster(session: Session, message: server.StartCluster) -> None:
    run = session.agent.holds.start_cluster(message.attempt)
    if run is not None:
        session.agent.start_member(run, message)


def _abort_cluster(session: Session, message: server.AbortCluster) -> None:
    holds = session.agent.holds
    session.agent.carry_out(holds.abort_cluster(message.attempt, message.reason, trio.current_time()))


def _abort_job(session: Session, message: server.AbortJob) -> None:
    release = session.agent.holds.abort_job(message.assignment_id, message.reason)
    if release is not None:
        session.agent.carry_out(release)
        return
    job = session.agent.jobs.get(message.assignment_id)
    if job is not None and not job.reports.finished:
        logger.info("aborting", assignment_id=message.assignment_id, reason=message.reason)
        job.stop(Stop(StopCause.ABORTED, message.reason))


def _report_ack(session: Session, message: server.ReportAck) -> None:
    job = session.agent.jobs.get(message.assignment_id)
    if job is None:
        return
    if message.refused is not None:
        session.agent.note_refused(job, message.seq, message.refused)
    job.acknowledged(message.seq)
    if job.reports.final_acknowledged:
        session.agent.jobs.forget(job)
    else:
        session.agent.jobs.flush(job)


def _error(session: Session, message: Error) -> None:
    if message.assignment_id is None:
        session.stop(message.reason, code=message.code, url=message.url)
        return
    job = session.agent.jobs.get(message.assignment_id)
    logger.error(
        "the server refused what this worker said of a job",
        assignment_id=message.assignment_id,
        seq=message.seq,
        reason=message.reason,
    )
    if job is None:
        return
    if message.seq is not None and session.agent.jobs.refuse(job, message.seq, message.reason):
        job.stop(Stop(StopCause.REFUSED, message.reason))
    elif message.seq is None and not job.reports.finished:
        job.stop(Stop(StopCause.ABORTED, message.reason))


def _auth_challenge(session: Session, message: server.AuthChallenge) -> None:
    session.send(answer_challenge(session.agent.peers.tokens, message.peers))


def _auth_update(_session: Session, message: server.AuthUpdate) -> None:
    for peer, reason in message.failed_peers.items():
        logger.warning("a token was refused", peer=peer, reason=reason)
    logger.info("authorized", peers=message.authorized_peers)


def _heartbeat_ack(session: Session, message: server.HeartbeatAck) -> None:
    session.heartbeat.answered(message)


def _offers(session: Session, message: server.JobListChunk | server.JobOffer) -> None:
    session.candidates.offer(message.candidates)
    session.scores_due.set()


def _revoke(session: Session, message: server.RevokeJob) -> None:
    session.candidates.revoke(message.job_ids)


def _draining(session: Session, message: Draining) -> None:
    logger.info("the server is going away", reason=message.reason)
    session.agent.server_draining = True
    session.next_url = message.url


def _query_answer(
    session: Session,
    message: server.CacheStatus | server.CacheError | server.KnownDerivations | server.ImportResult,
) -> None:
    session.wire.deliver(message.query_id, message)


def _download(session: Session, message: server.NarStreamHeader | server.NarUnavailable | NarAbort) -> None:
    session.wire.deliver(message.transfer_id, message)


def _nar_push(session: Session, message: server.NarPush) -> None:
    session.wire.deliver(message.transfer_id, message, len(message.data))


def _upload(session: Session, message: server.UploadGrant | server.UploadCommitted) -> None:
    session.wire.deliver(message.request_id, message)


def _cluster_signal(session: Session, message: server.ClusterSignal) -> None:
    receipt = session.agent.receive_signal(message)
    if receipt is Receipt.TOO_MANY:
        raise ProtocolError(TOO_LARGE, f"more signals than an attempt may have came for {message.attempt}")


_HANDLERS: Mapping[type[Message], Callable[[Session, Any], None]] = {
    server.ResumeAck: _resume_ack,
    server.AssignJob: _assign_job,
    server.StartCluster: _start_cluster,
    server.AbortCluster: _abort_cluster,
    server.AbortJob: _abort_job,
    server.ReportAck: _report_ack,
    Error: _error,
    server.AuthChallenge: _auth_challenge,
    server.AuthUpdate: _auth_update,
    server.HeartbeatAck: _heartbeat_ack,
    server.JobListChunk: _offers,
    server.JobOffer: _offers,
    server.RevokeJob: _revoke,
    Draining: _draining,
    server.CacheStatus: _query_answer,
    server.CacheError: _query_answer,
    server.KnownDerivations: _query_answer,
    server.ImportResult: _query_answer,
    server.NarStreamHeader: _download,
    server.NarUnavailable: _download,
    NarAbort: _download,
    server.NarPush: _nar_push,
    server.UploadGrant: _upload,
    server.UploadCommitted: _upload,
    server.ClusterSignal: _cluster_signal,
}
