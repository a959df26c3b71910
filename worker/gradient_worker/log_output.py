"""Where the worker's log goes: JSON lines on standard error, plain ones on a terminal."""

import sys

import structlog

__all__ = ["set_up_logging"]

INFO = 20
NOTHING = 50


def set_up_logging(*, quiet: bool = False) -> None:
    """Configure structlog for this process. `quiet`: a command whose output is its own."""
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(NOTHING if quiet else INFO),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=not quiet,
    )
