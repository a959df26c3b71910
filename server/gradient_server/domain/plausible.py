"""What a worker's figures may be at most; beyond it they are a mistake or a lie, and count as unknown.

Each is far above any real host, so that a generous one is never cut, and low enough that a mean over
an hour of them still means something.
"""

import math
from typing import Final

__all__ = [
    "MAX_BYTES",
    "MAX_CORE_SCORE",
    "MAX_CPU_PCT",
    "MAX_MBPS",
    "MAX_PATHS",
    "MAX_RAM_MB",
    "MAX_TIME_MS",
    "plausible",
]

MAX_RAM_MB: Final = 1 << 26  # 64 TiB
MAX_TIME_MS: Final = 366 * 86_400_000
MAX_BYTES: Final = 10**14
MAX_PATHS: Final = 10**7
MAX_MBPS: Final = 1e6
MAX_CPU_PCT: Final = 1e6
MAX_CORE_SCORE: Final = 1e7


def plausible(value: float | None, most: float) -> float | None:
    """The value if it is a number from 0 to `most`, else None."""
    if value is None or not math.isfinite(value) or not 0 <= value <= most:
        return None
    return value
