"""A hard no before any ranking, with its reason.

What a job requires is interned: jobs with the same requirement share one id, and each worker keeps
one flag for each of them, so that a decision over all pending jobs is one look-up by array.
"""

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import EvalStep, JobKind

from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.model import WorkerInfo

__all__ = ["Refusal", "RefusalCode", "Requirement", "Requirements", "refusal"]

IMPLIED_SYSTEMS = frozenset({"any", "builtin"})
_UNUSED_KEPT = 256


class RefusalCode(enum.StrEnum):
    """Why a worker can never take a job as it is now."""

    PROJECT = "project"
    SYSTEM = "system"
    FEATURES = "features"
    CAPABILITY = "capability"
    NO_SLOTS = "no-slots"
    RAM = "ram"
    DRAINING = "draining"
    BUSY = "busy"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A no, and the words for people."""

    code: RefusalCode
    text: str


@dataclass(frozen=True, slots=True)
class Requirement:
    """All of a job that decides which workers can take it."""

    kind: JobKind
    system: str
    features: frozenset[str]
    projects: tuple[str, ...]
    steps: frozenset[EvalStep]

    @classmethod
    def of(cls, job: PendingJob) -> "Requirement":
        """The requirement of a job."""
        return cls(job.kind, job.system, job.features, job.projects, frozenset(job.steps))


def refusal(requirement: Requirement, worker: WorkerInfo) -> Refusal | None:
    """The first reason why this worker cannot take such a job; None if it can."""
    if worker.projects is not None and worker.projects.isdisjoint(requirement.projects):
        return Refusal(RefusalCode.PROJECT, "is not registered for the job's project")
    return _incapable(requirement, worker) or _wrong_host(requirement, worker)


def _incapable(requirement: Requirement, worker: WorkerInfo) -> Refusal | None:
    if requirement.kind is JobKind.BUILD:
        slots = worker.capabilities.max_concurrent_builds
        missing = None if worker.can.build else "does not build"
    else:
        slots = worker.capabilities.max_concurrent_evaluations
        missing = _eval_incapable(requirement.steps, worker)
    if missing is not None:
        return Refusal(RefusalCode.CAPABILITY, missing)
    if slots <= 0:
        return Refusal(RefusalCode.NO_SLOTS, f"has no slots for {requirement.kind.value.lower()} jobs")
    return None


def _eval_incapable(steps: frozenset[EvalStep], worker: WorkerInfo) -> str | None:
    if EvalStep.FETCH in steps:
        # One that fetches only may take the first half of a split job.
        return None if worker.can.fetch else "does not fetch sources"
    return None if worker.can.eval else "does not evaluate"


def _wrong_host(requirement: Requirement, worker: WorkerInfo) -> Refusal | None:
    system = requirement.system
    if requirement.kind is JobKind.BUILD and system not in IMPLIED_SYSTEMS:
        architectures = worker.capabilities.architectures
        if system not in architectures:
            has = ", ".join(architectures) or "none"
            return Refusal(RefusalCode.SYSTEM, f"is not {system} (has {has})")
    lacking = requirement.features.difference(worker.capabilities.system_features)
    if lacking:
        features = "the feature" if len(lacking) == 1 else "the features"
        return Refusal(RefusalCode.FEATURES, f"lacks {features} {', '.join(sorted(lacking))}")
    return None


class Requirements:
    """Interned requirements with small ids, counted; at most 256 that nobody uses are kept."""

    def __init__(self) -> None:
        self._ids: dict[Requirement, int] = {}
        self._by_id: list[Requirement | None] = []
        self._uses: list[int] = []
        self._unused: dict[int, None] = {}
        self._free: list[int] = []
        # Ids that are new since the pool last looked.
        self.fresh: list[int] = []

    def __len__(self) -> int:
        """Every id is below this."""
        return len(self._by_id)

    def acquire(self, requirement: Requirement) -> int:
        """The id of the requirement, counted once more."""
        known = self._ids.get(requirement)
        if known is None:
            known = self._add(requirement)
        self._uses[known] += 1
        self._unused.pop(known, None)
        return known

    def release(self, requirement_id: int) -> None:
        """One job less has this requirement."""
        self._uses[requirement_id] -= 1
        if self._uses[requirement_id] == 0:
            self._unused[requirement_id] = None
            if len(self._unused) > _UNUSED_KEPT:
                self._forget(next(iter(self._unused)))

    def get(self, requirement_id: int) -> Requirement:
        """The requirement of an id in use."""
        requirement = self._by_id[requirement_id]
        if requirement is None:
            raise LookupError(requirement_id)
        return requirement

    def known(self) -> list[tuple[int, Requirement]]:
        """Every requirement that is interned, with its id."""
        return [(known, requirement) for requirement, known in self._ids.items()]

    def flags_for(self, worker: WorkerInfo) -> npt.NDArray[np.bool_]:
        """For each id, whether the worker can take such jobs; room for ids to come."""
        flags = np.zeros(max(16, 2 * len(self._by_id)), np.bool_)
        for known, requirement in self.known():
            flags[known] = refusal(requirement, worker) is None
        return flags

    def _add(self, requirement: Requirement) -> int:
        if self._free:
            new = self._free.pop()
            self._by_id[new] = requirement
        else:
            new = len(self._by_id)
            self._by_id.append(requirement)
            self._uses.append(0)
        self._ids[requirement] = new
        self.fresh.append(new)
        return new

    def _forget(self, requirement_id: int) -> None:
        requirement = self.get(requirement_id)
        del self._unused[requirement_id], self._ids[requirement]
        self._by_id[requirement_id] = None
        self._free.append(requirement_id)
