"""Structured logs: JSON lines to standard error, or readable lines where that is a terminal."""

import sys
from typing import TextIO

import structlog

__all__ = ["configure"]


def configure(stream: TextIO = sys.stderr, *, level: str = "info") -> None:
    """Set structlog up for the whole process. Called once, by the command line.

    Tracebacks are plain text in either form: those with local variables would show secrets.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if stream.isatty():
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        last: list[structlog.typing.Processor] = [renderer]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
