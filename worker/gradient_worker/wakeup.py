"""A flag that one task waits on and anyone sets."""

import trio

__all__ = ["Wakeup"]


class Wakeup:
    """Set and wait; a wait that returns clears it. One waiter at a time."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the waiter, or let its next wait return at once."""
        self._event.set()

    async def wait(self) -> None:
        """Return once it was set since the last return."""
        await self._event.wait()
        self._event = trio.Event()
