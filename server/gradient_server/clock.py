"""The two clocks of the server, passed in wherever time matters.

Deadlines run on the monotonic clock; what is stored or shown is wall time. Deadlines that outlive the
process (a backoff, a lease, an abort that waits for its confirmation) are stored as wall time and
compared with it. So the server's wall time does not step with the host's: it starts from it and goes
on at its own pace, and where somebody sets the host's clock it draws near by at most 2 % of the time
that passes. Nothing fires early, and nothing lasts longer than it did.
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog
import trio

__all__ = ["FOLLOW_RATE", "TOLD_SECS", "TOO_FAR_SECS", "Clock", "SystemClock"]

FOLLOW_RATE: Final = 0.02
# An hour is made good in two days; of more than this the truth, at once, does less harm.
TOO_FAR_SECS: Final = 12 * 3600.0
# Smaller steps are what a time service does every day.
TOLD_SECS: Final = 1.0

log = structlog.get_logger(__name__)


class Clock(Protocol):
    """Wall time for what is stored, monotonic time for deadlines, both in seconds."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never steps: trio's own, so that a mock clock drives it too."""
        ...


class SystemClock:
    """The machine's clocks. `monotonic` is to be called inside a trio run, `now` from any thread."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        *,
        tells: bool = True,
    ) -> None:
        """`tells`: it says in the log that the host's clock was set, which one of a process should."""
        self._wall = wall
        self._steady = steady
        # What was said last, and when. One tuple, for threads replace it in one step.
        self._said = (wall(), steady())
        self._told = False
        self._tells = tells

    def now(self) -> float:
        """Seconds since the epoch: the host's, but for a step of its clock (see above)."""
        before, then = self._said
        steady, wall = self._steady(), self._wall()
        passed = max(0.0, steady - then)
        said = before + passed
        behind = wall - said
        if abs(behind) > TOO_FAR_SECS:
            if self._tells:
                log.warning("the host's clock was set: stored times step", step_secs=round(behind, 3))
            said = wall
        else:
            room = FOLLOW_RATE * passed
            said += min(max(behind, -room), room)
            self._tell(behind)
        self._said = said, max(steady, then)
        return said

    def monotonic(self) -> float:
        """Seconds on trio's clock."""
        return trio.current_time()

    def _tell(self, behind: float) -> None:
        """Once for each time that the host's clock is set."""
        off = abs(behind) > TOLD_SECS
        if self._tells and off and not self._told:
            log.warning(
                "the host's clock was set: stored times follow slowly, a restart takes it at once",
                step_secs=round(behind, 3),
            )
        self._told = off
