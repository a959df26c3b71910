"""The last words of a server that stops (operations.md, Signals of the operating system)."""

from typing import Final

import trio
from gradient_protocol.messages.common import Draining

from gradient_server.net.services import Services

__all__ = ["farewell"]

# How long a stop waits for what has arrived to be committed, and for farewells to leave.
STOP_SECS: Final = 5.0


async def farewell(services: Services) -> None:
    """Nothing new; everyone is told; what has arrived is committed; sessions end with their last words."""
    services.scheduler.drain()
    services.draining.set()
    for session in services.sessions:
        # A worker with jobs goes on with this instance's next start, or with whoever succeeds it.
        url = None if session.has_jobs else services.succession.elsewhere()
        session.send(Draining(reason="the server is stopping", url=url))
    with trio.move_on_after(STOP_SECS):
        for session in services.sessions:
            await session.worked_off()
        for session in services.sessions:
            session.end("the server is stopping")
        for session in services.sessions:
            await session.done.wait()
