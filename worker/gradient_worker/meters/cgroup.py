"""Memory, processor time, disk traffic and out-of-memory kills of a build, from its cgroup.

The only user of cgroupspy: its typed file interfaces, on nodes that are given by path (design.md,
"Worker facts"). What it has no interface for (all of v2, `blkio.throttle`) is added here on its base.
A value that cannot be read is None, never 0; a file that has vanished keeps its last value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cgroupspy.controllers import Controller, CpuAcctController, MemoryController
from cgroupspy.interfaces import BaseFileInterface, DictFile, IntegerFile
from cgroupspy.nodes import Node
from gradient_protocol.kinds import PeakSource

from gradient_worker.runner import cgroups

__all__ = ["BuildCgroup", "DelegatedCgroup", "PeakReading", "Probe", "own_memory_limit_mb", "probe"]

T = TypeVar("T")

_MIB = 1 << 20
_ANCESTORS_MAX = 16
_UNLIMITED_BYTES = 1 << 60
"""v1 says "no limit" with a number close to 2^63, rounded to pages."""


if TYPE_CHECKING:  # generic in our stubs only
    _BytesOrNone = BaseFileInterface[int | None]
    _ReadAndWritten = BaseFileInterface[tuple[int, int]]
else:
    _BytesOrNone = _ReadAndWritten = BaseFileInterface


class _LimitFile(_BytesOrNone):
    """Bytes, None for `max`: cgroupspy's own IntegerFile raises on the word."""

    def sanitize_get(self, value: str) -> int | None:
        return None if value == "max" else int(value)


class _IoStatFile(_ReadAndWritten):
    """v2 `io.stat`, a line a device with `rbytes=` and `wbytes=`: (bytes read, bytes written)."""

    def sanitize_get(self, value: str) -> tuple[int, int]:
        fields = [field.partition("=") for line in value.splitlines() for field in line.split()[1:]]
        read = sum(int(number) for name, _, number in fields if name == "rbytes")
        written = sum(int(number) for name, _, number in fields if name == "wbytes")
        return read, written


class _ServiceBytesFile(_ReadAndWritten):
    """v1 `blkio.throttle.io_service_bytes`, lines `8:0 Read 123`: (bytes read, bytes written)."""

    def sanitize_get(self, value: str) -> tuple[int, int]:
        rows = [line.split() for line in value.splitlines()]
        read = sum(int(row[2]) for row in rows if len(row) == 3 and row[1] == "Read")
        written = sum(int(row[2]) for row in rows if len(row) == 3 and row[1] == "Write")
        return read, written


class _MemoryV1(MemoryController):
    """cgroupspy's, which has all that is needed."""


class _MemoryV2(Controller):
    current = IntegerFile("memory.current", readonly=True)
    peak = IntegerFile("memory.peak", readonly=True)
    limit = _LimitFile("memory.max", readonly=True)
    stat = DictFile("memory.stat", readonly=True)
    events = DictFile("memory.events", readonly=True)


class _CpuV2(Controller):
    stat = DictFile("cpu.stat", readonly=True)


class _IoV2(Controller):
    stat = _IoStatFile("io.stat", readonly=True)


class _BlockIoV1(Controller):
    service_bytes = _ServiceBytesFile("blkio.throttle.io_service_bytes", readonly=True)


@dataclass(frozen=True, slots=True)
class PeakReading:
    """A peak of memory in MiB, rounded up, and how it was obtained."""

    mb: int
    source: PeakSource


class BuildCgroup:
    """The meter of one build. Make it when the build starts, and read it while its cgroup exists.

    `hierarchies`: as `RunnerBuild.cgroups`, hierarchy (`unified`, `memory`, `blkio`, `cpuacct`) to
    directory. Call `sample` every few seconds: the anonymous part has no peak in the kernel, and on old
    v2 kernels memory has none at all.
    """

    def __init__(self, hierarchies: Mapping[str, Path]) -> None:
        nodes = {name: Node(str(path)) for name, path in hierarchies.items()}
        unified = nodes.get("unified")
        self._memory_v1 = _MemoryV1(nodes["memory"]) if "memory" in nodes else None
        self._memory_v2 = _MemoryV2(unified) if unified is not None and self._memory_v1 is None else None
        self._cpu_v2 = _CpuV2(unified) if unified is not None else None
        self._cpu_v1 = CpuAcctController(nodes["cpuacct"]) if "cpuacct" in nodes else None
        self._io_v2 = _IoV2(unified) if self._memory_v2 is not None and unified is not None else None
        self._io_v1 = _BlockIoV1(nodes["blkio"]) if "blkio" in nodes else None
        self._above = _ancestors(hierarchies.get("memory") or hierarchies.get("unified"))
        self._limit_hits_before = self._limit_hits_above()
        self._peak: PeakReading | None = None
        self._sampled_bytes: int | None = None
        self._anon_bytes: int | None = None
        self._cpu_time_ms: int | None = None
        self._io_bytes: tuple[int, int] | None = None
        self._oom_kills: int | None = None

    def sample(self) -> None:
        """Reads everything once."""
        self.peak_ram()
        self.anon_peak_ram_mb()
        self.cpu_time_ms()
        self.io_bytes()
        self.oom_kills()

    def peak_ram(self) -> PeakReading | None:
        """The peak with page cache: the kernel's, else the highest sample; None if it cannot be known."""
        kernel_bytes = _some(_try(self._kernel_peak_bytes))
        if kernel_bytes is not None:
            source = PeakSource.CAPPED if self._was_limited() else PeakSource.PEAK
            self._peak = PeakReading(_mib(kernel_bytes), source)
        elif self._peak is None or self._peak.source is PeakSource.SAMPLED:
            self._sampled_bytes = _larger(self._sampled_bytes, _some(_try(self._current_bytes)))
            if self._sampled_bytes is not None:
                self._peak = PeakReading(_mib(self._sampled_bytes), PeakSource.SAMPLED)
        return self._peak

    def ram_mb(self) -> int | None:
        """Memory in use now, with page cache, MiB; None once the cgroup has gone."""
        current = _try(self._current_bytes)
        return None if current is None else _mib(current)

    def anon_peak_ram_mb(self) -> int | None:
        """The highest sample of anonymous memory, MiB: what the build itself held, without page cache."""
        self._anon_bytes = _larger(self._anon_bytes, _some(_try(self._current_anon_bytes)))
        return None if self._anon_bytes is None else _mib(self._anon_bytes)

    def cpu_time_ms(self) -> int | None:
        """User and system time of all processes, also those that have ended."""
        self._cpu_time_ms = _larger(self._cpu_time_ms, _try(self._current_cpu_time_ms))
        return self._cpu_time_ms

    def io_bytes(self) -> tuple[int, int] | None:
        """Bytes read from and written to disks."""
        self._io_bytes = _try(self._current_io_bytes) or self._io_bytes
        return self._io_bytes

    def oom_kills(self) -> int | None:
        """Processes killed for want of memory."""
        self._oom_kills = _larger(self._oom_kills, _try(self._current_oom_kills))
        return self._oom_kills

    def _kernel_peak_bytes(self) -> int | None:
        if self._memory_v1 is not None:
            return self._memory_v1.max_usage_in_bytes
        return self._memory_v2.peak if self._memory_v2 is not None else None

    def _current_bytes(self) -> int | None:
        if self._memory_v1 is not None:
            return self._memory_v1.usage_in_bytes
        return self._memory_v2.current if self._memory_v2 is not None else None

    def _current_anon_bytes(self) -> int | None:
        if self._memory_v1 is not None:
            return self._memory_v1.stat.get("total_rss")
        return self._memory_v2.stat.get("anon") if self._memory_v2 is not None else None

    def _current_cpu_time_ms(self) -> int | None:
        if self._cpu_v2 is not None:
            usec = self._cpu_v2.stat.get("usage_usec")
            return None if usec is None else usec // 1000
        if self._cpu_v1 is not None:
            nsec = self._cpu_v1.usage
            return None if nsec is None else nsec // 1_000_000
        return None

    def _current_io_bytes(self) -> tuple[int, int] | None:
        if self._io_v2 is not None:
            return self._io_v2.stat
        return self._io_v1.service_bytes if self._io_v1 is not None else None

    def _current_oom_kills(self) -> int | None:
        if self._memory_v1 is not None:
            control = self._memory_v1.oom_control
            return control.get("oom_kill") if isinstance(control, dict) else None
        return self._memory_v2.events.get("oom_kill") if self._memory_v2 is not None else None

    def _was_limited(self) -> bool:
        """Whether the build ran into a limit, its own or one above: its peak then is what it was given."""
        own = _try(self._own_limit_hits) or 0
        return own > 0 or self._limit_hits_above() > self._limit_hits_before

    def _own_limit_hits(self) -> int | None:
        if self._memory_v1 is not None:
            return self._memory_v1.failcnt
        return self._memory_v2.events.get("max") if self._memory_v2 is not None else None

    def _limit_hits_above(self) -> int:
        v1 = self._memory_v1 is not None
        return sum(_try(partial(_limit_hits, path, v1=v1)) or 0 for path in self._above)


@dataclass(frozen=True, slots=True)
class DelegatedCgroup:
    """Where builds can have cgroups: hierarchy to directory."""

    hierarchies: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Probe:
    """What `doctor` says: where builds get cgroups (None: nowhere), and one line why."""

    delegated: DelegatedCgroup | None
    reason: str


def probe(setting: str = "auto") -> Probe:
    """Looks where builds would have their cgroups, from this process's place, and changes nothing.

    `setting`: `auto`, `off` or a path (operations.md, `worker.build.cgroup`). A runner that is there knows
    better: `RunnerClient.info`.
    """
    mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    systemd = Path("/run/systemd/system").is_dir()
    group, reason = cgroups.discover(setting, mountinfo, own, under_systemd=systemd)
    if not group:
        return Probe(None, reason)
    return Probe(DelegatedCgroup({name: Path(path) for name, path in group.items()}), reason)


def own_memory_limit_mb(mountinfo: str | None = None, own: str | None = None) -> int | None:
    """The tightest memory limit of this process's own cgroup and those above, MiB; None without one."""
    mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8") if mountinfo is None else mountinfo
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8") if own is None else own
    place = cgroups.own_group(mountinfo, own)
    name = "memory" if "memory" in place else "unified"
    if name not in place:
        return None
    path = Path(place[name])
    limits = [_try(partial(_limit_bytes, at, v1=name == "memory")) for at in (path, *_ancestors(path))]
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES]
    return min(known) // _MIB if known else None


def _limit_bytes(path: Path, *, v1: bool) -> int | None:
    node = Node(str(path))
    return _MemoryV1(node).limit_in_bytes if v1 else _MemoryV2(node).limit


def _limit_hits(path: Path, *, v1: bool) -> int | None:
    group = _group_above(path, v1=v1)
    return group.failcnt if isinstance(group, _MemoryV1) else group.events.get("max")


@lru_cache(maxsize=_ANCESTORS_MAX)  # each is read twice a build
def _group_above(path: Path, *, v1: bool) -> _MemoryV1 | _MemoryV2:
    node = Node(str(path))
    return _MemoryV1(node) if v1 else _MemoryV2(node)


def _ancestors(path: Path | None) -> list[Path]:
    """The groups above, up to the mount."""
    return [] if path is None else _with_those_above(path.parent)


@lru_cache(maxsize=8)  # the group that all builds of a worker are in
def _with_those_above(path: Path) -> list[Path]:
    """Those that have processes of their own to list."""
    above = [group for group in (path, *path.parents) if (group / "cgroup.procs").exists()]
    return above[:_ANCESTORS_MAX]


def _try(read: Callable[[], T | None]) -> T | None:
    """A reading, None where the file is gone, never was, or cannot be read."""
    try:
        return read()
    except (OSError, ValueError):
        return None


def _some(count: int | None) -> int | None:
    """No process lives on no memory: a nought was read before the first joined, or after the last left."""
    return count or None


def _larger(before: int | None, now: int | None) -> int | None:
    if before is None or now is None:
        return now if before is None else before
    return max(before, now)


def _mib(count: int) -> int:
    return -(-count // _MIB)
