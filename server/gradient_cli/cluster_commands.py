"""`gradient cluster ...`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from gradient_cli import cluster_output, clusters, output, submit
from gradient_cli.api import Api, part
from gradient_cli.cluster_progress import progress_for_clusters
from gradient_cli.errors import CommandError, ExitCode

__all__ = ["cluster_app", "print_why_of_job", "show_why"]

cluster_app = typer.Typer(
    no_args_is_help=True, help="Jobs that start together on several workers, all or none."
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
Cluster = Annotated[str, typer.Argument(help="A cluster's id, the start of it, or its name (the newest).")]


@cluster_app.command("submit")
def cluster_submit(
    file: Annotated[Path, typer.Argument(help="A gradient.toml with [[cluster]], or its directory.")],
    *,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show each member and whom it waits for, until the verdict.")
    ] = False,
    project: Annotated[str, typer.Option(help="The project it belongs to.")] = "default",
    task: Annotated[str, typer.Option(help="The task whose history it joins.")] = "main",
    prioritize: Annotated[
        bool, typer.Option("--prioritize", help="Go before everything that waits.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Upload a source tree and run the clusters of its recipe."""
    tree, builds = clusters.recipe_at(file)
    with Api.from_environment() as api:
        evaluation = submit.submit(api, tree, builds, project=project, task=task, prioritize=prioritize)
        if not wait:
            if as_json:
                output.print_json({"evaluation": evaluation})
                return
            print(evaluation)  # noqa: T201 - for scripts
            typer.echo(f"its clusters: gradient cluster list --evaluation {evaluation}", err=True)
            return
        try:
            state = clusters.watch_clusters(api, evaluation, progress_for_clusters(as_json=as_json))
        except KeyboardInterrupt:
            raise CommandError(
                f"no longer watching; it goes on: gradient abort eval:{evaluation} ends it", ExitCode.FAILED
            ) from None
        ended = clusters.outcome(api, evaluation, state)
    if as_json:
        output.print_json(ended)
    else:
        output.print_evaluation(ended["evaluation"])
        for one in ended["clusters"]:
            cluster_output.print_cluster(one)
        if not ended["clusters"]:
            typer.echo("no cluster came of it", err=True)
    raise typer.Exit(clusters.exit_code(ended))


@cluster_app.command("show")
def cluster_show(cluster: Cluster, as_json: JsonFlag = False) -> None:
    """Show a cluster, its tries, and the times of all members."""
    with Api.from_environment() as api:
        answer = api.get(f"/clusters/{part(cluster)}")
    (output.print_json if as_json else cluster_output.print_cluster)(answer)


@cluster_app.command("list")
def cluster_list(
    project: Annotated[str | None, typer.Option(help="Of this project alone.")] = None,
    evaluation: Annotated[str | None, typer.Option(help="Of which this evaluation wants a member.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="The newest so many.")] = 50,
    as_json: JsonFlag = False,
) -> None:
    """List the clusters."""
    with Api.from_environment() as api:
        answer = api.get("/clusters", project=project, evaluation=evaluation, limit=limit)
    (output.print_json if as_json else cluster_output.print_clusters)(answer)


@cluster_app.command("abort")
def cluster_abort(cluster: Cluster) -> None:
    """End a cluster: nothing of it runs or holds a worker any more."""
    with Api.from_environment() as api:
        answer = api.post(f"/clusters/{part(cluster)}/abort")
    if not answer["aborted"]:
        typer.echo(f"cluster {answer['cluster']} had ended already", err=True)


def print_why_of_job(why: dict[str, Any]) -> None:
    """`gradient why JOB`: of a member with what its cluster waits for."""
    output.print_why(why)
    if why.get("cluster"):
        cluster_output.print_cluster_why(why["cluster"])


def show_why(cluster: str, *, as_json: bool) -> None:
    """`gradient why --cluster`."""
    with Api.from_environment() as api:
        answer = api.get(f"/clusters/{part(cluster)}/why")
    (output.print_json if as_json else cluster_output.print_cluster_why)(answer)
