"""The closed sets of words on the wire. Each is spelled as it travels."""

import enum

__all__ = [
    "CacheQueryMode",
    "Compression",
    "EvalStage",
    "EvalStep",
    "FailureKind",
    "JobKind",
    "JobStage",
    "NoteLevel",
    "PeakSource",
    "ResumeState",
    "SpanKind",
    "UploadOutcome",
]


class JobKind(enum.StrEnum):
    """The two kinds of job, each with slots of its own at a worker."""

    EVAL = "Eval"
    BUILD = "Build"


class EvalStep(enum.StrEnum):
    """What one evaluation job is to do: both, or one half of a split job."""

    FETCH = "Fetch"
    EVALUATE = "Evaluate"


class JobStage(enum.StrEnum):
    """Where a build job is (scoring.md, Build Stages)."""

    PREFETCH = "Prefetch"
    BUILD = "Build"
    UPLOAD = "Upload"


class EvalStage(enum.StrEnum):
    """Where an evaluation job is."""

    FETCHING = "Fetching"
    EVALUATING_FLAKE = "EvaluatingFlake"
    EVALUATING_DERIVATIONS = "EvaluatingDerivations"


class FailureKind(enum.StrEnum):
    """Why a job failed, which decides what the server does next (protocol.md, Failure kinds)."""

    TRANSIENT = "Transient"
    PERMANENT = "Permanent"
    TIMEOUT = "Timeout"
    OUT_OF_MEMORY = "OutOfMemory"
    INPUTS_UNAVAILABLE = "InputsUnavailable"
    SUBSTITUTE_UNAVAILABLE = "SubstituteUnavailable"
    ABORTED = "Aborted"
    CANCELED = "Canceled"


class SpanKind(enum.StrEnum):
    """The measured parts of a job (protocol.md, Spans and metrics)."""

    FETCH = "Fetch"
    EVALUATION = "Evaluation"
    KNOWN_DERIVATIONS_WAIT = "KnownDerivationsWait"
    IMPORT_WAIT = "ImportWait"
    CACHE_QUERY_WAIT = "CacheQueryWait"
    PREFETCH = "Prefetch"
    NAR_FETCH = "NarFetch"
    SUBSTITUTE_FETCH = "SubstituteFetch"
    DOWNLOAD = "Download"
    BUILD = "Build"
    COMPRESS = "Compress"
    UPLOAD_WAIT = "UploadWait"
    NAR_PUSH = "NarPush"


class PeakSource(enum.StrEnum):
    """How a peak of memory was obtained: the kernel's own peak, one cut by a limit, or samples."""

    PEAK = "peak"
    CAPPED = "capped"
    SAMPLED = "sampled"


class ResumeState(enum.StrEnum):
    """What an assignment that a worker lists in `ResumeJobs` is doing."""

    HELD = "held"
    RUNNING = "running"
    DONE = "done"


class CacheQueryMode(enum.StrEnum):
    """Normal: held or not. Pull: with where from. Push: which of these to upload."""

    NORMAL = "Normal"
    PULL = "Pull"
    PUSH = "Push"


class UploadOutcome(enum.StrEnum):
    """How the server answered a finished upload."""

    OK = "Ok"
    RETRY = "Retry"
    REJECTED = "Rejected"


class Compression(enum.StrEnum):
    """How a NAR travels."""

    NONE = "none"
    ZSTD = "zstd"


class NoteLevel(enum.StrEnum):
    """The weight of a message from an evaluator."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
