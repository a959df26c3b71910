"""Messages from the worker to the server (messages.md, "Worker to server")."""

from gradient_protocol.kinds import CacheQueryMode, FailureKind, JobKind, NoteLevel, ResumeState
from gradient_protocol.messages.common import BulkAck, Draining, Error, Message, NarAbort, Zstd
from gradient_protocol.messages.shapes import (
    Capabilities,
    Count,
    JobUpdateKind,
    Metrics,
    Shape,
    SignalTarget,
    Span,
)

__all__ = [
    "WORKER_MESSAGES",
    "AssignJobResponse",
    "AuthResponse",
    "BuildProgress",
    "CacheQuery",
    "CandidateScore",
    "CandidateScores",
    "ClusterSignalReport",
    "EvalMessage",
    "EvalProgress",
    "ImportRequest",
    "InitConnection",
    "JobCompleted",
    "JobFailed",
    "JobUpdate",
    "LogChunk",
    "NarRequest",
    "QueryKnownDerivations",
    "ReauthRequest",
    "RequestJob",
    "RequestJobList",
    "ResumeJobs",
    "ResumedJob",
    "UploadCancel",
    "UploadChunk",
    "UploadFinished",
    "UploadRequest",
    "WorkerCapabilities",
    "WorkerMessage",
    "WorkerMetrics",
]


class InitConnection(Message, frozen=True, tag="InitConnection"):
    """The first message. `incarnation` is made anew at each start of an agent."""

    version: Count
    worker_id: str
    name: str
    incarnation: str
    capabilities: Capabilities


class AuthResponse(Message, frozen=True, tag="AuthResponse"):
    """A token for each challenged peer that the worker has one for."""

    tokens: dict[str, str]

    def __repr__(self) -> str:
        """Peers only: a token never reaches a log."""
        return f"AuthResponse(peers={sorted(self.tokens)})"


class ReauthRequest(Message, frozen=True, tag="ReauthRequest"):
    """The peers file changed."""


class WorkerCapabilities(Message, frozen=True, tag="WorkerCapabilities"):
    """What the host has. Sent after `InitAck` and whenever it changes."""

    architectures: list[str]
    system_features: list[str]
    max_concurrent_builds: Count
    max_concurrent_evaluations: Count
    cpu_count: Count
    ram_total_mb: Count
    build_memory: bool
    cpu_core_score: float | None = None
    zone: str | None = None
    endpoint: str | None = None


class ResumedJob(Shape, frozen=True):
    """An assignment that the worker has, with the last `seq` the server acknowledged."""

    assignment_id: str
    job_id: str
    state: ResumeState
    seq: Count
    signal_n: Count | None = None


class ResumeJobs(Message, frozen=True, tag="ResumeJobs"):
    """Everything the worker has. Always sent, even empty."""

    running: list[ResumedJob]


class WorkerMetrics(Message, frozen=True, tag="WorkerMetrics"):
    """The heartbeat. Disk speed in MiB/s, links in Mbit/s, `lateness_secs` after its time."""

    n: Count
    lateness_secs: float
    cpu_usage_pct: float | None = None
    ram_free_mb: Count | None = None
    disk_speed_mbps: float | None = None
    upload_speed_mbps: float | None = None
    download_speed_mbps: float | None = None
    build_peak_ram_mb: dict[str, Count] | None = None


class RequestJobList(Message, frozen=True, tag="RequestJobList"):
    """Asks for the window of candidates anew."""


class CandidateScore(Shape, frozen=True):
    """What this worker would have to fetch for a candidate."""

    job_id: str
    missing_count: Count
    missing_nar_size: Count
    outputs_present: bool


class CandidateScores(Message, frozen=True, tag="CandidateScores"):
    """Changed scores only. `is_final` closes the answer to one chunk or offer."""

    scores: list[CandidateScore]
    is_final: bool


class RequestJob(Message, frozen=True, tag="RequestJob"):
    """A slot of this kind is free. A level, not a credit."""

    kind: JobKind


class AssignJobResponse(Message, frozen=True, tag="AssignJobResponse"):
    """Accepts or rejects an assignment."""

    assignment_id: str
    accepted: bool
    reason: str | None = None


class JobUpdate(Message, frozen=True, tag="JobUpdate"):
    """Something happened in a job. `seq` where the update is a numbered report."""

    assignment_id: str
    update: JobUpdateKind
    seq: Count | None = None


class JobCompleted(Message, frozen=True, tag="JobCompleted"):
    """A final, numbered report: the job succeeded and everything of it is uploaded."""

    assignment_id: str
    seq: Count
    spans: list[Span]
    spans_dropped: Count


class JobFailed(Message, frozen=True, tag="JobFailed"):
    """A final, numbered report. `error` is at most 64 KiB."""

    assignment_id: str
    seq: Count
    kind: FailureKind
    error: str
    missing_paths: list[str]
    spans: list[Span]
    spans_dropped: Count
    metrics: Metrics | None = None


class ClusterSignalReport(Message, frozen=True, tag="ClusterSignal"):
    """A member's signal on its way to the server. A numbered report."""

    assignment_id: str
    seq: Count
    attempt: str
    topic: str
    payload: bytes
    to: SignalTarget | None = None


class BuildProgress(Message, frozen=True, tag="BuildProgress"):
    """At most one each second."""

    assignment_id: str
    done: Count
    total: Count


class EvalProgress(Message, frozen=True, tag="EvalProgress"):
    """At most one each second."""

    assignment_id: str
    done: Count
    total: Count


class LogChunk(Message, frozen=True, tag="LogChunk"):
    """Bulk. One zstd frame of at most 255 KiB of log; `offset` counts uncompressed bytes."""

    assignment_id: str
    offset: Count
    data: bytes


class EvalMessage(Message, frozen=True, tag="EvalMessage"):
    """For display only: `EvalResult.errors` decides."""

    assignment_id: str
    level: NoteLevel
    message: str
    source: str | None = None


class CacheQuery(Message, frozen=True, tag="CacheQuery"):
    """Which of these paths does the server hold?"""

    query_id: str
    assignment_id: str
    mode: CacheQueryMode
    paths: list[str]


class NarRequest(Message, frozen=True, tag="NarRequest"):
    """Asks for a NAR from `offset`, in bytes as they travel."""

    transfer_id: str
    assignment_id: str
    path: str
    offset: Count


class UploadRequest(Message, frozen=True, tag="UploadRequest"):
    """Asks for leave to upload a path."""

    request_id: str
    assignment_id: str
    path: str
    size_estimate: Count


class UploadChunk(Message, frozen=True, tag="UploadChunk"):
    """Bulk. `offset` in bytes as they travel."""

    request_id: str
    offset: Count
    data: bytes


class UploadFinished(Message, frozen=True, tag="UploadFinished"):
    """Bulk. Hash and size of the uncompressed NAR, and the size as it travelled."""

    request_id: str
    nar_hash: str
    nar_size: Count
    file_size: Count
    references: list[str]
    etags: list[str]


class UploadCancel(Message, frozen=True, tag="UploadCancel"):
    """The upload is given up."""

    request_id: str


class QueryKnownDerivations(Message, frozen=True, tag="QueryKnownDerivations"):
    """Which of these derivations does the server know? Prunes an evaluation's walk."""

    query_id: str
    assignment_id: str
    paths: list[str]


class ImportRequest(Message, frozen=True, tag="ImportRequest"):
    """An evaluation needs these outputs built now."""

    query_id: str
    assignment_id: str
    paths: list[str]


WorkerMessage = (
    InitConnection
    | AuthResponse
    | ReauthRequest
    | WorkerCapabilities
    | ResumeJobs
    | WorkerMetrics
    | RequestJobList
    | CandidateScores
    | RequestJob
    | AssignJobResponse
    | JobUpdate
    | JobCompleted
    | JobFailed
    | ClusterSignalReport
    | BuildProgress
    | EvalProgress
    | LogChunk
    | EvalMessage
    | CacheQuery
    | NarRequest
    | UploadRequest
    | UploadChunk
    | UploadFinished
    | UploadCancel
    | QueryKnownDerivations
    | ImportRequest
    | Draining
    | Error
    | BulkAck
    | NarAbort
    | Zstd
)

WORKER_MESSAGES: tuple[type[Message], ...] = (
    InitConnection,
    AuthResponse,
    ReauthRequest,
    WorkerCapabilities,
    ResumeJobs,
    WorkerMetrics,
    RequestJobList,
    CandidateScores,
    RequestJob,
    AssignJobResponse,
    JobUpdate,
    JobCompleted,
    JobFailed,
    ClusterSignalReport,
    BuildProgress,
    EvalProgress,
    LogChunk,
    EvalMessage,
    CacheQuery,
    NarRequest,
    UploadRequest,
    UploadChunk,
    UploadFinished,
    UploadCancel,
    QueryKnownDerivations,
    ImportRequest,
    Draining,
    Error,
    BulkAck,
    NarAbort,
    Zstd,
)
