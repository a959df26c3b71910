"""Answers that go on: whoever leaves ends them, and what they hold is let go at once."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["StreamedResponse"]


class StreamedResponse(Response):
    """Sends what `content` yields. A reader that does not read holds the generator up, nothing else."""

    def __init__(
        self, content: AsyncGenerator[bytes, None], media_type: str = "text/plain", status_code: int = 200
    ) -> None:
        self._content = content
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(status_code=status_code, media_type=media_type, headers=headers)
        del self.headers["content-length"]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Runs until `content` or the connection ends."""
        async with trio.open_nursery() as nursery, aclosing(self._content) as content:
            nursery.start_soon(_watch, receive, nursery.cancel_scope)
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for chunk in content:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel()


async def _watch(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
