"""Work that is ordered within a key and independent between keys: logs and uploads of one session,
and, under one key, what it asks and says of uploads.

A task lives only while its key has work, so that an idle session costs none and a job without a log
starts none. Nothing here decides what the work is.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

import trio

__all__ = ["KeyedLanes"]

Item = TypeVar("Item")

AT_ONCE: Final = 4


class _Lane(Generic[Item]):
    __slots__ = ("idle", "items", "size_waiting")

    def __init__(self) -> None:
        self.items: deque[tuple[Item, int]] = deque()
        self.size_waiting = 0
        self.idle = trio.Event()


class KeyedLanes(Generic[Item]):
    """Runs `handle(key, items)` for the items of a key, in order, one call at a time per key.

    `handle` gets up to four items that waited, which is about 1 MiB of chunks: what is acknowledged
    together, and what one trip to a thread pays for. Whatever it raises ends the nursery, and with it
    the session.
    """

    def __init__(
        self, nursery: trio.Nursery, handle: Callable[[Hashable, list[Item]], Awaitable[None]]
    ) -> None:
        self._nursery = nursery
        self._handle = handle
        self._lanes: dict[Hashable, _Lane[Item]] = {}

    def put(self, key: Hashable, item: Item, size: int) -> int:
        """Queue an item; returns the sizes (bytes, or 1 each) of what waits or is worked on by this key.

        The caller holds the sum to the protocol's window, for nothing here blocks.
        """
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane()
            self._nursery.start_soon(self._drain, key, lane)
        lane.items.append((item, size))
        lane.size_waiting += size
        return lane.size_waiting

    async def wait_idle(self, key: Hashable) -> None:
        """Returns once all that was queued under the key is done."""
        lane = self._lanes.get(key)
        if lane is not None:
            await lane.idle.wait()

    async def wait_all_idle(self) -> None:
        """The same for every key that has work now."""
        for key in tuple(self._lanes):
            await self.wait_idle(key)

    async def _drain(self, key: Hashable, lane: _Lane[Item]) -> None:
        try:
            while lane.items:
                taken = [lane.items.popleft() for _ in range(min(AT_ONCE, len(lane.items)))]
                await self._handle(key, [item for item, _ in taken])
                lane.size_waiting -= sum(size for _, size in taken)
        finally:
            # No await between the look at `items` above and this, so nothing is queued in vain.
            del self._lanes[key]
            lane.idle.set()
