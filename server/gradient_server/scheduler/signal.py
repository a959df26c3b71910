"""Wakes one loop; what was signalled while it worked is not lost."""

import trio

__all__ = ["Signal"]


class Signal:
    """Set from anywhere, waited for by one task."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """There is something to do."""
        self._event.set()

    async def wait(self) -> None:
        """Returns once something is to be done, and from then on waits for the next time."""
        await self._event.wait()
        self._event = trio.Event()
