"""The `gradient-server` command.

Its flags are made from the table of options (config.py). Exit codes: 0 done, 1 it failed, 2 usage
or configuration. What a user can cause is one line that says what to do, never a traceback.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import structlog
import trio
import typer

from gradient_server import app, logging
from gradient_server.config import OPTIONS, ConfigError, Loaded, Option, load

__all__ = ["cli", "main", "run"]

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

log = structlog.get_logger(__name__)

cli = typer.Typer(
    name="gradient-server",
    help="The server that workers of a gradient pool connect to.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _parameter(option: Option) -> inspect.Parameter:
    shown = typer.Option(option.flag, help=option.help, show_default=False)
    is_switch = isinstance(option.default, bool)
    annotation = Annotated[bool | None, shown] if is_switch else Annotated[str | None, shown]
    return inspect.Parameter(
        option.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option("--config", help="A TOML file with these options.")],
)


def _configured(command: Callable[[Loaded], int]) -> Callable[..., None]:
    """A command line function that takes every option, merges the sources and runs `command`."""

    def run(**given: Any) -> None:  # noqa: ANN401 - whatever the flags are
        file = given.pop("config")
        loaded = load(file=file, environment=os.environ, flags=given)
        for warning in loaded.warnings:
            log.warning(warning)
        raise typer.Exit(command(loaded))

    parameters = [_CONFIG, *(_parameter(option) for option in OPTIONS)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def serve(loaded: Loaded) -> int:
    """Run the server. Migrates the database first."""
    log.info("configuration", **loaded.effective())
    return trio.run(partial(app.serve, loaded.config))


def migrate(loaded: Loaded) -> int:
    """Bring the database to this version's schema."""
    print(trio.run(partial(app.migrate, loaded.config)))  # noqa: T201 - the command's answer
    return 0


def check(loaded: Loaded) -> int:
    """Validate configuration and database, and say what is wrong."""
    problems: list[str] = trio.run(partial(app.check, loaded.config))
    for problem in problems or ["configuration and database are in order"]:
        print(problem)  # noqa: T201 - the command's answer
    return EXIT_FAILED if problems else 0


for _command in (serve, migrate, check):
    cli.command(_command.__name__)(_configured(_command))


def main() -> None:
    """The entry point of the console script."""
    logging.configure()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """One command; its exit code. Complaints go to standard error, a line each."""
    try:
        code = cli(list(arguments), standalone_mode=False, prog_name="gradient-server")
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except app.StartError as error:
        return _fail(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code if isinstance(code, int) else 0


def _fail(line: str, code: int) -> int:
    if line:
        print(f"gradient-server: {' '.join(line.split())}", file=sys.stderr)  # noqa: T201 - for people
    return code
