"""One connected worker: slots, wishes, window, live figures and what it has been assigned."""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import JobKind, JobStage
from gradient_protocol.limits import MAX_WINDOW_CANDIDATES
from gradient_protocol.messages.worker import WorkerMetrics

from gradient_server.domain.plausible import (
    CAPABILITY_FIGURES,
    HEARTBEAT_FIGURES,
    MAX_CORE_SCORE,
    MAX_CPUS,
    MAX_MBPS,
    MAX_RAM_MB,
    doubted,
    plausible,
)
from gradient_server.scheduler.model import Assignment, Outbox, WorkerInfo
from gradient_server.scheduler.ram import Reserved, reserved_by
from gradient_server.scheduler.tracker import Tracked
from gradient_server.scheduler.window import Window
from gradient_server.scoring.contexts import NAN, WorkerContext, WorkerMetricsView, first_known

__all__ = ["Slots", "Worker"]


@dataclass(slots=True)
class Slots:
    """A worker's slots of one kind. Times on the monotonic clock.

    `wish` is a level: the worker has said that a slot is free, and nothing has been sent since.
    `outstanding` is the assignment that it has not answered, or that is being claimed for it. `paused`: the
    worker is drained; its wish stands.
    """

    maximum: int
    open: int = 0
    wish: bool = False
    outstanding: str | None = None
    paused: bool = False
    idle_since: float | None = None
    idle_seen: float | None = None

    @property
    def free(self) -> int:
        """Slots without an open assignment; 0 where the maximum was lowered below what runs."""
        return max(self.maximum - self.open, 0)

    @property
    def ready(self) -> bool:
        """Whether a job may be assigned now."""
        return self.wish and not self.paused and self.outstanding is None and self.open < self.maximum

    def clear_idle(self) -> None:
        """No idle slot is recorded any more."""
        self.idle_since = None
        self.idle_seen = None


def _sample(value: float | None, upper: float = math.inf) -> float:
    """A live figure as it is scored: NaN for unknown, infinite or negative."""
    if value is None or not math.isfinite(value) or value < 0:
        return NAN
    return min(float(value), upper)


def _speed(value: float | None, most: float = MAX_MBPS) -> float:
    """A speed or score: one of 0 says nothing about how long things take, nor does one beyond `most`."""
    sample = _sample(plausible(value, most))
    return sample if sample > 0 else NAN


class Worker:
    """The state of one session's worker. A new session makes a new one: identity tells them apart."""

    def __init__(self, info: WorkerInfo, outbox: Outbox) -> None:
        self.info = info
        self.outbox = outbox
        self.slots = {
            JobKind.BUILD: Slots(info.capabilities.max_concurrent_builds),
            JobKind.EVAL: Slots(info.capabilities.max_concurrent_evaluations),
        }
        self.windows = {kind: Window() for kind in JobKind}
        # Candidates that joined or left the window since the last message about it.
        self.to_offer: dict[str, Tracked] = {}
        self.to_revoke: dict[str, None] = {}
        # Members of clusters in the worker's cache of candidates.
        self.members_offered: dict[str, None] = {}
        # The answer to RequestJobList is not complete yet.
        self.list_open = False
        self.eligible: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.assigned: dict[str, Assignment] = {}
        # Job ids that are not to be assigned to this worker before a monotonic time.
        self.excluded: dict[str, float] = {}
        self._draining: str | None = None
        # How late the last heartbeat left; NaN before the first.
        self.lateness_secs = NAN
        self._live = WorkerMetricsView()
        self._measures_builds = info.capabilities.build_memory
        self.reserved = Reserved()
        # The build that the worker waits for, and the MB kept free for it.
        self._waits_for: str | None = None
        self._kept_mb = 0.0
        self._context: WorkerContext | None = None
        # Figures that were found to be impossible, so that each is told once a session.
        self._doubted: set[str] = set()

    @property
    def id(self) -> str:
        """The worker's id."""
        return self.info.id

    @property
    def draining(self) -> str | None:
        """Why the worker gets no more jobs; None where it does."""
        return self._draining

    @draining.setter
    def draining(self, reason: str | None) -> None:
        self._draining = reason
        for slots in self.slots.values():
            slots.paused = reason is not None

    @property
    def live(self) -> WorkerMetricsView:
        """The last heartbeat's figures alone, unknown before the first."""
        return self._live

    @property
    def cpu_core_score(self) -> float:
        """What the host's processor was measured at; NaN for unknown."""
        return _speed(self.info.capabilities.cpu_core_score, MAX_CORE_SCORE)

    @property
    def room_in_window(self) -> int:
        """Further candidates that the worker's cache holds, those not yet revoked counted."""
        held = sum(map(len, self.windows.values())) + len(self.to_revoke) + len(self.members_offered)
        return max(MAX_WINDOW_CANDIDATES - held, 0)

    @property
    def context(self) -> WorkerContext:
        """The worker as rules read it."""
        if self._context is None:
            self._context = self._make_context()
        return self._context

    @property
    def waits_for(self) -> str | None:
        """The job id of the build that memory is kept free for."""
        return self._waits_for

    def context_for(self, job_id: str) -> WorkerContext:
        """As rules read it of this job: what is kept free for the job itself is free."""
        if job_id != self._waits_for:
            return self.context
        metrics = replace(self.context.metrics, ram_reserved_for_waiting_build_mb=0.0)
        return replace(self.context, metrics=metrics)

    def keep_ram(self, job_id: str | None, kept_mb: float) -> None:
        """Keeps memory free for the build that the worker waits for; None and 0 end that."""
        if (job_id, kept_mb) != (self._waits_for, self._kept_mb):
            self._waits_for, self._kept_mb = job_id, kept_mb
            self._context = None

    @property
    def ram_releasable_mb(self) -> float:
        """MB that would be free if every job of ours ended: never more than the total."""
        total = _speed(self.info.capabilities.ram_total_mb, MAX_RAM_MB)
        if math.isnan(self._live.ram_free_mb):
            return total
        free = self._live.ram_free_mb + self.reserved.observed_mb
        return free if math.isnan(total) else min(free, total)

    def set_info(self, info: WorkerInfo) -> None:
        """Capabilities or projects have changed."""
        self.info = info
        self._measures_builds = info.capabilities.build_memory
        self.slots[JobKind.BUILD].maximum = info.capabilities.max_concurrent_builds
        self.slots[JobKind.EVAL].maximum = info.capabilities.max_concurrent_evaluations
        self._book_ram()

    def heartbeat(self, metrics: WorkerMetrics) -> None:
        """Takes over live figures; what is not a number is unknown."""
        total_mb = _speed(self.info.capabilities.ram_total_mb, MAX_RAM_MB)
        most_mb = first_known(total_mb, float(MAX_RAM_MB))
        peaks = metrics.build_peak_ram_mb
        self._measures_builds = peaks is not None
        for assignment_id, peak_mb in (peaks or {}).items():
            assignment = self.assigned.get(assignment_id)
            # No build has more than the whole host.
            seen = _sample(peak_mb, most_mb) if total_mb > 0 else _sample(plausible(peak_mb, MAX_RAM_MB))
            if assignment is not None and not math.isnan(seen):
                assignment.ram_observed_mb = max(assignment.ram_observed_mb or 0.0, seen)
        self.lateness_secs = _sample(metrics.lateness_secs)
        self._live = WorkerMetricsView(
            ram_free_mb=_sample(plausible(metrics.ram_free_mb, MAX_RAM_MB), most_mb),
            cpu_usage_pct=_sample(metrics.cpu_usage_pct, 100.0),
            disk_speed_mbps=_speed(metrics.disk_speed_mbps),
            upload_speed_mbps=_speed(metrics.upload_speed_mbps),
            download_speed_mbps=_speed(metrics.download_speed_mbps),
        )
        self._book_ram()

    def newly_doubted(self, metrics: WorkerMetrics | None = None) -> dict[str, float]:
        """Figures of the host, or of a heartbeat, that cannot be true and were not told before."""
        if metrics is None:
            found = doubted(self.info.capabilities, CAPABILITY_FIGURES)
        else:
            found = doubted(metrics, HEARTBEAT_FIGURES)
        news = {name: value for name, value in found.items() if name not in self._doubted}
        self._doubted.update(news)
        return news

    def assign(self, assignment: Assignment) -> None:
        """Takes a slot."""
        self.assigned[assignment.assignment_id] = assignment
        slots = self.slots[assignment.kind]
        slots.open += 1
        slots.clear_idle()
        self._book_ram()

    def release(self, assignment_id: str) -> None:
        """Gives a slot back, with its stage and memory."""
        assignment = self.assigned.pop(assignment_id)
        slots = self.slots[assignment.kind]
        slots.open -= 1
        if slots.outstanding == assignment_id:
            slots.outstanding = None
        self._book_ram()

    def stage_changed(self) -> None:
        """An assigned job entered a stage."""
        self._context = None

    def is_excluded(self, job_id: str, now: float) -> bool:
        """Whether the worker rejected this job less than 30 s ago. Forgets what has expired."""
        until = self.excluded.get(job_id)
        if until is None:
            return False
        if now >= until:
            del self.excluded[job_id]
            return False
        return True

    def forget_expired(self, now: float) -> None:
        """Drops every exclusion that has run out."""
        for job_id in [job_id for job_id, until in self.excluded.items() if now >= until]:
            del self.excluded[job_id]

    def _book_ram(self) -> None:
        jobs = ((one.ram_reserved_mb, one.ram_observed_mb) for one in self.assigned.values())
        self.reserved = reserved_by(jobs, measured=self._measures_builds)
        self._context = None

    def _make_context(self) -> WorkerContext:
        capabilities, live = self.info.capabilities, self._live
        building = sum(one.stage is JobStage.BUILD for one in self.assigned.values())
        return WorkerContext(
            architectures=frozenset(capabilities.architectures),
            system_features=frozenset(capabilities.system_features),
            fetch=self.info.can.fetch,
            metrics=WorkerMetricsView(
                cpu_count=_speed(capabilities.cpu_count, MAX_CPUS),
                cpu_core_score=self.cpu_core_score,
                ram_total_mb=_speed(capabilities.ram_total_mb, MAX_RAM_MB),
                ram_free_mb=live.ram_free_mb,
                cpu_usage_pct=live.cpu_usage_pct,
                disk_speed_mbps=live.disk_speed_mbps,
                upload_speed_mbps=live.upload_speed_mbps,
                download_speed_mbps=live.download_speed_mbps,
                running_builds=building,
                assigned_builds=sum(one.kind is JobKind.BUILD for one in self.assigned.values()),
                ram_reserved_mb=self.reserved.reserved_mb,
                ram_reserved_unused_mb=self.reserved.unused_mb,
                ram_reserved_for_waiting_build_mb=self._kept_mb,
            ),
        )
