"""The HTTP side: one FastAPI application over one server's services."""

from importlib.metadata import version
from typing import Final

from fastapi import APIRouter, FastAPI

from gradient_server.net.services import Services
from gradient_server.web import evaluations, health, jobs, projects, sources, status, workers
from gradient_server.web.errors import ErrorAnswer, install_errors
from gradient_server.web.hub import Hub
from gradient_server.web.state import Web

__all__ = ["create_app"]

API: Final = "/api/v1"


def create_app(services: Services) -> FastAPI:
    """The application; subscribes to the bus. Serve it in the event loop that the services live in."""
    app = FastAPI(
        title="gradient-pair",
        version=version("gradient-pair"),
        description="A build pool: what was submitted, what waits, what runs, and where.",
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    hub = Hub()
    services.bus.subscribe(hub.on_event)
    app.state.web = Web(services=services, hub=hub, started_at=services.clock.now())
    install_errors(app)
    api = APIRouter(
        prefix=API,
        responses={code: {"model": ErrorAnswer} for code in (401, 403, 404, 409, 422)},
    )
    for part in (projects, workers, sources, evaluations, jobs, status):
        api.include_router(part.router)
    app.include_router(api)
    app.include_router(health.router)
    return app
