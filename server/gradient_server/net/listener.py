"""Takes connections, bounded, and hands each to `serve_connection`."""

from typing import Final

import structlog
import trio

from gradient_server.net.serve import serve_connection
from gradient_server.net.services import Services

__all__ = ["Door"]

log = structlog.get_logger(__name__)

# Beyond `proto.maxConnections` workers, so many connections may still prove that their jobs are
# ours (503 refuses no such worker); more are closed unheard.
_UNPROVEN: Final = 128
_COMPLAIN_EVERY_SECS: Final = 60.0


class Door:
    """Counts open connections of all listeners together."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._open = 0
        self._complained_at = -_COMPLAIN_EVERY_SECS

    async def run(
        self, listeners: list[trio.abc.Listener[trio.abc.Stream]], connections: trio.Nursery
    ) -> None:
        """Accepts until cancelled. Sessions live in `connections` and outlast this."""
        await trio.serve_listeners(self._serve, listeners, handler_nursery=connections)

    async def _serve(self, stream: trio.abc.Stream) -> None:
        if self._open >= self._services.settings.proto_max_connections + _UNPROVEN:
            self._complain()
            await trio.aclose_forcefully(stream)
            return
        self._open += 1
        try:
            await serve_connection(self._services, stream)
        finally:
            self._open -= 1

    def _complain(self) -> None:
        now = self._services.clock.monotonic()
        if now - self._complained_at >= _COMPLAIN_EVERY_SECS:
            self._complained_at = now
            log.warning("too many connections; new ones are closed unheard", open=self._open)
