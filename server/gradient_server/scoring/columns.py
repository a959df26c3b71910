"""The jobs' side of a decision as columns (scoring.md, "Contexts"; design.md, "Scoring is columnar").

A `JobBlock` holds what is the same for every worker, one row of the matrix a field, one column of
it a job: a field of all jobs is contiguous, and a choice of jobs is one `take`. `JobColumns` adds
what one worker reported, and is what rules read. Unknown is NaN.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import EvalStep, JobKind

from gradient_server.domain.job import PendingJob
from gradient_server.scoring.contexts import NAN, HistoryPrediction

__all__ = [
    "Field",
    "Flags",
    "JobColumns",
    "Points",
    "Rows",
    "Vector",
    "at",
    "field_values",
    "filled",
    "history_values",
]

Vector: TypeAlias = npt.NDArray[np.float64]
"""One float64 for each candidate: points, or a context field (NaN unknown)."""

Points: TypeAlias = Vector | float
"""A vector, or one number that holds for every candidate."""

Flags: TypeAlias = npt.NDArray[np.bool_]
"""One bool for each candidate."""

Rows: TypeAlias = npt.NDArray[np.intp]
"""Positions of some candidates."""

T = TypeVar("T")

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
        *history_values(past),
        NAN,
        NAN,
    ]


def history_values(history: HistoryPrediction) -> tuple[float, ...]:
    """A prediction as a part of a column, from HISTORY_PEAK_RAM_MB to HISTORY_SAMPLES."""
    return (
        history.peak_ram_mb,
        history.cpu_time_ms,
        history.build_time_ms,
        history.disk_bytes,
        history.output_nar_size,
        history.oom_rate,
        history.uncontended_build_time_ms,
        history.cpu_core_score,
        float(history.samples),
    )


def at(values: Points, index: int) -> float:
    """One candidate's value."""
    return values if isinstance(values, float) else float(values[index])


def filled(values: Vector, fallback: float) -> tuple[Points, Flags]:
    """`values` with `fallback` for what is unknown, and what was; a number where nothing is known."""
    unknown: Flags = np.isnan(values)
    count = np.count_nonzero(unknown)
    if not count:
        return values, unknown
    if count == len(unknown):
        return fallback, unknown
    return np.where(unknown, fallback, values), unknown


class once(Generic[T]):  # noqa: N801 - a decorator, read as one
    """A property that is worked out at its first reading; `functools.cached_property` takes a lock."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        self._work = work
        self._name = work.__name__
        self.__doc__ = work.__doc__

    def __get__(self, owner: object, _type: type) -> T:
        """The value, which from now on is an attribute of its owner."""
        value = self._work(owner)
        owner.__dict__[self._name] = value
        return value


class JobColumns:
    """The candidates of one decision, as rules read them: n jobs, every vector of length n.

    `matrix` is (len(Field), n). `missing_count`, `missing_nar_size` (bytes) and `outputs_present`
    are the asking worker's scores; NaN (and False) where it reported none. `now` is wall time.

    A queue is mostly of one sort, so what is the same for all (every one a build, nothing present)
    is found once and spares the rules their case by case.
    """

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
        # What rules share within one decision, by name; for one worker and one instance.
        self.memo: dict[str, object] = {}

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

    @once
    def is_build(self) -> Flags:
        """Builds, as opposed to evaluations."""
        return self.flag(Field.IS_BUILD)

    @once
    def all_builds(self) -> bool:
        """Whether there is no evaluation among them."""
        return bool(np.count_nonzero(self.is_build) == len(self))

    @once
    def any_build(self) -> bool:
        """Whether there is a build among them."""
        return self.all_builds or bool(np.count_nonzero(self.is_build))

    @once
    def any_present(self) -> bool:
        """Whether the worker holds every output of one of them."""
        return bool(np.count_nonzero(self.outputs_present))

    @once
    def present(self) -> Rows | None:
        """Where the worker holds every output; None for nowhere."""
        return np.flatnonzero(self.outputs_present) if self.any_present else None

    @once
    def evaluations(self) -> Rows | None:
        """Where there is no build; None for nowhere."""
        return None if self.all_builds else np.flatnonzero(~self.is_build)

    @once
    def substituted(self) -> Flags | None:
        """Builds whose outputs are fetched and not built; None for none."""
        flags: Flags = ~np.isnan(self.matrix[Field.SUBSTITUTE_OUTPUTS])
        return flags & self.is_build if np.count_nonzero(flags) else None

    @once
    def built(self) -> Flags | None:
        """Builds that will really run; None for all."""
        if self.all_builds and not self.any_present and self.substituted is None:
            return None
        flags: Flags = self.is_build & ~self.outputs_present
        return flags if self.substituted is None else flags & ~self.substituted

    @once
    def unbuilt(self) -> Rows | None:
        """Where no build will run: evaluations, substitutions, what is there; None for nowhere."""
        if self.all_builds and self.substituted is None:
            return self.present
        return None if self.built is None else np.flatnonzero(~self.built)

    @once
    def unrun(self) -> Rows | None:
        """Where nothing will run: builds that are not `built`, and what is there; None for nowhere."""
        if self.all_builds or self.built is None:
            return self.unbuilt
        return np.flatnonzero(~self.built & (self.is_build | self.outputs_present))

    def without(self, rows: Rows | None, values: Points, value: float = 0.0) -> Points:
        """`values`, which are written to, with `value` at these rows; None for no row.

        The rows are few as a rule, and to write to a few costs a tenth of a choice for each candidate.
        """
        if rows is None:
            return values
        changed = np.full(len(self), values) if isinstance(values, float) else values
        changed[rows] = value
        return changed

    def history(self, name: Field) -> Vector:
        """A field of the build history: unknown where the worker holds every output. Not to be written to.

        Such a worker will build nothing (scoring.md, `build_history`).
        """
        if self.present is None:
            return self.field(name)
        values: Vector = self.matrix[name].copy()
        values[self.present] = NAN
        return values

    @once
    def output_bytes(self) -> Vector:
        """Bytes to upload: the job's own outputs where all are known, else the history's mean."""
        own = self.field(Field.OUTPUT_SIZE)
        unknown = np.isnan(own)
        count = np.count_nonzero(unknown)
        if not count:
            return own
        past = self.history(Field.HISTORY_OUTPUT_NAR_SIZE)
        return past if count == len(own) else np.where(unknown, past, own)

    @once
    def predicted_peak_ram_mb(self) -> Vector:
        """The larger of the history's p95 and the peak kept on the build itself."""
        past = self.history(Field.HISTORY_PEAK_RAM_MB)
        if np.count_nonzero(np.isnan(self.field(Field.BUILD_PEAK_RAM_MB))) == len(past):
            return past
        larger: Vector = np.fmax(past, self.history(Field.BUILD_PEAK_RAM_MB))
        return larger
