"""Several waits of which the first that yields something decides."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

__all__ = ["race"]

T = TypeVar("T")


async def race(*contenders: Callable[[], Awaitable[T]]) -> T:
    """The first result; the other contenders are cancelled. An exception counts as a result.

    It is raised as it is, not in a group, so that callers handle it like that of a plain await.
    """
    results: list[T] = []
    errors: list[Exception] = []

    async with trio.open_nursery() as nursery:

        async def run(contender: Callable[[], Awaitable[T]]) -> None:
            try:
                results.append(await contender())
            except Exception as error:  # noqa: BLE001 - raised again below, outside the nursery
                errors.append(error)
            nursery.cancel_scope.cancel()

        for contender in contenders:
            nursery.start_soon(run, contender)
    if results:
        return results[0]
    raise errors[0]
