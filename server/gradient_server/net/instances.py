"""When an instance may judge others, and what waits while it takes over. Pure but for the event.

An instance that is late itself (a host that swaps, a suspended process, a database that was away)
sees everyone else as silent: it judges nobody until its own last four beats were on time.
"""

from collections import deque
from itertools import pairwise
from typing import Final

import trio

__all__ = ["BEAT_SECS", "SILENT_SECS", "Gate", "Punctuality"]

BEAT_SECS: Final = 5.0
# An instance that did not beat for so long is dead, by the database's clock.
SILENT_SECS: Final = 20.0
PUNCTUAL_BEATS: Final = 4
# What a beat may be late: half of a period, so that four of them stay well under the silence.
_LATE_SECS: Final = 2.5


class Punctuality:
    """This instance's last beats, in seconds of the database's clock."""

    def __init__(self) -> None:
        # Four beats on time are four periods, between five moments.
        self._beats: deque[float] = deque(maxlen=PUNCTUAL_BEATS + 1)

    def beat(self, at: float) -> None:
        """One was stored."""
        self._beats.append(at)

    @property
    def may_judge(self) -> bool:
        """Whether the last four came when they should have."""
        gaps = [after - before for before, after in pairwise(self._beats)]
        return len(gaps) == PUNCTUAL_BEATS and all(0 <= gap <= BEAT_SECS + _LATE_SECS for gap in gaps)


class Gate:
    """Shut while memory lags behind a take-over that is committed: nobody resumes meanwhile."""

    def __init__(self) -> None:
        self._open: trio.Event | None = None

    def __enter__(self) -> None:
        self._open = trio.Event()

    def __exit__(self, *_: object) -> None:
        opened, self._open = self._open, None
        assert opened is not None
        opened.set()

    async def passed(self) -> None:
        """Returns once it is open."""
        while self._open is not None:
            await self._open.wait()
