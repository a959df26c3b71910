"""Is the process there, and can it work (operations.md, HTTP)."""

from functools import cache
from http import HTTPStatus
from typing import Final

import structlog
import trio
from fastapi import APIRouter, Response
from pydantic import BaseModel

from gradient_server.db.errors import database_errors, first_line
from gradient_server.db.migrate import current_revision, newest_revision
from gradient_server.net.services import Services
from gradient_server.web.state import WebDep

__all__ = ["router"]

log = structlog.get_logger(__name__)

router = APIRouter(tags=["health"])

DATABASE_SECS: Final = 5.0


class Health(BaseModel):
    """`ok`, or what is wrong."""

    status: str


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/readyz", responses={503: {"model": Health}})
async def readyz(web: WebDep, response: Response) -> Health:
    """The database is reachable and at this version's schema, the loops run, no stop is under way."""
    problem = await _problem(web.services)
    if problem is None and not web.meters.is_alive:
        problem = "the event loop of the HTTP side does not turn"
    if problem is not None:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return Health(status=problem or "ok")


@cache
def _newest_revision() -> str:
    """Read from the package's files once."""
    return newest_revision()


async def _problem(services: Services) -> str | None:
    # A loop of the server that fails ends the process; what answers here has all of them.
    if services.draining.is_set():
        return "the server is stopping"
    revision: str | None = None
    with trio.move_on_after(DATABASE_SECS) as scope:
        try:
            revision = await services.database.read(current_revision)
        except database_errors() as error:
            log.error("the database is not reachable", reason=first_line(error))
            return "the database is not reachable: the server's log says why"
    if scope.cancelled_caught:
        return f"the database did not answer within {DATABASE_SECS:.0f} s"
    if revision != _newest_revision():
        return "the database is not at this version's schema: run gradient-server migrate"
    return None
