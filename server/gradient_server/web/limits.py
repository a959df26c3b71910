"""What every request goes through: an address that is text, a bounded body, its place in the metrics."""

from http import HTTPStatus
from typing import Final

import structlog
import trio
from prometheus_client import CollectorRegistry, Histogram
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradient_server.web.errors import ApiError

__all__ = ["API", "MAX_BODY_BYTES", "Requests"]

log = structlog.get_logger(__name__)

# For all but source trees, which are streamed to the disk.
MAX_BODY_BYTES: Final = 1024 * 1024
API: Final = "/api/v1"
_UNBOUNDED: Final = f"{API}/sources"
_NUL: Final = "the address holds a NUL character (%00): leave it out"
_INTERNAL: Final = "internal error; the server's log has it"
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Requests:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._latency = Histogram(
            "gradient_http_request_seconds",
            "Time until an answer begins, by method, route and status.",
            ["method", "route", "status"],
            buckets=_BUCKETS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = trio.current_time()
        started = False

        async def observed(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._observe(scope, message["status"], trio.current_time() - began)
            await send(message)

        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            await JSONResponse({"error": _NUL}, HTTPStatus.UNPROCESSABLE_ENTITY)(scope, receive, observed)
            return
        bounded = receive if scope["path"] == _UNBOUNDED else _bounded(receive)
        try:
            await self._app(scope, bounded, observed)
        except ClientDisconnect:
            return
        except Exception as error:
            log.error("a request failed", method=scope["method"], path=scope["path"], exc_info=error)
            if started:
                raise
            answer = JSONResponse({"error": _INTERNAL}, HTTPStatus.INTERNAL_SERVER_ERROR)
            await answer(scope, receive, observed)

    def _observe(self, scope: Scope, status: int, secs: float) -> None:
        # Only names of routes are labels: what a client makes up would never end.
        found = getattr(scope.get("route"), "path", None)
        route, method = "none", "none"
        if found is not None:
            prefix = API if scope["path"].startswith(API) and not found.startswith(API) else ""
            route, method = prefix + found, scope["method"]
        self._latency.labels(method, route, str(status)).observe(secs)


def _bounded(receive: Receive) -> Receive:
    left = MAX_BODY_BYTES

    async def receive_some() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MAX_BODY_BYTES} bytes: send less"
            )
        return message

    return receive_some
