"""Download slots: never more than there are, and nobody waits behind another's whole queue."""

from gradient_server.storage.slots import FairSlots
from hypothesis import given
from hypothesis import strategies as st


def test_owners_are_served_in_turn() -> None:
    slots = FairSlots[str, int](1)
    for item in range(3):
        slots.ask("greedy", item)
    slots.ask("modest", 0)
    served = []
    while started := slots.start():
        served += started
        slots.release(*started[0])
    assert served == [("greedy", 0), ("modest", 0), ("greedy", 1), ("greedy", 2)]


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["ask", "release"]), st.integers(0, 2), st.integers(0, 5))),
)
def test_slots_are_bounded_and_all_is_served(count: int, steps: list[tuple[str, int, int]]) -> None:
    slots = FairSlots[int, tuple[int, int]](count)
    running: set[tuple[int, tuple[int, int]]] = set()
    waiting: dict[int, list[tuple[int, int]]] = {}
    number = 0
    for step, owner, which in steps:
        if step == "ask":
            number += 1
            slots.ask(owner, (owner, number))
            waiting.setdefault(owner, []).append((owner, number))
        elif step == "release" and running:
            released = sorted(running)[which % len(running)]
            running.discard(released)
            slots.release(*released)
        for started_owner, item in slots.start():
            assert waiting[started_owner].pop(0) == item
            running.add((started_owner, item))
        assert len(running) == slots.running <= count
        assert len(running) == count or not any(waiting.values())


def test_a_release_of_what_waits_gives_up_its_place() -> None:
    slots = FairSlots[str, int](1)
    slots.ask("a", 1)
    slots.ask("a", 2)
    assert slots.start() == [("a", 1)]
    slots.release("a", 2)
    slots.release("a", 1)
    assert slots.start() == []
