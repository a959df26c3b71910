"""The HTTP side: one FastAPI application over one server's services."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import trio
from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry, disable_created_metrics

from gradient_server.net.services import Services
from gradient_server.web import (
    board,
    clusters,
    evaluations,
    health,
    jobs,
    metrics,
    projects,
    sources,
    status,
    tasks,
    workers,
)
from gradient_server.web.errors import ErrorAnswer, install_errors
from gradient_server.web.hub import Hub
from gradient_server.web.limits import API, Requests
from gradient_server.web.meters import Meters
from gradient_server.web.metrics import FactsCollector, RowCounts
from gradient_server.web.state import Web

__all__ = ["create_app"]


def create_app(services: Services) -> FastAPI:
    """The application; subscribes to the bus. Serve it in the event loop that the services live in."""
    app = FastAPI(
        title="gradient-pair",
        version=version("gradient-pair"),
        description="A build pool: what was submitted, what waits, what runs, and where.",
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    web = _make_web(services)
    services.bus.subscribe(web.hub.on_event)
    services.bus.subscribe(web.meters.on_event)
    app.state.web = web
    app.add_middleware(Requests, registry=web.registry)
    install_errors(app)
    refusals: dict[int | str, dict[str, Any]] = {}
    for code in (401, 403, 404, 409, 422):
        refusals[code] = {"model": ErrorAnswer}
    api = APIRouter(prefix=API, responses=refusals)
    for part in (projects, tasks, workers, sources, evaluations, jobs, clusters, status):
        api.include_router(part.router)
    app.include_router(api)
    app.include_router(health.router)
    for part in (metrics, board):
        app.include_router(part.router, responses={code: refusals[code] for code in (401, 403)})
    return app


def _make_web(services: Services) -> Web:
    # When each series began is of no use here, and half of all lines.
    disable_created_metrics()  # type: ignore[no-untyped-call]  # prometheus_client does not say
    registry = CollectorRegistry()
    return Web(
        services=services,
        hub=Hub(),
        started_at=services.clock.now(),
        registry=registry,
        meters=Meters(services, registry),
        facts=FactsCollector(registry),
        rows=RowCounts(),
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The loop of the meters, as long as requests are served. /readyz tells if it has ended."""
    web = app.state.web
    assert isinstance(web, Web)
    async with trio.open_nursery() as nursery:
        await nursery.start(web.meters.run)
        yield
        nursery.cancel_scope.cancel()
