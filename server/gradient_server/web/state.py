"""What the handlers share, and how they come by it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import trio
from fastapi import Depends, Request
from prometheus_client import CollectorRegistry

from gradient_server.net.services import Services
from gradient_server.web.hub import Hub
from gradient_server.web.meters import Meters

if TYPE_CHECKING:  # its handlers use Web themselves
    from gradient_server.web.metrics import FactsCollector, RowCounts

__all__ = ["Web", "WebDep", "web_of"]

# Source trees that are received at once; others wait their turn.
UPLOADS: Final = 4


@dataclass(slots=True, kw_only=True)
class Web:
    """The HTTP side of one server. `started_at` is wall time."""

    services: Services
    hub: Hub
    started_at: float
    registry: CollectorRegistry
    meters: Meters
    facts: "FactsCollector"
    rows: "RowCounts"
    uploads: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(UPLOADS))


async def web_of(request: Request) -> Web:
    """The one that this request came to."""
    web = request.app.state.web
    assert isinstance(web, Web)
    return web


WebDep = Annotated[Web, Depends(web_of)]
