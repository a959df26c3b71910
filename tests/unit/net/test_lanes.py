"""Keyed lanes: ordered within a key, independent between keys, gone when idle."""

from collections.abc import Hashable

import trio
from gradient_server.net.lanes import KeyedLanes


async def test_keys_are_ordered_each_and_do_not_wait_for_each_other(autojump_clock: trio.abc.Clock) -> None:
    done: list[tuple[Hashable, int]] = []
    gate = trio.Event()

    async def handle(key: Hashable, items: list[int]) -> None:
        if key == "slow":
            await gate.wait()
        done.extend((key, item) for item in items)

    async with trio.open_nursery() as nursery:
        lanes = KeyedLanes[int](nursery, handle)
        assert lanes.put("slow", 1, 10) == 10
        assert lanes.put("slow", 2, 10) == 20
        lanes.put("quick", 1, 1)
        await lanes.wait_idle("quick")
        assert done == [("quick", 1)]
        lanes.put("slow", 3, 5)
        gate.set()
        await lanes.wait_idle("slow")
        assert done[1:] == [("slow", 1), ("slow", 2), ("slow", 3)]
        assert lanes.put("slow", 4, 5) == 5, "what was handled no longer counts"
        await lanes.wait_idle("slow")
    await lanes.wait_idle("never used")
