"""The jobs' side of a decision as columns (scoring.md, "Contexts"; design.md, "Scoring is columnar").

A `JobBlock` holds what is the same for every worker, one row of the matrix a field, one column of
it a job: a field of all jobs is contiguous, and a choice of jobs is one `take`. `JobColumns` adds
what one worker reported, and is what rules read. Unknown is NaN.
"""

import enum
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import EvalStep, JobKind

from gradient_server.domain.job import PendingJob
from gradient_server.scoring.contexts import NAN, HistoryPrediction

__all__ = ["Field", "Flags", "JobColumns", "Vector", "field_values"]

Vector: TypeAlias = npt.NDArray[np.float64]
"""One float64 for each candidate: points, or a context field (NaN unknown)."""

Flags: TypeAlias = npt.NDArray[np.bool_]
"""One bool for each candidate."""

BUILTIN_SYSTEM = "builtin"


class Field(enum.IntEnum):
    """The rows of a block's matrix. Flags are 0 or 1; times in seconds since the epoch."""

    IS_BUILD = 0
    CACHED_EVAL = 1
    BUILTIN = 2
    PREFER_LOCAL_BUILD = 3
    IS_FIXED_OUTPUT = 4
    CLOSURE_SIZE = 5
    DEPENDENCY_COUNT = 6
    QUEUED_AT = 7
    READY_AT = 8
    PROJECT_WORK_SHARE = 9
    PRIORITIZED = 10
    BUILD_REQUEST = 11
    IFD = 12
    RESCORE_COUNT = 13
    SUBSTITUTE_OUTPUTS = 14
    OUTPUT_SIZE = 15
    BUILD_PEAK_RAM_MB = 16
    HISTORY_PEAK_RAM_MB = 17
    HISTORY_CPU_TIME_MS = 18
    HISTORY_BUILD_TIME_MS = 19
    HISTORY_DISK_BYTES = 20
    HISTORY_OUTPUT_NAR_SIZE = 21
    HISTORY_OOM_RATE = 22
    HISTORY_UNCONTENDED_MS = 23
    HISTORY_CORE_SCORE = 24
    HISTORY_SAMPLES = 25
    # The largest connected worker that may take the job: its total RAM, and what it would have
    # free with every reservation released. NaN: none, or not known of one of them.
    POOL_RAM_TOTAL_MB = 26
    POOL_RAM_RELEASABLE_MB = 27


def _known(value: float | None) -> float:
    return NAN if value is None else float(value)


def field_values(job: PendingJob, history: HistoryPrediction | None = None) -> list[float]:
    """A job as one column of the matrix, in the order of `Field`."""
    past = history if history is not None else HistoryPrediction()
    is_build = job.kind is JobKind.BUILD
    return [
        float(is_build),
        float(not is_build and EvalStep.FETCH not in job.steps),
        float(job.system == BUILTIN_SYSTEM),
        float(job.prefer_local_build),
        float(job.is_fixed_output),
        _known(job.closure_size),
        _known(job.dependency_count),
        job.queued_at,
        job.ready_at,
        NAN,
        float(job.prioritized),
        float(job.build_request),
        float(job.ifd),
        0.0,
        _known(job.substitute_outputs),
        _known(job.output_size),
        _known(job.peak_ram_mb),
        past.peak_ram_mb,
        past.cpu_time_ms,
        past.build_time_ms,
        past.disk_bytes,
        past.output_nar_size,
        past.oom_rate,
        past.uncontended_build_time_ms,
        past.cpu_core_score,
        float(past.samples),
        NAN,
        NAN,
    ]


class JobColumns:
    """The candidates of one decision, as rules read them: n jobs, every vector of length n.

    `matrix` is (len(Field), n). `missing_count`, `missing_nar_size` (bytes) and `outputs_present`
    are the asking worker's scores; NaN (and False) where it reported none. `now` is wall time.
    """

    __slots__ = ("_memo", "matrix", "missing_count", "missing_nar_size", "now", "outputs_present")

    def __init__(
        self,
        matrix: Vector,
        *,
        now: float,
        missing_count: Vector | None = None,
        missing_nar_size: Vector | None = None,
        outputs_present: Flags | None = None,
    ) -> None:
        size = matrix.shape[1]
        self.matrix = matrix
        self.now = now
        self.missing_count = np.full(size, NAN) if missing_count is None else missing_count
        self.missing_nar_size = np.full(size, NAN) if missing_nar_size is None else missing_nar_size
        self.outputs_present = np.zeros(size, np.bool_) if outputs_present is None else outputs_present
        self._memo: dict[str, object] = {}

    @classmethod
    def of(
        cls,
        jobs: Sequence[PendingJob],
        *,
        now: float,
        histories: Sequence[HistoryPrediction | None] | None = None,
    ) -> "JobColumns":
        """Columns of these jobs, unscored. A job alone is a batch of one."""
        past = histories if histories is not None else [None] * len(jobs)
        rows = [field_values(job, history) for job, history in zip(jobs, past, strict=True)]
        matrix = np.array(rows, np.float64).reshape(len(jobs), len(Field)).T
        return cls(np.ascontiguousarray(matrix), now=now)

    def __len__(self) -> int:
        return int(self.matrix.shape[1])

    def field(self, name: Field) -> Vector:
        """One context field of all candidates; not to be written to."""
        row: Vector = self.matrix[name]
        return row

    def flag(self, name: Field) -> Flags:
        """A flag of all candidates."""
        flags: Flags = self.matrix[name] > 0.0
        return flags

    @property
    def is_build(self) -> Flags:
        """Builds, as opposed to evaluations."""
        return self.flag(Field.IS_BUILD)

    def history(self, name: Field) -> Vector:
        """A field of the build history: unknown where the worker holds every output.

        Such a worker will build nothing (scoring.md, `build_history`).
        """
        return np.where(self.outputs_present, NAN, self.matrix[name])

    @property
    def output_bytes(self) -> Vector:
        """Bytes to upload: the job's own outputs where all are known, else the history's mean."""
        own = self.matrix[Field.OUTPUT_SIZE]
        return np.where(np.isnan(own), self.history(Field.HISTORY_OUTPUT_NAR_SIZE), own)

    @property
    def predicted_peak_ram_mb(self) -> Vector:
        """The larger of the history's p95 and the peak kept on the build itself."""
        return np.fmax(self.history(Field.HISTORY_PEAK_RAM_MB), self.history(Field.BUILD_PEAK_RAM_MB))

    @property
    def memo(self) -> dict[str, object]:
        """What rules share within one decision, by name; for one worker and one instance."""
        return self._memo
