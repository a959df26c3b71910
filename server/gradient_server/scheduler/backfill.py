"""Short single jobs on reserved seats (design.md, Seats and reservations; off by default).

A job fits if the 95th percentile of its build time, over its history rows, is below what is left until
the last busy seat of the reservation is expected to be free. Without history it does not.
"""

from typing import Final

from gradient_server.scheduler.tracker import Tracked
from gradient_server.scheduler.window import Window

__all__ = ["fitting"]

# How many of the fitting ones are ranked: those that have waited longest.
_LOOKED_AT: Final = 8


def fitting(window: Window, limit_secs: float) -> list[Tracked]:
    """The builds in a worker's window that fit, the one that waits longest first; at most 8."""
    # A comparison with NaN is False: unknown does not fit.
    found = [entry for entry in window.entries if entry.history.build_time_p95_ms < limit_secs * 1000.0]
    return sorted(found, key=lambda entry: (entry.job.ready_at, entry.job.job_id))[:_LOOKED_AT]
