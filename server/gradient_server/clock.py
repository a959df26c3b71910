"""The two clocks of the server, passed in wherever time matters.

Deadlines run on the monotonic clock; what is stored or shown is wall time.
"""

import time
from typing import Protocol

import trio

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Wall time for what is stored, monotonic time for deadlines, both in seconds."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never steps: trio's own, so that a mock clock drives it too."""
        ...


class SystemClock:
    """The machine's clocks. Made inside a trio run."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds on trio's clock."""
        return trio.current_time()
