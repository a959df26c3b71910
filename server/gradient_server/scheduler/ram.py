"""What the jobs of a worker hold of its memory (scoring.md, "Contexts"; policies.md, `RamNeed`)."""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from gradient_protocol.kinds import JobKind

from gradient_server.domain.job import PendingJob
from gradient_server.scoring.contexts import HistoryPrediction
from gradient_server.scoring.weights import RAM_FIT_HEADROOM

__all__ = ["NeedKind", "RamNeed", "Reserved", "reserved_by"]


class NeedKind(enum.StrEnum):
    """How the need is known."""

    PREDICTED = "predicted"
    UNMEASURED = "unmeasured"
    NEGLIGIBLE = "negligible"


@dataclass(frozen=True, slots=True)
class RamNeed:
    """MB that a job is counted with while it is assigned, and MB that must be free to start it."""

    kind: NeedKind
    reserved_mb: float
    needed_to_start_mb: float

    @classmethod
    def of(
        cls,
        job: PendingJob,
        history: HistoryPrediction,
        *,
        outputs_present: bool,
        unmeasured_mb: float,
    ) -> "RamNeed":
        """The need of one job on one worker; the columns' `needed_to_start_mb` is the same figure."""
        negligible = job.kind is JobKind.EVAL or outputs_present or job.substitute_outputs is not None
        if negligible:
            return cls(NeedKind.NEGLIGIBLE, 0.0, 0.0)
        known = [peak for peak in (history.peak_ram_mb, job.peak_ram_mb) if peak is not None]
        peaks = [float(peak) for peak in known if not math.isnan(peak)]
        if peaks:
            peak = max(peaks)
            return cls(NeedKind.PREDICTED, peak, float(math.ceil(peak * RAM_FIT_HEADROOM)))
        if job.is_fixed_output:
            return cls(NeedKind.NEGLIGIBLE, 0.0, 0.0)
        return cls(NeedKind.UNMEASURED, unmeasured_mb, unmeasured_mb)


@dataclass(frozen=True, slots=True)
class Reserved:
    """MB over the jobs of a worker: reserved, reserved but not yet used, and seen in use."""

    reserved_mb: float = 0.0
    unused_mb: float = 0.0
    observed_mb: float = 0.0


def reserved_by(jobs: Iterable[tuple[float, float | None]], *, measured: bool) -> Reserved:
    """Sums (reserved, observed) of a worker's jobs.

    Each job counts the larger of the two. Unused memory is known only of a worker that reports
    build memory; a build missing from its report has not started and counts as 0.
    """
    reserved = unused = seen = 0.0
    for need_mb, observed in jobs:
        observed_mb = observed if observed is not None else 0.0
        counted = max(need_mb, observed_mb)
        reserved += counted
        seen += observed_mb
        if measured:
            unused += counted - observed_mb
    return Reserved(reserved, unused, seen)
