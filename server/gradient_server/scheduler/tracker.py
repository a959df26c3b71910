"""Every job that could start, by kind, as columns that are kept in step.

A table's rows are dense: the last row takes the place of one that leaves, so adding and removing
cost the same however many wait. Jobs that must not start yet (`not_before`) and members of clusters
are tracked apart and are no candidates.
"""

import heapq
import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.server import Candidate

from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.eligibility import Requirement, Requirements
from gradient_server.scoring.columns import Field, Flags, Vector, field_values, history_values
from gradient_server.scoring.contexts import HistoryPrediction
from gradient_server.scoring.weights import RESCORE_MAX_ROUNDS

__all__ = ["NO_HISTORY", "JobTable", "JobTracker", "Tracked"]

NO_HISTORY = HistoryPrediction()
_FIRST_CAPACITY = 64
_encoder = msgspec.msgpack.Encoder()


class Tracked:
    """One candidate: its row, who was offered it, and its encoding, made once."""

    __slots__ = ("_encoded", "history", "job", "offered_to", "requirement_id", "row")

    def __init__(self, job: PendingJob, history: HistoryPrediction, row: int, requirement_id: int) -> None:
        self.job = job
        self.history = history
        self.row = row
        self.requirement_id = requirement_id
        self.offered_to: dict[str, None] = {}
        self._encoded: msgspec.Raw | None = None

    @property
    def encoded(self) -> msgspec.Raw:
        """The job as a wire `Candidate`, encoded."""
        if self._encoded is None:
            job = self.job
            candidate = Candidate(
                job_id=job.job_id,
                kind=job.kind,
                required_paths=list(job.required_paths),
                output_paths=list(job.output_paths),
                drv_path=job.drv_path,
            )
            self._encoded = msgspec.Raw(_encoder.encode(candidate))
        return self._encoded


class JobTable:
    """The candidates of one kind. `matrix` is (len(Field), capacity), `len(self)` of it in use."""

    def __init__(self, kind: JobKind, requirements: Requirements) -> None:
        self.kind = kind
        self._requirements = requirements
        self._rows: list[Tracked] = []
        self._by_id: dict[str, Tracked] = {}
        self._matrix: Vector = np.empty((len(Field), _FIRST_CAPACITY))
        self._requirement_ids: npt.NDArray[np.intp] = np.zeros(_FIRST_CAPACITY, np.intp)
        self._offer_counts: npt.NDArray[np.intp] = np.zeros(_FIRST_CAPACITY, np.intp)
        # RAM that a worker must exceed after an out-of-memory kill; NaN for none.
        self._ram_over_mb: Vector = np.full(_FIRST_CAPACITY, np.nan)
        self.ram_bound_jobs = 0
        # Jobs whose history is being loaded: they are offered, and not yet assigned.
        self._unpredicted: Flags = np.zeros(_FIRST_CAPACITY, np.bool_)
        self.unpredicted_jobs = 0
        # Jobs that have waited enough rounds to be assigned unscored.
        self.ripe_jobs = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._rows)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._by_id

    def get(self, job_id: str) -> Tracked | None:
        """The candidate of this id."""
        return self._by_id.get(job_id)

    def at(self, row: int) -> Tracked:
        """The candidate in this row."""
        return self._rows[row]

    @property
    def matrix(self) -> Vector:
        """The rows in use as (len(Field), n); a view."""
        return self._matrix[:, : len(self._rows)]

    @property
    def requirement_ids(self) -> npt.NDArray[np.intp]:
        """The requirement of each row; a view."""
        return self._requirement_ids[: len(self._rows)]

    @property
    def offer_counts(self) -> npt.NDArray[np.intp]:
        """In how many windows each row is; a view."""
        return self._offer_counts[: len(self._rows)]

    @property
    def ripe(self) -> Flags:
        """The rows that have waited enough rounds to be assigned unscored; a copy."""
        flags: Flags = self.matrix[Field.RESCORE_COUNT] >= RESCORE_MAX_ROUNDS
        return flags

    @property
    def ram_over_mb(self) -> Vector:
        """RAM that a worker must exceed, NaN for none; a view."""
        return self._ram_over_mb[: len(self._rows)]

    @property
    def unpredicted(self) -> Flags:
        """The rows whose history is being loaded; a view."""
        return self._unpredicted[: len(self._rows)]

    def add(self, job: PendingJob, history: HistoryPrediction | None = NO_HISTORY) -> Tracked:
        """Adds a job that is not there yet. `history` None: it is being loaded."""
        if job.job_id in self._by_id:
            raise ValueError(f"{job.job_id} is tracked already")
        row = len(self._rows)
        if row == self._matrix.shape[1]:
            self._grow()
        requirement_id = self._requirements.acquire(Requirement.of(job))
        self._unpredicted[row] = history is None
        self.unpredicted_jobs += history is None
        history = NO_HISTORY if history is None else history
        tracked = Tracked(job, history, row, requirement_id)
        self._rows.append(tracked)
        self._by_id[job.job_id] = tracked
        self._matrix[:, row] = field_values(job, history)
        self._requirement_ids[row] = requirement_id
        self._offer_counts[row] = 0
        bound = job.needs_ram_over_mb
        self._ram_over_mb[row] = np.nan if bound is None else bound
        self.ram_bound_jobs += bound is not None
        return tracked

    def remove(self, job_id: str) -> Tracked | None:
        """Takes a job out; the last row moves into its place."""
        tracked = self._by_id.pop(job_id, None)
        if tracked is None:
            return None
        row, last = tracked.row, len(self._rows) - 1
        is_ripe = bool(self._matrix[Field.RESCORE_COUNT, row] >= RESCORE_MAX_ROUNDS)
        self.unpredicted_jobs -= bool(self._unpredicted[row])
        moved = self._rows.pop()
        if row != last:
            self._rows[row] = moved
            moved.row = row
            self._unpredicted[row] = self._unpredicted[last]
            self._matrix[:, row] = self._matrix[:, last]
            self._requirement_ids[row] = self._requirement_ids[last]
            self._offer_counts[row] = self._offer_counts[last]
            self._ram_over_mb[row] = self._ram_over_mb[last]
        self._requirements.release(tracked.requirement_id)
        self.ripe_jobs -= is_ripe
        self.ram_bound_jobs -= tracked.job.needs_ram_over_mb is not None
        tracked.row = -1
        return tracked

    def offered(self, tracked: Tracked, worker_id: str) -> None:
        """The candidate is in this worker's window now."""
        tracked.offered_to[worker_id] = None
        self._offer_counts[tracked.row] = len(tracked.offered_to)

    def withdrawn(self, tracked: Tracked, worker_id: str) -> None:
        """The worker's window is gone, and the candidate is not."""
        tracked.offered_to.pop(worker_id, None)
        self._offer_counts[tracked.row] = len(tracked.offered_to)

    def bump_rescore(self) -> None:
        """One more tick of the assignment timer has passed for every candidate."""
        self.matrix[Field.RESCORE_COUNT] += 1.0
        self.ripe_jobs = int(np.count_nonzero(self.ripe))

    def set_history(self, job_id: str, history: HistoryPrediction) -> bool:
        """Swaps in a fresh prediction; everything else of the row stays. True: the job waited for it."""
        tracked = self._by_id.get(job_id)
        if tracked is None:
            return False
        waited = bool(self._unpredicted[tracked.row])
        self._unpredicted[tracked.row] = False
        self.unpredicted_jobs -= waited
        tracked.history = history
        history_rows = slice(Field.HISTORY_PEAK_RAM_MB, Field.HISTORY_SAMPLES + 1)
        self._matrix[history_rows, tracked.row] = history_values(history)
        return waited

    def _grow(self) -> None:
        size = self._matrix.shape[1]
        matrix = np.empty((len(Field), 2 * size))
        matrix[:, :size] = self._matrix
        self._matrix = matrix
        self._requirement_ids = np.concatenate([self._requirement_ids, np.zeros(size, np.intp)])
        self._offer_counts = np.concatenate([self._offer_counts, np.zeros(size, np.intp)])
        self._ram_over_mb = np.concatenate([self._ram_over_mb, np.full(size, np.nan)])
        self._unpredicted = np.concatenate([self._unpredicted, np.zeros(size, np.bool_)])


class JobTracker:
    """All pending jobs: candidates by kind, those held back until their time, members of clusters."""

    def __init__(self) -> None:
        self.requirements = Requirements()
        self.tables = {kind: JobTable(kind, self.requirements) for kind in JobKind}
        self._not_yet: dict[str, PendingJob] = {}
        self._due: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self.members: dict[str, PendingJob] = {}

    def __len__(self) -> int:
        return sum(map(len, self.tables.values())) + len(self._not_yet) + len(self.members)

    def __contains__(self, job_id: str) -> bool:
        return self.get(job_id) is not None

    def get(self, job_id: str) -> PendingJob | None:
        """The pending job of this id, candidate or not."""
        candidate = self.candidate(job_id)
        if candidate is not None:
            return candidate.job
        return self._not_yet.get(job_id) or self.members.get(job_id)

    def candidate(self, job_id: str) -> Tracked | None:
        """The job of this id, if it can be assigned now."""
        for table in self.tables.values():
            tracked = table.get(job_id)
            if tracked is not None:
                return tracked
        return None

    def add(
        self, job: PendingJob, now: float, history: HistoryPrediction | None = NO_HISTORY
    ) -> Tracked | None:
        """Tracks a job that is not tracked yet. None: it is no candidate now. `now` is wall time.

        `history` None: it is being loaded.
        """
        if job.job_id in self:
            raise ValueError(f"{job.job_id} is tracked already")
        if job.cluster is not None:
            self.members[job.job_id] = job
            return None
        if job.not_before is not None and job.not_before > now:
            self._not_yet[job.job_id] = job
            heapq.heappush(self._due, (job.not_before, next(self._order), job.job_id))
            return None
        return self.tables[job.kind].add(job, history)

    def remove(self, job_id: str) -> Tracked | None:
        """Forgets a job. What was a candidate is returned, with those it was offered to."""
        self._not_yet.pop(job_id, None)
        self.members.pop(job_id, None)
        for table in self.tables.values():
            tracked = table.remove(job_id)
            if tracked is not None:
                return tracked
        return None

    def held_back(self, job_id: str) -> PendingJob | None:
        """The job, if it waits for its `not_before`."""
        return self._not_yet.get(job_id)

    @property
    def held_back_count(self) -> int:
        """How many jobs wait for their `not_before`."""
        return len(self._not_yet)

    def next_due(self) -> float | None:
        """The wall time at which the next job that is held back can start."""
        while self._due:
            at, _, job_id = self._due[0]
            job = self._not_yet.get(job_id)
            if job is not None and job.not_before == at:
                return at
            heapq.heappop(self._due)
        return None

    def take_due(self, now: float) -> list[PendingJob]:
        """Takes out the jobs whose time has come; the caller adds them again."""
        taken: list[PendingJob] = []
        while (at := self.next_due()) is not None and at <= now:
            _, _, job_id = heapq.heappop(self._due)
            taken.append(self._not_yet.pop(job_id))
        return taken
