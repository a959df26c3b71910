"""The queue between a session's reader, which never waits, and its one task that uses the database."""

from collections import deque
from typing import Generic, TypeVar

import trio

__all__ = ["OrderedWork"]

Item = TypeVar("Item")


class OrderedWork(Generic[Item]):
    """First in, first out, for one consumer that takes all there is.

    Bounded by those who put: reports by their window, everything by `MAX_WAITING` (handlers).
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._consumer = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()
        self._is_working = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Queue an item; never waits."""
        self._items.append(item)
        self._consumer.unpark()

    async def take(self) -> list[Item]:
        """All that waits, at least one item. To be called again once these are done."""
        while not self._items:
            self._is_working = False
            self._idle.unpark_all()
            await self._consumer.park()
        self._is_working = True
        items = list(self._items)
        self._items.clear()
        return items

    async def wait_idle(self) -> None:
        """Returns once nothing waits and nothing is being worked on."""
        while self._items or self._is_working:
            await self._idle.park()
