"""Structured logs: JSON lines to standard error, or readable lines where that is a terminal."""

import sys
from typing import TextIO

import structlog

__all__ = ["configure"]


def configure(stream: TextIO = sys.stderr) -> None:
    """Set structlog up for the whole process. Called once, by the command line."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if stream.isatty():
        last: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer()]
    else:
        # Tracebacks as text: one of dictionaries would carry local variables, and those secrets.
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
