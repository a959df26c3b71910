"""The suite itself: it has to fail where it should."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgpack
import pytest
import trio
from trio.testing import memory_stream_pair

from tests.conformance import server_side, worker_side
from tests.conformance.raw import Closed, Fields


class Impostor:
    """Reads everything, and answers each read with the same bytes, or closes."""

    worker_id = "w"
    tokens = {"p": "t"}  # noqa: RUF012 - nobody changes it

    def __init__(self, answer: bytes, nursery: trio.Nursery) -> None:
        self._answer = answer
        self._nursery = nursery

    async def connect(self) -> trio.abc.Stream:
        ours, theirs = memory_stream_pair()
        self._nursery.start_soon(self._repeat, ours)
        return theirs

    accept = connect

    async def submit_noop(self) -> None:
        """Nothing is ever offered."""

    def build(self, script: str) -> Fields:
        return {"type": "Build", "command": [script]}

    async def _repeat(self, stream: trio.abc.Stream) -> None:
        async with stream:
            try:
                if not self._answer:
                    return
                await stream.send_all(self._answer)
                while await stream.receive_some():
                    await stream.send_all(self._answer)
            except trio.BrokenResourceError:
                return


def framed(kind: str, **fields: object) -> bytes:
    payload = msgpack.packb({"type": kind, **fields})
    return len(payload).to_bytes(4, "big") + payload


ANSWERS = {
    "closes at once": b"",
    "agrees to anything": framed("ResumeAck", adopted=[], dropped=[]),
    "refuses anything": framed("Reject", code=500, reason="no"),
    "speaks something else": b"\0\0\0\x03\x93\x01\x02\x03",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize(
    "check", [*server_side.CHECKS, *worker_side.CHECKS], ids=lambda check: check.__name__
)
async def test_an_impostor_fails_every_check(
    check: Callable[..., Awaitable[None]], answer: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[Impostor]:
        async with trio.open_nursery() as nursery:
            yield Impostor(answer, nursery)
            nursery.cancel_scope.cancel()

    with pytest.RaisesGroup(
        pytest.RaisesExc((AssertionError, Closed)), allow_unwrapped=True, flatten_subgroups=True
    ):
        await check(make)
