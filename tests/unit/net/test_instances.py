"""When an instance may call others dead."""

import trio
import trio.testing
from gradient_server.net.instances import Gate, Punctuality


def after(*beats: float) -> bool:
    punctuality = Punctuality()
    for at in beats:
        punctuality.beat(at)
    return punctuality.may_judge


def test_four_beats_on_time_are_wanted() -> None:
    assert not after(0, 5, 10, 15)
    assert after(0, 5, 10, 15, 20)
    assert after(0, 7, 12, 17, 22)


def test_a_late_beat_counts_until_four_more_were_on_time() -> None:
    assert not after(0, 5, 10, 15, 30)
    assert not after(0, 30, 35, 40, 45)
    assert after(0, 30, 35, 40, 45, 50)


def test_a_clock_that_was_set_back_is_no_beat_on_time() -> None:
    assert not after(0, 5, 2, 7, 12)


async def test_nobody_passes_while_it_is_shut(autojump_clock: trio.testing.MockClock) -> None:
    gate, passed = Gate(), trio.Event()

    async def pass_it() -> None:
        await gate.passed()
        passed.set()

    async with trio.open_nursery() as nursery:
        with gate:
            nursery.start_soon(pass_it)
            await trio.sleep(1)
            assert not passed.is_set()
        await passed.wait()
    await gate.passed()
