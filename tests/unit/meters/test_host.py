"""The host's figures: unknown is None, and what is told fits together."""

from pathlib import Path

import psutil
import pytest
from gradient_worker.meters import host
from gradient_worker.meters.host import Cpu, CpuMeter


def test_processor_usage_needs_two_readings() -> None:
    meter = CpuMeter()
    assert meter.usage_pct(Cpu(100, 1000)) is None
    assert meter.usage_pct(Cpu(125, 1100)) == 25
    assert meter.usage_pct(Cpu(125, 1100)) is None  # no time has passed
    assert meter.usage_pct(Cpu(250, 1200)) == 100  # counters are not read at one instant


def test_the_real_counters_are_seconds_of_all_processors() -> None:
    now = host.read_cpu()
    assert 0 < now.busy_secs < now.all_secs


@pytest.mark.parametrize(
    ("total_mb", "own_builds_mb", "available_mb", "free_mb"),
    [(1000, 0, 700, 700), (1000, 600, 700, 400), (500, 0, 700, 500), (500, 600, 700, 0)],
)
def test_free_memory_is_capped_by_what_own_builds_leave(
    total_mb: int, own_builds_mb: int, available_mb: int, free_mb: int
) -> None:
    assert host.ram_free_mb(total_mb, own_builds_mb, available_mb) == free_mb


def test_total_memory_is_the_hosts_or_less_or_as_configured() -> None:
    assert 0 < host.ram_total_mb() <= psutil.virtual_memory().total >> 20
    assert host.ram_total_mb(123) == 123


@pytest.mark.parametrize(
    ("machine", "systems"),
    [
        ("x86_64", ["x86_64-linux", "i686-linux"]),
        ("AMD64", ["x86_64-linux", "i686-linux"]),
        ("arm64", ["aarch64-linux"]),
        ("riscv64", ["riscv64-linux"]),
    ],
)
def test_architectures(machine: str, systems: list[str]) -> None:
    assert host.architectures(machine) == systems


def test_kvm_is_a_feature_where_it_can_be_used(tmp_path: Path) -> None:
    device = tmp_path / "kvm"
    assert "kvm" not in host.system_features(device)
    device.touch()
    assert "kvm" in host.system_features(device)
