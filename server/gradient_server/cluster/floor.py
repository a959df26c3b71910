"""The connected workers as columns, as the planner reads them. Kept in step by the runner.

A worker keeps its column for as long as it is connected. Which workers can take a job at all is kept
for each requirement, and what they reported of a member's missing bytes for each member.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import JobKind

from gradient_server.cluster.planner import Flags, Vector, Zones
from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.eligibility import Requirement, refusal
from gradient_server.scheduler.model import WorkerInfo

__all__ = ["Floor"]

_FIRST_CAPACITY: Final = 16
_REQUIREMENTS_KEPT: Final = 256


class Floor:
    """Columns. Every array that is handed out is (capacity,); a column without a worker is never able."""

    def __init__(self) -> None:
        self._ids: list[str | None] = [None] * _FIRST_CAPACITY
        self._infos: dict[str, WorkerInfo] = {}
        self._columns: dict[str, int] = {}
        self._zone_codes: dict[str | None, int] = {None: 0}
        self._zone_of: npt.NDArray[np.intp] = np.zeros(_FIRST_CAPACITY, np.intp)
        self._zones: Zones | None = None
        self._takes_jobs: Flags = np.zeros(_FIRST_CAPACITY, np.bool_)
        self._ram_total_mb: Vector = np.full(_FIRST_CAPACITY, np.nan)
        self._able: OrderedDict[Requirement, Flags] = OrderedDict()
        self._missing: dict[str, Vector] = {}

    def __len__(self) -> int:
        """How many workers are connected."""
        return len(self._columns)

    def __contains__(self, worker_id: str) -> bool:
        """Whether the worker is connected."""
        return worker_id in self._columns

    # Workers

    def connect(self, info: WorkerInfo) -> None:
        """A worker's session is live; or what it can do has changed."""
        column = self._columns.get(info.id)
        if column is None:
            if len(self._columns) == len(self._ids):
                self._grow()
            column = self._ids.index(None)
            self._ids[column] = info.id
            self._columns[info.id] = column
            self._takes_jobs[column] = True
        self._infos[info.id] = info
        zone = info.capabilities.zone
        self._zone_of[column] = self._zone_codes.setdefault(zone, len(self._zone_codes))
        self._ram_total_mb[column] = info.capabilities.ram_total_mb or np.nan
        self._zones = None
        for requirement, flags in self._able.items():
            flags[column] = refusal(requirement, info) is None

    def disconnect(self, worker_id: str) -> None:
        """Its session ended."""
        column = self._columns.pop(worker_id, None)
        if column is None:
            return
        self._ids[column] = None
        del self._infos[worker_id]
        self._takes_jobs[column] = False
        self._ram_total_mb[column] = np.nan
        self._zones = None
        for flags in self._able.values():
            flags[column] = False
        for missing in self._missing.values():
            missing[column] = np.nan

    def take_jobs(self, worker_id: str, *, takes: bool) -> None:
        """Whether the worker gets jobs: not while it drains."""
        column = self._columns.get(worker_id)
        if column is not None:
            self._takes_jobs[column] = takes

    def worker_at(self, column: int) -> str:
        """The worker of a column. LookupError if there is none."""
        worker_id = self._ids[column]
        if worker_id is None:
            raise LookupError(column)
        return worker_id

    def workers(self) -> list[str]:
        """Every connected worker."""
        return list(self._columns)

    def info(self, worker_id: str) -> WorkerInfo:
        """What is known of a connected worker."""
        return self._infos[worker_id]

    def column(self, worker_id: str) -> int:
        """The column of a connected worker."""
        return self._columns[worker_id]

    def flags(self, worker_ids: Iterable[str]) -> Flags:
        """A flag for each of these workers that is connected."""
        flags: Flags = np.zeros(len(self._ids), np.bool_)
        flags[[self._columns[worker] for worker in worker_ids if worker in self._columns]] = True
        return flags

    def idle(self, slots: Iterable[tuple[str, JobKind]]) -> dict[JobKind, Flags]:
        """The idle slots by kind."""
        found = {kind: np.zeros(len(self._ids), np.bool_) for kind in JobKind}
        for worker_id, kind in slots:
            column = self._columns.get(worker_id)
            if column is not None:
                found[kind][column] = True
        return found

    @property
    def zones(self) -> Zones:
        """The connected workers' columns by zone."""
        if self._zones is None:
            connected = np.array([worker is not None for worker in self._ids])
            self._zones = Zones.of(np.where(connected, self._zone_of, -1))
        return self._zones

    def zone_name(self, code: int) -> str | None:
        """The zone of a code; None for the workers without one, and for no zone."""
        return next((name for name, known in self._zone_codes.items() if known == code), None)

    # Members

    def able(self, job: PendingJob, pin: str | None) -> Flags:
        """Which workers could take this member, idle or not."""
        able = self._of_requirement(Requirement.of(job)) & self._takes_jobs
        if pin is not None:
            able &= self._pinned(pin)
        bound_mb = job.needs_ram_over_mb
        if bound_mb is not None:
            # After an out-of-memory kill: more RAM than then, while a worker with more is here.
            more = able & (self._ram_total_mb > bound_mb)
            able = more if more.any() else able
        return able

    def missing_bytes(self, job: PendingJob) -> Vector:
        """What each worker would have to fetch; where unknown, all that the job needs."""
        everything = float(sum(path.nar_size or 0 for path in job.required_paths))
        reported = self._missing.get(job.job_id)
        if reported is None:
            return np.full(len(self._ids), everything)
        return np.where(np.isnan(reported), everything, reported)

    def reported_bytes(self, job_key: str, worker_id: str) -> int | None:
        """What the worker reported of a member; None if nothing."""
        reported = self._missing.get(job_key)
        column = self._columns.get(worker_id)
        if reported is None or column is None or np.isnan(reported[column]):
            return None
        return int(reported[column])

    def score(self, worker_id: str, job_key: str, missing_bytes: int) -> None:
        """A worker scored a member under its own key."""
        column = self._columns.get(worker_id)
        if column is None:
            return
        reported = self._missing.get(job_key)
        if reported is None:
            reported = self._missing[job_key] = np.full(len(self._ids), np.nan)
        reported[column] = max(missing_bytes, 0)

    def forget_scores(self, job_key: str) -> None:
        """The member does not wait any more."""
        self._missing.pop(job_key, None)

    def _of_requirement(self, requirement: Requirement) -> Flags:
        flags = self._able.get(requirement)
        if flags is None:
            flags = np.zeros(len(self._ids), np.bool_)
            for worker_id, column in self._columns.items():
                flags[column] = refusal(requirement, self._infos[worker_id]) is None
            self._able[requirement] = flags
            if len(self._able) > _REQUIREMENTS_KEPT:
                self._able.popitem(last=False)
        else:
            self._able.move_to_end(requirement)
        return flags

    def _pinned(self, pin: str) -> Flags:
        return self.flags(
            worker_id for worker_id, info in self._infos.items() if pin in (worker_id, info.name)
        )

    def _grow(self) -> None:
        size = len(self._ids)
        self._ids += [None] * size
        self._zone_of = np.concatenate([self._zone_of, np.zeros(size, np.intp)])
        self._takes_jobs = np.concatenate([self._takes_jobs, np.zeros(size, np.bool_)])
        self._ram_total_mb = np.concatenate([self._ram_total_mb, np.full(size, np.nan)])
        self._able = OrderedDict(
            (requirement, np.concatenate([flags, np.zeros(size, np.bool_)]))
            for requirement, flags in self._able.items()
        )
        self._missing = {
            job_key: np.concatenate([missing, np.full(size, np.nan)])
            for job_key, missing in self._missing.items()
        }
        self._zones = None
