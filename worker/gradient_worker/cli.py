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
from typing import Annotated, Final, NoReturn

import typer
from typer.exceptions import TyperException

from gradient_worker.config import OPTIONS, ConfigError, Loaded, WorkerConfig, load

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
    given = {name: str(value) for name, value in flags.items() if value is not None}
    loaded = _load(flags)
    if register:
        _register(loaded.config, server_http_url, server_api_key_file)
    _become("-P", "-m", "gradient_worker.launch", *(word for pair in given.items() for word in pair))


def _register(config: WorkerConfig, url: str, key_file: Path | None) -> None:
    from gradient_worker.register import RegistrationError, register_worker  # noqa: PLC0415 - rarely needed

    try:
        register_worker(config, url=url, key_file=key_file)
    except RegistrationError as error:
        raise CommandError(str(error), REFUSED) from None


@app.command()
@_with_options
def runner(**flags: str | Path | None) -> None:
    """Run the process that starts builds and outlives the agent."""
    from gradient_worker.runner.options import RunnerOptions  # noqa: PLC0415 - of this command alone

    config = _load(flags).config
    options = RunnerOptions(
        base_dir=config.base_dir, orphan_kill_secs=config.orphan_kill_secs, cgroup=config.build_cgroup
    )
    _become("-I", "-m", "gradient_worker.runner", *options.argv())


def _become(*arguments: str) -> NoReturn:
    """Go on as a fresh interpreter: what it takes to read a command line would stay in memory for good."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - ourselves, without a shell


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
    from gradient_worker.log_output import set_up_logging  # noqa: PLC0415

    set_up_logging(quiet=True)
    findings = trio.run(examine, _load(flags).config)
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    return FAILED if any(finding.failed for finding in findings) else 0
