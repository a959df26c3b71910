"""`gradient-worker`: the agent, its runner, the benchmark and the doctor (operations.md, "Commands").

Exit codes: 0 done, 1 the work failed, 2 usage, 3 server unreachable or refused. What a user can cause
is one line on standard error, never a traceback.
"""

import inspect
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import structlog
import typer
from typer.exceptions import TyperException

from gradient_worker.config import OPTIONS, ConfigError, Loaded, load

__all__ = ["main"]

FAILED: Final = 1
USAGE: Final = 2
REFUSED: Final = 3

app = typer.Typer(
    name="gradient-worker",
    help="The worker agent of a build host.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

logger = structlog.get_logger(__name__)


class CommandError(Exception):
    """One line for the user, and the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def main() -> None:
    """Entry point of `gradient-worker`."""
    sys.exit(run_command_line(sys.argv[1:]))


def run_command_line(arguments: list[str]) -> int:
    """Run one command. Returns the exit code."""
    try:
        code = app(arguments, standalone_mode=False)
    except typer.Exit as done:
        return done.exit_code
    except TyperException as error:
        return _complain(error.format_message(), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _complain("interrupted", FAILED)
    except ConfigError as error:
        return _complain(str(error), USAGE)
    except CommandError as error:
        return _complain(str(error), error.code)
    return code if isinstance(code, int) else 0


def _complain(text: str, code: int) -> int:
    one_line = " ".join(text.split())
    if one_line:
        sys.stderr.write(f"gradient-worker: {one_line}\n")
    return code


def _with_options(command: Callable[..., object]) -> Callable[..., object]:
    """Give a command one flag for each option, after its own parameters."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, typer.Option("--config", help="a TOML file of options")],
    )
    flags = [
        inspect.Parameter(
            option.field,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(option.flag, help=option.help)],
        )
        for option in OPTIONS
    ]
    parameters = [*own, config, *flags]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # as inspect documents it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _load(flags: dict[str, str | Path | None]) -> Loaded:
    config = flags.pop("config")
    return load(
        file=None if config is None else Path(config),
        environment=os.environ,
        flags=flags,
        hostname=socket.gethostname(),
        cpu_count=len(os.sched_getaffinity(0)),
    )


def _log_configuration(loaded: Loaded) -> None:
    for warning in loaded.warnings:
        logger.warning(warning)
    effective = {
        option.dotted: f"{getattr(loaded.config, option.field)} ({loaded.origins[option.dotted]})"
        for option in OPTIONS
    }
    logger.info("configuration", **effective)


@app.command()
@_with_options
def run(
    *,
    register: Annotated[
        bool, typer.Option("--register", help="register with the server on this host first")
    ] = False,
    server_api_key_file: Annotated[
        Path | None, typer.Option("--server-api-key-file", help="with --register: the server's API key file")
    ] = None,
    server_http_url: Annotated[
        str, typer.Option("--server-http-url", help="with --register: the server's HTTP address")
    ] = "http://127.0.0.1:3000",
    **flags: str | Path | None,
) -> None:
    """Run the agent, and a runner where none is there."""
    import trio  # noqa: PLC0415 - the other commands need none of it

    from gradient_worker.app import StartError, run_worker  # noqa: PLC0415
    from gradient_worker.register import RegistrationError, register_worker  # noqa: PLC0415

    _set_up_logging()
    loaded = _load(flags)
    _log_configuration(loaded)
    try:
        if register:
            register_worker(loaded.config, url=server_http_url, key_file=server_api_key_file)
        trio.run(run_worker, loaded.config)
    except RegistrationError as error:
        raise CommandError(str(error), REFUSED) from None
    except (StartError, ExceptionGroup) as error:
        start = _find(error, StartError)
        if start is None:
            raise
        raise CommandError(str(start), USAGE) from None


def _find(error: Exception, wanted: type[Exception]) -> Exception | None:
    if isinstance(error, ExceptionGroup):
        return next((found for each in error.exceptions if (found := _find(each, wanted))), None)
    return error if isinstance(error, wanted) else None


@app.command()
@_with_options
def runner(**flags: str | Path | None) -> int:
    """Run the process that starts builds and outlives the agent."""
    from gradient_worker.runner.main import run as run_runner  # noqa: PLC0415
    from gradient_worker.runner.options import RunnerOptions  # noqa: PLC0415

    config = _load(flags).config
    options = RunnerOptions(
        base_dir=config.base_dir, orphan_kill_secs=config.orphan_kill_secs, cgroup=config.build_cgroup
    )
    return run_runner(options)


@app.command()
def benchmark(*, as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Measure one core, as every start of the agent does."""
    from gradient_worker.meters import cpu_benchmark  # noqa: PLC0415

    result = cpu_benchmark.run()
    if as_json:
        fields = {
            "cpu_core_score": round(result.cpu_core_score, 1),
            "runs": result.runs,
            "spread_pct": round(result.spread_pct, 2),
            "took_secs": round(result.took_secs, 3),
            "pinned_cpu": result.pinned_cpu,
        }
        sys.stdout.write(json.dumps(fields) + "\n")
    else:
        text = f"{result.cpu_core_score:.0f} (median of {result.runs} runs, spread {result.spread_pct:.1f} %)"
        sys.stdout.write(f"CPU core score: {text}\n")


@app.command()
@_with_options
def doctor(**flags: str | Path | None) -> int:
    """Check cgroup, store, disk, clock, server and token; one line each, with the remedy."""
    import trio  # noqa: PLC0415 - as above

    from gradient_worker.doctor import examine  # noqa: PLC0415

    _set_up_logging(quiet=True)
    findings = trio.run(examine, _load(flags).config)
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    return FAILED if any(finding.failed for finding in findings) else 0


def _set_up_logging(*, quiet: bool = False) -> None:
    terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(50 if quiet else 20),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
