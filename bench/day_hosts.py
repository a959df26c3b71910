"""The simulated hosts: what runs on them, how much memory it takes, and whom the kernel kills.

A build has a third of its peak from its start, and all of it after a tenth of its run. Where a host has
less than its builds take together, the largest of those at their peak is killed, as the kernel does.
"""

from dataclasses import dataclass, field
from typing import Final

from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.worker import WorkerMetrics
from gradient_server.scheduler.model import WorkerInfo
from gradient_server.scoring.weights import BUILD_CONTENTION_PER_BUILD

from bench.day_load import Host, JobClass, SimJob
from tests.fakes.scheduler import metrics, worker

__all__ = ["CORE_SCORE", "PEAK_AFTER", "Run", "SimHost"]

PEAK_AFTER: Final = 0.1
_EARLY_SHARE: Final = 0.33
# The system's own.
_BASE_MB: Final = 600
CORE_SCORE: Final = 3000.0
_LINK_BYTES_PER_SEC: Final = 100e6


@dataclass(slots=True, eq=False)
class Run:
    """One try of a job on a host."""

    job: SimJob
    assignment_id: str
    host: "SimHost"
    began_at: float
    beside: int = 0
    build_secs: float = 0.0
    at_peak: bool = False
    over: bool = False

    @property
    def taken_mb(self) -> float:
        """MB that it takes now: a build that still fetches its inputs, none."""
        if self.job.kind is not JobClass.EVALUATION and not self.build_secs:
            return 0.0
        return self.job.peak_mb * (1.0 if self.at_peak else _EARLY_SHARE)


@dataclass(slots=True, eq=False)
class SimHost:
    """A host with what runs on it."""

    spec: Host
    runs: dict[str, Run] = field(default_factory=dict)
    # Whether the last heartbeat says what is true.
    is_told: bool = False

    @property
    def info(self) -> WorkerInfo:
        """As its session knows it."""
        return worker(
            self.spec.name,
            max_concurrent_builds=self.spec.builds,
            max_concurrent_evaluations=self.spec.evaluations,
            cpu_count=self.spec.builds * 2,
            ram_total_mb=self.spec.ram_mb,
            cpu_core_score=self.spec.core_score,
        )

    def missing_bytes(self, job: SimJob) -> int:
        """What the host lacks of a job's inputs: one in three has all of them."""
        return 0 if (job.number + int(self.spec.name[1:])) % 3 == 0 else job.missing_bytes

    def fetch_secs(self, job: SimJob) -> float:
        """How long its inputs take to arrive."""
        return self.missing_bytes(job) / _LINK_BYTES_PER_SEC

    @staticmethod
    def upload_secs(job: SimJob) -> float:
        """How long its outputs take to leave."""
        return job.output_bytes / _LINK_BYTES_PER_SEC

    def builds_at(self) -> int:
        """Builds on it."""
        return sum(run.job.kind is not JobClass.EVALUATION for run in self.runs.values())

    def run_secs(self, run: Run) -> float:
        """How long the run itself takes here, beside what runs already."""
        contention = 1.0 + BUILD_CONTENTION_PER_BUILD * run.beside
        return run.job.run_secs * CORE_SCORE / self.spec.core_score * contention

    def free_mb(self) -> float:
        """What is left of the memory; below 0 somebody dies."""
        return self.spec.ram_mb - _BASE_MB - sum(run.taken_mb for run in self.runs.values())

    def victim(self) -> Run | None:
        """Whom the kernel kills now."""
        if self.free_mb() >= 0.0:
            return None
        return max(self.runs.values(), key=lambda run: (run.taken_mb, run.job.number))

    def peaks_mb(self) -> dict[str, int]:
        """What each build was seen with, as its cgroup tells."""
        return {one: int(run.taken_mb) for one, run in self.runs.items() if run.build_secs}

    def heartbeat(self) -> WorkerMetrics:
        """The host's figures, with each build's peak so far."""
        return metrics(
            cpu_usage_pct=min(100.0, 15.0 * len(self.runs)),
            ram_free_mb=max(int(self.free_mb()), 0),
            upload_speed_mbps=_LINK_BYTES_PER_SEC * 8 / 1e6,
            download_speed_mbps=_LINK_BYTES_PER_SEC * 8 / 1e6,
            build_peak_ram_mb=self.peaks_mb(),
        )

    def slot_free(self, kind: JobKind) -> bool:
        """Whether it would ask for a job of the kind."""
        builds = self.builds_at()
        if kind is JobKind.BUILD:
            return builds < self.spec.builds
        return len(self.runs) - builds < self.spec.evaluations
