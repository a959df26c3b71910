"""Messages from the server to the worker (messages.md, "Server to worker")."""

import msgspec

from gradient_protocol.kinds import Compression, JobKind, UploadOutcome
from gradient_protocol.messages.common import BulkAck, Draining, Error, Message, NarAbort, Zstd
from gradient_protocol.messages.shapes import (
    Capabilities,
    ClusterSeat,
    Count,
    Job,
    MemberAddress,
    RosterEntry,
    Shape,
)

__all__ = [
    "SERVER_MESSAGES",
    "AbortCluster",
    "AbortJob",
    "AdoptedJob",
    "AssignJob",
    "AuthChallenge",
    "AuthUpdate",
    "CacheError",
    "CacheStatus",
    "Candidate",
    "ClusterSignal",
    "HeartbeatAck",
    "ImportResult",
    "InitAck",
    "JobListChunk",
    "JobOffer",
    "KnownDerivations",
    "Multipart",
    "NarPush",
    "NarStreamHeader",
    "NarUnavailable",
    "PathStatus",
    "Put",
    "Reject",
    "Relay",
    "ReportAck",
    "RequiredPath",
    "ResumeAck",
    "RevokeJob",
    "ServerMessage",
    "Skip",
    "StartCluster",
    "UploadCommitted",
    "UploadGrant",
    "UploadTarget",
]


class AuthChallenge(Message, frozen=True, tag="AuthChallenge"):
    """The peers that registered this worker, each to be answered with a token."""

    peers: list[str]


class InitAck(Message, frozen=True, tag="InitAck"):
    """The handshake succeeded. `capabilities` is what both sides have."""

    version: Count
    capabilities: Capabilities
    authorized_peers: list[str]
    failed_peers: dict[str, str]
    server_time: float
    instance: str


class Reject(Message, frozen=True, tag="Reject"):
    """Ends a handshake."""

    code: Count
    reason: str
    url: str | None = None


class AdoptedJob(Shape, frozen=True):
    """An assignment that goes on, with what the server has of it already."""

    assignment_id: str
    seq: Count
    log_offset: Count
    started: bool


class ResumeAck(Message, frozen=True, tag="ResumeAck"):
    """Adopts or drops each assignment that the worker listed."""

    adopted: list[AdoptedJob]
    dropped: list[str]


class AuthUpdate(Message, frozen=True, tag="AuthUpdate"):
    """The result of a re-authentication in place."""

    authorized_peers: list[str]
    failed_peers: dict[str, str]


class HeartbeatAck(Message, frozen=True, tag="HeartbeatAck"):
    """Answers one `WorkerMetrics` at once."""

    n: Count
    server_time: float


class RequiredPath(Shape, frozen=True):
    """A path of the inputs' runtime closure and its size as a NAR."""

    path: str
    nar_size: Count


class Candidate(Shape, frozen=True):
    """A pending job that the worker may score."""

    job_id: str
    kind: JobKind
    required_paths: list[RequiredPath]
    output_paths: list[str]
    drv_path: str | None = None


class JobListChunk(Message, frozen=True, tag="JobListChunk"):
    """A part of the window that `RequestJobList` asked for."""

    candidates: list[Candidate]
    is_final: bool


class JobOffer(Message, frozen=True, tag="JobOffer"):
    """Candidates that joined the window."""

    candidates: list[Candidate]
    is_final: bool


class RevokeJob(Message, frozen=True, tag="RevokeJob"):
    """Candidates that left the window."""

    job_ids: list[str]


class AssignJob(Message, frozen=True, tag="AssignJob"):
    """An assignment. With `cluster`: take the slot and hold the job."""

    job_id: str
    assignment_id: str
    job: Job
    cluster: ClusterSeat | None = None


class StartCluster(Message, frozen=True, tag="StartCluster"):
    """Every member accepted: run the held job."""

    attempt: str
    roster: list[RosterEntry]


class AbortCluster(Message, frozen=True, tag="AbortCluster"):
    """The attempt is over: drop a held job without a report, abort a running one."""

    attempt: str
    reason: str


class ClusterSignal(Message, frozen=True, tag="ClusterSignal"):
    """A signal for a member; `n` is its place in the attempt's one order."""

    attempt: str
    n: Count
    sender: MemberAddress = msgspec.field(name="from")
    topic: str
    payload: bytes


class AbortJob(Message, frozen=True, tag="AbortJob"):
    """Stop the job and report it as Aborted."""

    assignment_id: str
    reason: str


class ReportAck(Message, frozen=True, tag="ReportAck"):
    """Everything up to `seq` is committed. `refused` concerns exactly `seq`."""

    assignment_id: str
    seq: Count
    refused: str | None = None


class PathStatus(Shape, frozen=True):
    """Whether the server holds a path; for Pull its size and, where there is one, a URL."""

    held: bool
    nar_size: Count | None = None
    url: str | None = None


class CacheStatus(Message, frozen=True, tag="CacheStatus"):
    """Answers a `CacheQuery`."""

    query_id: str
    paths: dict[str, PathStatus]


class CacheError(Message, frozen=True, tag="CacheError"):
    """A query of any kind that could not be answered."""

    query_id: str
    code: Count
    reason: str


class NarStreamHeader(Message, frozen=True, tag="NarStreamHeader"):
    """A download begins. Hash and `nar_size` are of the uncompressed NAR."""

    transfer_id: str
    path: str
    nar_hash: str
    nar_size: Count
    file_size: Count
    compression: Compression
    references: list[str]
    offset: Count


class NarPush(Message, frozen=True, tag="NarPush"):
    """Bulk. `offset` in bytes as they travel."""

    transfer_id: str
    offset: Count
    data: bytes
    last: bool


class NarUnavailable(Message, frozen=True, tag="NarUnavailable"):
    """The server does not hold the path, or cannot read it."""

    transfer_id: str
    reason: str


class Skip(Shape, frozen=True, tag="Skip"):
    """Held already: the upload is done."""


class Relay(Shape, frozen=True, tag="Relay"):
    """Send chunks over the session, from `offset`."""

    offset: Count


class Put(Shape, frozen=True, tag="Put"):
    """One HTTP PUT, then `UploadFinished`."""

    url: str
    headers: dict[str, str]
    expires_secs: float

    def __repr__(self) -> str:
        """The URL is a bearer secret while it lives."""
        return f"Put(expires_secs={self.expires_secs})"


class Multipart(Shape, frozen=True, tag="Multipart"):
    """One HTTP PUT a part, then `UploadFinished` with the ETags."""

    urls: list[str]
    part_size: Count
    expires_secs: float

    def __repr__(self) -> str:
        """The URLs are bearer secrets while they live."""
        return f"Multipart(parts={len(self.urls)}, expires_secs={self.expires_secs})"


UploadTarget = Skip | Relay | Put | Multipart


class UploadGrant(Message, frozen=True, tag="UploadGrant"):
    """Leave to upload, and how."""

    request_id: str
    target: UploadTarget


class UploadCommitted(Message, frozen=True, tag="UploadCommitted"):
    """The end of an upload. Ok: object and row are durable."""

    request_id: str
    outcome: UploadOutcome
    reason: str | None = None


class KnownDerivations(Message, frozen=True, tag="KnownDerivations"):
    """Answers `QueryKnownDerivations`."""

    query_id: str
    known: list[str]


class ImportResult(Message, frozen=True, tag="ImportResult"):
    """Answers `ImportRequest` once every path is built or has finally failed."""

    query_id: str
    ready: list[str]
    failed: dict[str, str]


ServerMessage = (
    AuthChallenge
    | InitAck
    | Reject
    | ResumeAck
    | AuthUpdate
    | Error
    | HeartbeatAck
    | JobListChunk
    | JobOffer
    | RevokeJob
    | AssignJob
    | StartCluster
    | AbortCluster
    | ClusterSignal
    | AbortJob
    | ReportAck
    | BulkAck
    | CacheStatus
    | CacheError
    | NarStreamHeader
    | NarPush
    | NarUnavailable
    | NarAbort
    | UploadGrant
    | UploadCommitted
    | KnownDerivations
    | ImportResult
    | Draining
    | Zstd
)

SERVER_MESSAGES: tuple[type[Message], ...] = (
    AuthChallenge,
    InitAck,
    Reject,
    ResumeAck,
    AuthUpdate,
    Error,
    HeartbeatAck,
    JobListChunk,
    JobOffer,
    RevokeJob,
    AssignJob,
    StartCluster,
    AbortCluster,
    ClusterSignal,
    AbortJob,
    ReportAck,
    BulkAck,
    CacheStatus,
    CacheError,
    NarStreamHeader,
    NarPush,
    NarUnavailable,
    NarAbort,
    UploadGrant,
    UploadCommitted,
    KnownDerivations,
    ImportResult,
    Draining,
    Zstd,
)
