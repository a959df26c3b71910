"""A bounded number of slots, shared fairly between those who ask. Pure.

Owners are served in turn, each its own requests in order, so that a session that asks for a
thousand downloads delays another's first by at most one of its own for each slot.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["FairSlots"]

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item", bound=Hashable)


class FairSlots(Generic[Owner, Item]):
    """`ask` and `release` change it; `start` says what may begin now.

    An item is waiting or running from `ask` to `release`, and is known by its owner and itself.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: OrderedDict[Owner, deque[Item]] = OrderedDict()
        self._running: set[tuple[Owner, Item]] = set()

    @property
    def running(self) -> int:
        """Slots in use."""
        return len(self._running)

    def ask(self, owner: Owner, item: Item) -> None:
        """Put it in line."""
        self._waiting.setdefault(owner, deque()).append(item)

    def start(self) -> list[tuple[Owner, Item]]:
        """What may begin now; each of these holds a slot until `release`."""
        started: list[tuple[Owner, Item]] = []
        while self._waiting and len(self._running) < self._slots:
            owner, items = next(iter(self._waiting.items()))
            item = items.popleft()
            if items:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            self._running.add((owner, item))
            started.append((owner, item))
        return started

    def release(self, owner: Owner, item: Item) -> None:
        """It ended, or is not wanted any more: its slot or its place in line is free."""
        self._running.discard((owner, item))
        items = self._waiting.get(owner)
        if items is not None and item in items:
            items.remove(item)
            if not items:
                del self._waiting[owner]
