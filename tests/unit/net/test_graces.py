"""Graces of workers that went: what a worker that comes back in the middle of its loss may rely on."""

import sqlalchemy as sa
import trio
from gradient_server.net.graces import Graces
from trio.testing import MockClock


async def test_a_worker_that_is_back_is_not_lost_though_its_first_loss_failed(
    autojump_clock: MockClock,
) -> None:
    lost: list[float] = []

    async def lose(_worker_id: str) -> None:
        lost.append(trio.current_time())
        await trio.sleep(120)
        raise sa.exc.OperationalError("UPDATE", {}, Exception("database is locked"))

    graces = Graces(60, lose)
    async with trio.open_nursery() as nursery:
        await nursery.start(graces.run)
        graces.arm("w")
        await trio.sleep(100)
        await graces.cancel("w")
        assert graces.awaited == []
        await trio.sleep(1000)
        assert len(lost) == 1
        nursery.cancel_scope.cancel()


async def test_a_loss_that_failed_comes_again_while_nobody_is_back(autojump_clock: MockClock) -> None:
    lost: list[float] = []

    async def lose(_worker_id: str) -> None:
        lost.append(trio.current_time())
        if len(lost) == 1:
            raise sa.exc.OperationalError("UPDATE", {}, Exception("database is locked"))

    graces = Graces(60, lose)
    async with trio.open_nursery() as nursery:
        await nursery.start(graces.run)
        graces.arm("w")
        await trio.sleep(1000)
        assert len(lost) == 2
        nursery.cancel_scope.cancel()
