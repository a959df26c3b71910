"""The `gradient` command."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gradient_cli import output, submit
from gradient_cli.api import Api, part
from gradient_cli.cluster_commands import cluster_app, print_why_of_job, show_why
from gradient_cli.demo.run import run_demo
from gradient_cli.errors import CommandError, ExitCode
from gradient_cli.progress import progress_for

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Submit builds to a pool and ask what became of them.",
)  # fmt: skip
project_app = typer.Typer(no_args_is_help=True, help="Projects: who shares workers and keys.")
task_app = typer.Typer(no_args_is_help=True, help="Tasks of a project, and their limits.")
worker_app = typer.Typer(no_args_is_help=True, help="The hosts that work.")
key_app = typer.Typer(no_args_is_help=True, help="API keys.")
app.add_typer(project_app, name="project")
app.add_typer(task_app, name="task")
app.add_typer(worker_app, name="worker")
app.add_typer(key_app, name="key")
app.add_typer(cluster_app, name="cluster")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
Job = Annotated[str, typer.Argument(help="build:ID, eval:ID, the start of an id, or a build's name.")]


def _read(path: str, show: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    with Api.from_environment() as api:
        answer = api.get(path)
    (output.print_json if as_json else show)(answer)


@app.command()
def build(
    path: Annotated[Path, typer.Argument(help="The directory with gradient.toml.")],
    attrs: Annotated[
        list[str] | None, typer.Argument(metavar="[ATTR]...", help="Builds by name; none means all.")
    ] = None,
    project: Annotated[str, typer.Option(help="The project it belongs to.")] = "default",
    task: Annotated[str, typer.Option(help="The task whose history it joins.")] = "main",
    detach: Annotated[
        bool, typer.Option("--detach", help="Submit, print the evaluation's id, and leave.")
    ] = False,
    prioritize: Annotated[
        bool, typer.Option("--prioritize", help="Go before everything that waits.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Upload the source, evaluate it and build it."""
    with Api.from_environment() as api:
        evaluation = submit.submit(api, path, attrs or [], project=project, task=task, prioritize=prioritize)
        if detach:
            output.print_json({"evaluation": evaluation}) if as_json else print(evaluation)  # noqa: T201 - for scripts
            return
        try:
            view = submit.watch(api, evaluation, progress_for(as_json=as_json))
        except KeyboardInterrupt:
            raise CommandError(
                f"no longer watching; the evaluation goes on: gradient abort eval:{evaluation} ends it",
                ExitCode.FAILED,
            ) from None
    (output.print_json if as_json else output.print_evaluation)(view)
    raise typer.Exit(submit.exit_code(view))


@app.command()
def status(as_json: JsonFlag = False) -> None:
    """What waits, what runs, and where."""
    _read("/status", output.print_status, as_json)


@app.command()
def why(
    job: Annotated[
        str | None, typer.Argument(help="build:ID, eval:ID, the start of an id, or a build's name.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="ID", help="A cluster's id, the start of it, or its name."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say why a job or a cluster is still pending, or why it went where it went."""
    if cluster is not None and job is None:
        show_why(cluster, as_json=as_json)
    elif job is not None and cluster is None:
        _read(f"/jobs/{part(job)}/why", print_why_of_job, as_json)
    else:
        raise CommandError("name a job, or a cluster with --cluster ID", ExitCode.USAGE)


@app.command()
def show(job: Job, as_json: JsonFlag = False) -> None:
    """Show a job and its attempts."""
    _read(f"/jobs/{part(job)}", output.print_job, as_json)


@app.command()
def logs(
    job: Job,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as the log grows.")] = False,
    attempt: Annotated[
        str | None, typer.Option(metavar="ID", help="Of this attempt, as gradient show --json names them.")
    ] = None,
) -> None:
    """Print the log of a job's newest attempt, or of an older one."""
    with Api.from_environment() as api:
        for chunk in api.stream(f"/jobs/{part(job)}/log", follow=int(follow), attempt=attempt):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()


@app.command()
def abort(job: Job) -> None:
    """End a job, or an evaluation and what nobody else wants of it."""
    with Api.from_environment() as api:
        submit.abort(api, job)


@app.command()
def demo(
    keep: Annotated[Path | None, typer.Option(help="Keep everything in this directory.")] = None,
) -> None:
    """Run a server and three workers here, build a real graph on them, and show how it was decided."""
    raise typer.Exit(run_demo(keep))


@project_app.command("create")
def project_create(name: str, as_json: JsonFlag = False) -> None:
    """Create a project."""
    with Api.from_environment() as api:
        answer = api.post("/projects", {"name": name})
    if as_json:
        output.print_json(answer)


@project_app.command("list")
def project_list(as_json: JsonFlag = False) -> None:
    """List the projects."""
    _read("/projects", output.print_projects, as_json)


@task_app.command("list")
def task_list(
    project: Annotated[str, typer.Option(help="The project they belong to.")] = "default",
    as_json: JsonFlag = False,
) -> None:
    """List a project's tasks and their limits."""
    _read(f"/projects/{part(project)}/tasks", output.print_tasks, as_json)


@task_app.command("limit")
def task_limit(
    name: str,
    project: Annotated[str, typer.Option(help="The project it belongs to.")] = "default",
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Unfinished evaluations at once; without it, any number.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds for each evaluation's job.")] = None,
) -> None:
    """Limit the evaluations of a task; what is not given is lifted."""
    limits = {"max_concurrent_evaluations": max_concurrent, "evaluation_timeout_secs": timeout}
    with Api.from_environment() as api:
        api.put(f"/projects/{part(project)}/tasks/{part(name)}", limits)


@worker_app.command("register")
def worker_register(
    name: str,
    worker_id: Annotated[str | None, typer.Option(help="What the host has in <baseDir>/worker_id.")] = None,
    project: Annotated[
        str | None, typer.Option(help="Serve this project alone; without it, every project.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Register a worker and print the line for its peers file, once."""
    with Api.from_environment() as api:
        answer = api.post("/workers", {"name": name, "worker_id": worker_id, "project": project})
    if as_json:
        output.print_json(answer)
        return
    print(answer["peers_line"])  # noqa: T201 - alone on standard output, to be put into a file
    told = f"worker {name} has the id {answer['worker_id']}; this line is not shown again"
    if answer["renewed"]:
        told += ", and takes the place of the one before: the token that the worker had is void"
    sys.stderr.write(f"{told}\n")


@worker_app.command("list")
def worker_list(as_json: JsonFlag = False) -> None:
    """List the workers."""
    _read("/workers", lambda answer: output.print_workers(answer["workers"]), as_json)


@worker_app.command("drain")
def worker_drain(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Workers, by name or id.")],
    reason: Annotated[
        str,
        typer.Option(
            help="Shown in gradient worker list, and to whoever asks why. Needed, save with --undo."
        ),
    ] = "",
    deadline: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds until what still runs is requeued; without it, all may end."),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let them work again.")] = False,
) -> None:
    """Give these workers no new jobs, or let them work again.

    What runs goes on, until the deadline where there is one; what is left then is requeued, and it costs no
    try. gradient worker list shows who is drained, why, and until when.
    """
    if not reason and not undo:
        raise CommandError(
            "say why: --reason TEXT is shown to whoever waits for these workers", ExitCode.USAGE
        )
    body = {"reason": reason, "deadline_secs": deadline, "undo": undo}
    with Api.from_environment() as api:
        for number, name in enumerate(names):
            try:
                api.post(f"/workers/{part(name)}/drain", body)
            except CommandError as error:
                done, left = ", ".join(names[:number]) or "none", ", ".join(names[number:])
                raise CommandError(f"{error} (done: {done}; not done: {left})", error.code) from None


@worker_app.command("revoke")
def worker_revoke(
    name: str, project: Annotated[str | None, typer.Option(help="For this project alone.")] = None
) -> None:
    """Take a worker's registration back; what it runs is requeued."""
    with Api.from_environment() as api:
        api.post(f"/workers/{part(name)}/revoke", {"project": project})


@key_app.command("create")
def key_create(
    name: str, project: Annotated[str | None, typer.Option(help="Good for this project alone.")] = None
) -> None:
    """Create an API key and print it, once."""
    with Api.from_environment() as api:
        print(api.post("/keys", {"name": name, "project": project})["key"])  # noqa: T201 - alone on standard output


def main() -> None:
    """Runs a command; every failure is one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except CommandError as error:
        sys.stderr.write(f"gradient: {error}\n")
        code = error.code
    except typer.TyperException as error:
        sys.stderr.write(f"gradient: {error.format_message().rstrip('.')}; see gradient --help\n")
        code = ExitCode.USAGE
    except (typer.Abort, KeyboardInterrupt):
        sys.stderr.write("gradient: stopped\n")
        code = ExitCode.FAILED
    except BrokenPipeError:
        # Whoever read our output has enough of it.
        sys.stderr.close()
        code = ExitCode.DONE
    sys.exit(code)
