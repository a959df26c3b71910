"""Hypercorn on trio, for the HTTP side: bound, told when to stop, and quiet but for errors."""

import sys
from typing import Any, Final

import hypercorn.trio
import structlog
import trio
from hypercorn.config import Config
from hypercorn.logging import Logger
from hypercorn.typing import ASGIFramework

__all__ = ["serve_http"]

log = structlog.get_logger(__name__)

GRACEFUL_SECS: Final = 3.0


class _Log(Logger):
    """Hypercorn's lines as ours."""

    async def access(self, *_args: Any) -> None:  # noqa: ANN401 - hypercorn's signature
        """Requests are counted (/metrics), not logged one by one."""

    async def info(self, message: str, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - the same
        """Addresses are printed by the server itself."""

    async def debug(self, message: str, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - the same
        """Of no use to an operator."""

    async def warning(self, message: str, *args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - the same
        log.warning(message % args if args else message)

    async def error(self, message: str, *args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - the same
        log.error(message % args if args else message)

    async def critical(self, message: str, *args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - the same
        log.critical(message % args if args else message)

    async def exception(self, message: str, *args: Any, **_kwargs: Any) -> None:  # noqa: ANN401 - the same
        log.error(message % args if args else message, exc_info=sys.exc_info())


async def serve_http(
    asgi: ASGIFramework,
    *,
    host: str,
    port: int,
    stopping: trio.Event,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until `stopping` is set and requests have ended, or 3 s have passed.

    Started with the addresses it really listens on. OSError if an address cannot be had.
    """
    config = Config()
    config.bind = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
    config.logger_class = _Log
    config.accesslog = None
    config.graceful_timeout = GRACEFUL_SECS
    config.include_server_header = False
    await hypercorn.trio.serve(asgi, config, shutdown_trigger=stopping.wait, task_status=task_status)
