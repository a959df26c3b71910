"""What builds use: their cgroups while they run, and the Metrics of one that ended.

Anything that could not be measured is None, never 0 (design.md, "Worker facts").
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import trio
from gradient_protocol.messages.shapes import Metrics

from gradient_worker.meters.cgroup import BuildCgroup
from gradient_worker.meters.throughput import DiskSpeed, LinkSpeed
from gradient_worker.runner.values import BuildExit, RunnerBuild
from gradient_worker.threads import Threads

__all__ = ["BuildMeters", "Speeds"]

SAMPLE_SECS: Final = 2.0
"""How often running builds are read: the anonymous part has no peak in the kernel."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The averages that a heartbeat tells (scoring.md, "Worker Speed Signals")."""

    upload: LinkSpeed = field(default_factory=LinkSpeed)
    download: LinkSpeed = field(default_factory=LinkSpeed)
    disk: DiskSpeed = field(default_factory=DiskSpeed)


class BuildMeters:
    """The cgroups of the builds of one worker. `measured`: whether builds have any."""

    def __init__(self, threads: Threads, speeds: Speeds) -> None:
        self._threads = threads
        self._speeds = speeds
        self._cgroups: dict[str, BuildCgroup] = {}
        self.measured = False

    async def run(self) -> None:
        """Sample what runs, until cancelled."""
        while True:
            await trio.sleep(SAMPLE_SECS)
            running = list(self._cgroups.values())
            if running:
                await self._threads.run(partial(_sample, running))

    def watch(self, build: RunnerBuild) -> None:
        """A build runs; its cgroup is read until `unwatch`."""
        if build.cgroups:
            self._cgroups[build.assignment_id] = BuildCgroup(build.cgroups)

    def unwatch(self, assignment_id: str) -> None:
        """The build is over."""
        self._cgroups.pop(assignment_id, None)

    def peaks_mb(self) -> Mapping[str, int] | None:
        """Peak memory of the builds that run, MiB by assignment; None where builds are not measured."""
        if not self.measured:
            return None
        peaks = {name: cgroup.peak_ram() for name, cgroup in self._cgroups.items()}
        return {name: peak.mb for name, peak in peaks.items() if peak is not None}

    def read(
        self, assignment_id: str, ended: BuildExit, *, concurrent: int, cores: int, score: float | None
    ) -> Metrics:
        """The Metrics of a build that has ended and is still watched. Reads a few files of the kernel."""
        secs = ended.ended_at - ended.started_at if ended.duration_secs is None else ended.duration_secs
        cgroup = self._cgroups.get(assignment_id)
        peak = cpu_ms = anon_mb = io_bytes = None
        if cgroup is not None:  # each of these reads
            peak, cpu_ms, io_bytes = cgroup.peak_ram(), cgroup.cpu_time_ms(), cgroup.io_bytes()
            anon_mb = cgroup.anon_peak_ram_mb()
        if io_bytes is not None:
            self._speeds.disk.add(*io_bytes, secs)
        return Metrics(
            build_time_ms=max(0, round(secs * 1000)),
            oom_killed=ended.oom_killed,
            concurrent_builds=concurrent,
            peak_ram_mb=None if peak is None else peak.mb,
            anon_peak_ram_mb=anon_mb,
            peak_source=None if peak is None else peak.source,
            cpu_time_ms=cpu_ms,
            avg_cpu_pct=cpu_ms / (secs * 10) if cpu_ms is not None and secs > 0 else None,
            disk_read_bytes=None if io_bytes is None else io_bytes[0],
            disk_write_bytes=None if io_bytes is None else io_bytes[1],
            build_cores=cores,
            cpu_core_score=score,
        )


def _sample(cgroups: list[BuildCgroup]) -> None:
    for cgroup in cgroups:
        cgroup.sample()
