"""Questions to the server that a job waits on. A session that ends is asked again on the next."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import trio
from gradient_protocol.errors import SessionClosed
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import CacheError, ImportResult, KnownDerivations
from gradient_protocol.messages.worker import ImportRequest, QueryKnownDerivations

from gradient_worker.wire import Link

__all__ = ["Queries", "QueryRefusedError"]

A = TypeVar("A", bound=Message)


class QueryRefusedError(Exception):
    """The server answered CacheError, or something that is no answer; the text is for people."""


class Queries:
    """Asks over whatever session there is."""

    def __init__(self, *, link: Link, ids: IdSource) -> None:
        self._link = link
        self._ids = ids

    async def known_derivations(self, assignment_id: str, paths: Sequence[str]) -> set[str]:
        """Those of these derivations that the server knows."""
        answer = await self._ask(
            lambda query_id: QueryKnownDerivations(
                query_id=query_id, assignment_id=assignment_id, paths=list(paths)
            ),
            KnownDerivations,
        )
        return set(answer.known)

    async def build_now(self, assignment_id: str, paths: Sequence[str]) -> ImportResult:
        """Wait until the server has these outputs, or has given them up."""
        return await self._ask(
            lambda query_id: ImportRequest(query_id=query_id, assignment_id=assignment_id, paths=list(paths)),
            ImportResult,
        )

    async def _ask(self, make: Callable[[str], Message], wanted: type[A]) -> A:
        while True:
            wire = await self._link.wire()
            try:
                query_id = self._ids.new()
                mailbox = wire.open(query_id)
                try:
                    wire.send(make(query_id))
                    answer = await mailbox.receive()
                finally:
                    mailbox.close()
            except SessionClosed:
                await trio.lowlevel.checkpoint()
                continue
            if isinstance(answer, wanted):
                return answer
            if isinstance(answer, CacheError):
                raise QueryRefusedError(f"the server answered {answer.code}: {answer.reason}")
            raise QueryRefusedError("the server answered with something else")
