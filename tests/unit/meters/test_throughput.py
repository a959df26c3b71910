"""Speeds as scoring.md defines them."""

import pytest
from gradient_worker.meters.throughput import DiskSpeed, LinkSpeed

MIB = 1 << 20


def test_a_link_is_unknown_until_its_first_batch_and_then_a_moving_average() -> None:
    link = LinkSpeed()
    assert link.mbps is None
    link.add(10_000_000, 1.0)
    assert link.mbps == pytest.approx(80)
    link.add(20_000_000, 1.0)
    assert link.mbps == pytest.approx(0.3 * 160 + 0.7 * 80)


@pytest.mark.parametrize(("nar_bytes", "secs"), [(MIB - 1, 1.0), (MIB, 0.0), (0, 1.0)])
def test_what_would_measure_the_connection_stays_out(nar_bytes: int, secs: float) -> None:
    link = LinkSpeed()
    link.add(nar_bytes, secs)
    assert link.mbps is None
    link.add(MIB, 1.0)
    assert link.mbps == pytest.approx(MIB * 8 / 1e6)


def test_the_disk_counts_both_directions_in_mib() -> None:
    disk = DiskSpeed()
    assert disk.mib_per_sec is None
    disk.add(3 * MIB, MIB, 2.0)
    assert disk.mib_per_sec == pytest.approx(2)
    disk.add(0, 0, 2.0)  # a build that moved nothing is a measurement
    assert disk.mib_per_sec == pytest.approx(1.4)
    disk.add(MIB, MIB, 0.0)
    assert disk.mib_per_sec == pytest.approx(1.4)
