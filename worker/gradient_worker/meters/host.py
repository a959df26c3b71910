"""The host as a heartbeat tells it, and what it can run."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from gradient_worker.meters.cgroup import own_memory_limit_mb

__all__ = [
    "Cpu",
    "CpuMeter",
    "architectures",
    "cpu_count",
    "ram_free_mb",
    "ram_total_mb",
    "read_cpu",
    "system_features",
]

_MIB = 1 << 20
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64", "i386": "i686"}
_ALSO_RUNS = {"x86_64": ("i686",)}
_FEATURES = ("benchmark", "big-parallel", "nixos-test")


@dataclass(frozen=True, slots=True)
class Cpu:
    """Seconds since boot over all processors: busy, and altogether."""

    busy_secs: float
    all_secs: float


def read_cpu() -> Cpu:
    """The counters now. Time stolen by a hypervisor and time waiting for disks count as not busy."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    # Guests' time is within user and nice.
    whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return Cpu(whole - idle, whole)


class CpuMeter:
    """How busy the processors were since the last reading."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: Cpu | None = None

    def usage_pct(self, now: Cpu | None = None) -> float | None:
        """Per cent of all processors since the last call; None at the first and when no time has passed."""
        now = read_cpu() if now is None else now
        last, self._last = self._last, now
        if last is None or now.all_secs <= last.all_secs:
            return None
        busy = (now.busy_secs - last.busy_secs) / (now.all_secs - last.all_secs)
        return min(100.0, max(0.0, 100.0 * busy))


def cpu_count() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def ram_total_mb(configured_mb: int | None = None) -> int:
    """MiB of memory for builds: MemTotal, capped by the cgroup's limit; a configured value goes first."""
    if configured_mb is not None:
        return configured_mb
    total_mb = int(psutil.virtual_memory().total) // _MIB
    limit_mb = own_memory_limit_mb()
    return total_mb if limit_mb is None else min(total_mb, limit_mb)


def ram_free_mb(total_mb: int, own_builds_mb: int, available_mb: int | None = None) -> int:
    """MemAvailable, capped by the total less the memory of our own builds (policies.md). MiB, never below 0.

    The cap makes a configured or a cgroup's total count, of which MemAvailable knows nothing.
    """
    if available_mb is None:
        available_mb = int(psutil.virtual_memory().available) // _MIB
    return max(0, min(available_mb, total_mb - own_builds_mb))


def architectures(machine: str | None = None) -> list[str]:
    """System names that this host runs natively, its own first: `x86_64-linux`, `i686-linux`."""
    name = (machine if machine is not None else platform.machine()).lower()
    name = _MACHINES.get(name, name)
    return [f"{each}-linux" for each in (name, *_ALSO_RUNS.get(name, ()))]


def system_features(kvm: Path = Path("/dev/kvm")) -> list[str]:
    """Features that Nix gives a host by default; `kvm` only where it can be used."""
    return [*_FEATURES, "kvm"] if os.access(kvm, os.R_OK | os.W_OK) else list(_FEATURES)
