"""What each message from a worker does, as small functions of (services, session, message).

Those in `IMMEDIATE` run in the reader itself and never wait; what needs the database goes, in the
order of arrival, to the session's one task of `ordered`, and bytes go to lanes of their own.
"""

from collections.abc import Callable
from typing import Any, Final

import structlog
from gradient_protocol.contents import is_numbered_report
from gradient_protocol.errors import ProtocolError
from gradient_protocol.kinds import JobKind
from gradient_protocol.limits import BULK_WINDOW, MAX_CHUNK_DATA
from gradient_protocol.messages import worker as w
from gradient_protocol.messages.common import Draining, Error, Message, NarAbort
from gradient_protocol.messages.server import HeartbeatAck
from gradient_protocol.messages.shapes import EvalStageUpdate, Stage

from gradient_server.domain.events import NoteAdded
from gradient_server.domain.job import split_job_key
from gradient_server.net.services import Services
from gradient_server.net.session import RefusedJob, Session, WorkItem

__all__ = ["IMMEDIATE", "MAX_WAITING"]

log = structlog.get_logger(__name__)

# What waits for the database in one session. A worker asks a handful at a time for each of its jobs.
MAX_WAITING: Final = 4000
_UPLOADS: Final = ("uploads",)
# The acknowledgement of a chunk may still be on its way when the next one arrives.
_MAX_WAITING_BYTES: Final = BULK_WINDOW + MAX_CHUNK_DATA


def heartbeat(services: Services, session: Session, message: w.WorkerMetrics) -> None:
    """Answered at once, by the reader, without database or disk."""
    session.send(HeartbeatAck(n=message.n, server_time=services.clock.now()))
    if session.resumed:
        services.scheduler.heartbeat(session.worker_id, message)


def capabilities(services: Services, session: Session, message: w.WorkerCapabilities) -> None:
    """The first ones wait for `ResumeJobs`; later ones take effect at once."""
    session.worker_capabilities = message
    if session.resumed:
        services.scheduler.update_capabilities(session.worker_id, message)


def request_job_list(services: Services, session: Session, _message: w.RequestJobList) -> None:
    """The window anew."""
    services.scheduler.request_job_list(session.worker_id)


def candidate_scores(services: Services, session: Session, message: w.CandidateScores) -> None:
    """What the worker would have to fetch."""
    services.scheduler.candidate_scores(session.worker_id, message)


def request_job(services: Services, session: Session, message: w.RequestJob) -> None:
    """A free slot."""
    services.scheduler.request_job(session.worker_id, message.kind)


def assign_response(services: Services, session: Session, message: w.AssignJobResponse) -> None:
    """Stored in its turn; but a `RequestJob` right behind it must find the assignment answered."""
    services.scheduler.answer_arrived(session.worker_id, message)
    ordered(services, session, message)


def draining(services: Services, session: Session, message: Draining) -> None:
    """The worker takes no more jobs in this session."""
    session.worker_draining = True
    if session.resumed:
        services.scheduler.draining(session.worker_id, message.reason or "the worker is draining")


def job_update(services: Services, session: Session, message: w.JobUpdate) -> None:
    """A numbered report waits for the database; a stage is live state."""
    if is_numbered_report(message):
        report(services, session, message)
        return
    held = session.held(message.assignment_id)
    if held is None:
        return
    if isinstance(message.update, Stage):
        held.progress = None
        services.scheduler.stage(message.assignment_id, message.update.stage)
    elif isinstance(message.update, EvalStageUpdate):
        held.progress = None
        held.eval_stage = message.update.stage


def report(services: Services, session: Session, message: Any) -> None:  # noqa: ANN401 - any numbered one
    """A numbered report."""
    session.count_report(message.assignment_id)
    ordered(services, session, message)


def ordered(_services: Services, session: Session, message: WorkItem) -> None:
    """Needs the database, in its turn. Bounded here, for the protocol has no window for queries."""
    if len(session.work) >= MAX_WAITING:
        raise ProtocolError(413, f"more than {MAX_WAITING} messages wait for their answer")
    session.work.put(message)


def progress(_services: Services, session: Session, message: w.BuildProgress | w.EvalProgress) -> None:
    """For people who watch (web/live.py); kept with the live assignment alone."""
    held = session.held(message.assignment_id)
    if held is not None:
        held.progress = (message.done, message.total)


def eval_message(services: Services, session: Session, message: w.EvalMessage) -> None:
    """Display only."""
    held = session.held(message.assignment_id)
    if held is None or held.kind is not JobKind.EVAL:
        return
    _, evaluation = split_job_key(held.job_id)
    note = NoteAdded(evaluation, message.level.value, message.message, message.source, stored=False)
    services.bus.publish([note])


def log_chunk(_services: Services, session: Session, message: w.LogChunk) -> None:
    """Bytes of a log, at most 4 MiB of which are not acknowledged."""
    _bulk(session, ("log", message.assignment_id), message, len(message.data))


def upload_asked(_services: Services, session: Session, message: w.UploadRequest | w.UploadCancel) -> None:
    """A lane of their own: those that wait share a transaction, and no report waits for them."""
    if session.lanes.put(_UPLOADS, message, 1) > MAX_WAITING:
        raise ProtocolError(413, f"more than {MAX_WAITING} uploads wait for their answer")


def upload_chunk(services: Services, session: Session, message: w.UploadChunk) -> None:
    """Bytes of an upload that was granted."""
    if services.uploads.takes(session, message.request_id):
        _bulk(session, ("upload", message.request_id), message, len(message.data))


def upload_finished(services: Services, session: Session, message: w.UploadFinished) -> None:
    """The last of them are on the same lane, before it."""
    if services.uploads.takes(session, message.request_id):
        _bulk(session, ("upload", message.request_id), message, 0)


def _bulk(session: Session, key: tuple[str, str], message: Message, size_bytes: int) -> None:
    if session.lanes.put(key, message, size_bytes) > _MAX_WAITING_BYTES:
        raise ProtocolError(413, f"more than {BULK_WINDOW} unacknowledged bytes of {key[1]}")


def nar_request(services: Services, session: Session, message: w.NarRequest) -> None:
    """A download, in a task of its own once it has a slot."""
    services.downloads.request(session, message)


def nar_abort(services: Services, session: Session, message: NarAbort) -> None:
    """The worker gave a download up."""
    services.downloads.abort(session, message.transfer_id)


def error(services: Services, session: Session, message: Error) -> None:
    """One that names an assignment is about its job; any other ends the session."""
    if message.assignment_id is not None:
        ordered(services, session, RefusedJob(message.assignment_id, message.reason))
        return
    log.warning("the worker ended the session", worker=session.name, code=message.code, reason=message.reason)
    session.end(f"the worker said {message.code}: {message.reason}")


# Any: each function takes its own class.
IMMEDIATE: Final[dict[type[Message], Callable[[Services, Session, Any], None]]] = {
    w.WorkerMetrics: heartbeat,
    w.WorkerCapabilities: capabilities,
    w.RequestJobList: request_job_list,
    w.CandidateScores: candidate_scores,
    w.RequestJob: request_job,
    w.JobUpdate: job_update,
    w.JobCompleted: report,
    w.JobFailed: report,
    w.ClusterSignalReport: report,
    w.BuildProgress: progress,
    w.EvalProgress: progress,
    w.EvalMessage: eval_message,
    w.LogChunk: log_chunk,
    w.UploadChunk: upload_chunk,
    w.UploadFinished: upload_finished,
    w.NarRequest: nar_request,
    w.ResumeJobs: ordered,
    w.AssignJobResponse: assign_response,
    w.ReauthRequest: ordered,
    w.AuthResponse: ordered,
    w.CacheQuery: ordered,
    w.UploadRequest: upload_asked,
    w.UploadCancel: upload_asked,
    w.QueryKnownDerivations: ordered,
    w.ImportRequest: ordered,
    Draining: draining,
    NarAbort: nar_abort,
    Error: error,
}
