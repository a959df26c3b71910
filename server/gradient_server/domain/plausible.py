"""What a worker's figures may be at most; beyond it they are a mistake or a lie, and count as unknown.

Each is far above any real host, so that a generous one is never cut, and low enough that a mean over
an hour of them still means something.
"""

import math
from collections.abc import Mapping
from typing import Final

__all__ = [
    "CAPABILITY_FIGURES",
    "HEARTBEAT_FIGURES",
    "MAX_BYTES",
    "MAX_CORE_SCORE",
    "MAX_CPUS",
    "MAX_CPU_PCT",
    "MAX_MBPS",
    "MAX_PATHS",
    "MAX_RAM_MB",
    "MAX_TIME_MS",
    "doubted",
    "plausible",
    "plausible_peak_mb",
]

MAX_RAM_MB: Final = 1 << 26  # 64 TiB
MAX_TIME_MS: Final = 366 * 86_400_000
MAX_BYTES: Final = 10**14
MAX_PATHS: Final = 10**7
MAX_MBPS: Final = 1e6
MAX_CPU_PCT: Final = 1e6
MAX_CORE_SCORE: Final = 1e7
MAX_CPUS: Final = 1 << 16

# What a worker says of itself, by field, and what each figure may be at most.
CAPABILITY_FIGURES: Final = {
    "cpu_count": MAX_CPUS,
    "ram_total_mb": MAX_RAM_MB,
    "cpu_core_score": MAX_CORE_SCORE,
}
HEARTBEAT_FIGURES: Final = {
    "lateness_secs": 86_400.0,
    "cpu_usage_pct": MAX_CPU_PCT,
    "ram_free_mb": MAX_RAM_MB,
    "disk_speed_mbps": MAX_MBPS,
    "upload_speed_mbps": MAX_MBPS,
    "download_speed_mbps": MAX_MBPS,
}


def plausible(value: float | None, most: float) -> float | None:
    """The value if it is a number from 0 to `most`, else None."""
    if value is None or not math.isfinite(value) or not 0 <= value <= most:
        return None
    return value


def plausible_peak_mb(peak_ram_mb: int | None) -> int | None:
    """The peak (MiB) if a build may have had it, else None."""
    return None if plausible(peak_ram_mb, MAX_RAM_MB) is None else peak_ram_mb


def doubted(told: object, figures: Mapping[str, float]) -> dict[str, float]:
    """The fields of `told` that cannot be true, with their values; what it did not say is left out."""
    values = {name: getattr(told, name) for name in figures}
    return {
        name: value
        for name, value in values.items()
        if value is not None and plausible(value, figures[name]) is None
    }
