"""Meters on recorded file trees: what the kernel's files look like, on v1, on v2, old and new."""

import json
from pathlib import Path

import pytest
from gradient_protocol.kinds import PeakSource
from gradient_worker.meters.cgroup import BuildCgroup, PeakReading, own_memory_limit_mb

MIB = 1 << 20


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.procs").touch()
    for name, text in files.items():
        prefix, _, rest = name.partition("_")
        (directory / f"{prefix}.{rest}").write_text(text)
    return directory


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    top = write(
        tmp_path / "unit", memory_events="low 0\nhigh 0\nmax 3\noom 0\noom_kill 0\noom_group_kill 0\n"
    )
    return write(
        top / "nix-build@x",
        memory_peak=f"{300 * MIB + 1}\n",
        memory_current=f"{200 * MIB}\n",
        memory_max="max\n",
        memory_stat=f"anon {120 * MIB}\nfile {80 * MIB}\nkernel 4096\n",
        memory_events="low 0\nhigh 0\nmax 0\noom 0\noom_kill 2\noom_group_kill 0\n",
        cpu_stat="usage_usec 1234567\nuser_usec 1000000\nsystem_usec 234567\ncore_sched.force_idle_usec 0\n",
        io_stat="259:0 rbytes=1000 wbytes=2000 rios=1 wios=1 dbytes=0 dios=0\n8:0 rbytes=24 wbytes=48\n7:0\n",
    )


def test_v2(v2: Path) -> None:
    meter = BuildCgroup({"unified": v2})
    assert meter.peak_ram() == PeakReading(301, PeakSource.PEAK)
    assert meter.anon_peak_ram_mb() == 120
    assert meter.cpu_time_ms() == 1234
    assert meter.io_bytes() == (1024, 2048)
    assert meter.oom_kills() == 2


CLOUD_KERNEL = json.loads(Path(__file__).with_name("cgroup_v2_linux_6_1.json").read_text())


def test_what_a_cloud_kernel_has_recorded(tmp_path: Path) -> None:
    """One build that took 96 MiB and was there to be read, and one that was killed at its limit of 48."""
    seen = {}
    for name in ("roomy", "tight"):
        for file, text in CLOUD_KERNEL[name].items():
            (tmp_path / file).write_text(text)
        meter = BuildCgroup({"unified": tmp_path})
        seen[name] = (meter.peak_ram(), meter.anon_peak_ram_mb(), meter.cpu_time_ms(), meter.oom_kills())
        assert meter.io_bytes() == (0, 0)
    assert seen["roomy"] == (PeakReading(97, PeakSource.PEAK), 97, 1656, 0)
    assert seen["tight"] == (PeakReading(48, PeakSource.CAPPED), None, 730, 1)


@pytest.mark.parametrize("file", ["memory.peak", "memory.current", "memory.stat"])
def test_an_empty_cgroup_has_no_peak(v2: Path, file: str) -> None:
    """A nought is what is read before a build joined, and is never a row of its history."""
    (v2 / "memory.peak").unlink()
    for name, text in {"memory.current": "0\n", "memory.stat": "anon 0\n", file: "0\n"}.items():
        (v2 / name).write_text("anon 0\n" if name == "memory.stat" else text)
    meter = BuildCgroup({"unified": v2})
    assert (meter.peak_ram(), meter.anon_peak_ram_mb()) == (None, None)


def test_a_vanished_cgroup_keeps_its_last_values_and_peaks_only_grow(v2: Path) -> None:
    meter = BuildCgroup({"unified": v2})
    meter.sample()
    (v2 / "memory.stat").write_text(f"anon {MIB}\n")
    assert meter.anon_peak_ram_mb() == 120
    for file in v2.iterdir():
        file.unlink()
    v2.rmdir()
    meter.sample()
    assert meter.peak_ram() == PeakReading(301, PeakSource.PEAK)
    assert (meter.cpu_time_ms(), meter.io_bytes(), meter.oom_kills()) == (1234, (1024, 2048), 2)


def test_without_memory_peak_the_highest_sample_counts_and_says_so(v2: Path) -> None:
    (v2 / "memory.peak").unlink()
    meter = BuildCgroup({"unified": v2})
    for mb in (50, 90, 70):
        (v2 / "memory.current").write_text(f"{mb * MIB}\n")
        meter.sample()
    assert meter.peak_ram() == PeakReading(90, PeakSource.SAMPLED)


def test_what_cannot_be_read_is_unknown_and_never_nought(tmp_path: Path) -> None:
    for hierarchies in ({}, {"unified": write(tmp_path / "x")}, {"memory": write(tmp_path / "y")}):
        meter = BuildCgroup(hierarchies)
        meter.sample()
        assert meter.peak_ram() is None
        assert meter.anon_peak_ram_mb() is None
        assert meter.cpu_time_ms() is None
        assert meter.io_bytes() is None
        assert meter.oom_kills() is None


def test_a_peak_at_a_limit_is_marked_as_capped_whoever_set_the_limit(v2: Path) -> None:
    meter = BuildCgroup({"unified": v2})
    peak = meter.peak_ram()
    assert peak is not None
    assert peak.source is PeakSource.PEAK  # the unit met its limit before this build
    (v2.parent / "memory.events").write_text("max 4\noom_kill 0\n")
    peak = meter.peak_ram()
    assert peak is not None
    assert peak.source is PeakSource.CAPPED


def test_v1_in_separate_hierarchies(tmp_path: Path) -> None:
    memory = write(
        tmp_path / "memory/b",
        memory_max_usage_in_bytes=f"{64 * MIB}\n",
        memory_usage_in_bytes="4096\n",
        memory_failcnt="0\n",
        memory_stat=f"cache 0\nrss 4096\ntotal_rss {10 * MIB}\n",
        memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    )
    cpuacct = write(tmp_path / "cpuacct/b", cpuacct_usage="2500000000\n")
    blkio = write(tmp_path / "blkio/b")
    (blkio / "blkio.throttle.io_service_bytes").write_text(
        "8:0 Read 100\n8:0 Write 50\n8:0 Sync 150\n8:0 Total 150\n9:0 Read 1\n9:0 Write 2\nTotal 153\n"
    )
    meter = BuildCgroup({"memory": memory, "cpuacct": cpuacct, "blkio": blkio})
    assert meter.peak_ram() == PeakReading(64, PeakSource.PEAK)
    assert meter.anon_peak_ram_mb() == 10
    assert meter.cpu_time_ms() == 2500
    assert meter.io_bytes() == (101, 52)
    assert meter.oom_kills() == 1
    (memory / "memory.failcnt").write_text("5\n")
    assert meter.peak_ram() == PeakReading(64, PeakSource.CAPPED)


def test_the_tightest_limit_above_this_process_counts(tmp_path: Path) -> None:
    top = write(tmp_path / "a", memory_max=f"{512 * MIB}\n")
    write(top / "b", memory_max="max\n")
    mountinfo = f"25 30 0:22 / {tmp_path} rw shared:4 - cgroup2 cgroup2 rw\n"
    assert own_memory_limit_mb(mountinfo, "0::/a/b\n") == 512
    (top / "memory.max").write_text("max\n")
    assert own_memory_limit_mb(mountinfo, "0::/a/b\n") is None
    assert own_memory_limit_mb("", "0::/a/b\n") is None


def test_no_limit_on_v1_is_a_huge_number(tmp_path: Path) -> None:
    memory = write(tmp_path / "memory/a", memory_limit_in_bytes="9223372036854771712\n")
    mountinfo = f"40 30 0:35 / {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
    assert own_memory_limit_mb(mountinfo, "7:memory:/a\n") is None
    (memory / "memory.limit_in_bytes").write_text(f"{100 * MIB}\n")
    assert own_memory_limit_mb(mountinfo, "7:memory:/a\n") == 100
