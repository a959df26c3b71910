"""The agent's own process, which `gradient-worker run` becomes: pairs of option and value in its arguments.

It stays small, because it stays (design.md, "Budgets"): no command line parser, and no `rich`, which
structlog would import for colours of tracebacks where it is installed.
"""

import os
import socket
import sys
from functools import partial
from pathlib import Path

from gradient_protocol.notify import Notifier

from gradient_worker.config import OPTIONS, ConfigError, Loaded, load

__all__ = ["main"]

USAGE = 2


def main(arguments: list[str]) -> int:
    """Run the agent. Returns the exit code."""
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python is told that there is no such module
    import structlog  # noqa: PLC0415 - only now
    import trio  # noqa: PLC0415 - only now

    from gradient_worker.app import StartError, run_worker  # noqa: PLC0415 - only now
    from gradient_worker.log_output import set_up_logging  # noqa: PLC0415 - only now

    set_up_logging()
    try:
        loaded = _load(dict(zip(arguments[::2], arguments[1::2], strict=True)))
        logger = structlog.get_logger(__name__)
        for warning in loaded.warnings:
            logger.warning(warning)
        logger.info("configuration", **_effective(loaded))
        notifier = Notifier.take(os.environ, os.getpid())
        trio.run(partial(run_worker, loaded.config, notifier=notifier))
    except (ConfigError, StartError, ExceptionGroup) as error:
        told = _find(error, (ConfigError, StartError))
        if told is None:
            raise
        sys.stderr.write(f"gradient-worker: {told}\n")
        return USAGE
    return 0


def _load(flags: dict[str, str]) -> Loaded:
    config = flags.pop("config", None)
    return load(
        file=None if config is None else Path(config),
        environment=os.environ,
        flags=flags,
        hostname=socket.gethostname(),
        cpu_count=len(os.sched_getaffinity(0)),
    )


def _effective(loaded: Loaded) -> dict[str, str]:
    return {
        option.key: f"{getattr(loaded.config, option.field)} ({loaded.origins[option.key]})"
        for option in OPTIONS
    }


def _find(error: Exception, wanted: tuple[type[Exception], ...]) -> Exception | None:
    if isinstance(error, ExceptionGroup):
        return next((found for each in error.exceptions if (found := _find(each, wanted))), None)
    return error if isinstance(error, wanted) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
