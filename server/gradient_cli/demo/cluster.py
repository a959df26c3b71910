"""The cluster of the demo: three programs that make sense only together, one on each worker."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from gradient_cli import cluster_output, clusters, output, submit
from gradient_cli.api import Api
from gradient_cli.cluster_progress import progress_for_clusters
from gradient_cli.errors import CommandError, ExitCode

__all__ = ["show_cluster"]

Json = dict[str, Any]


def show_cluster(api: Api, example: Path, source: Path) -> None:
    """Runs the example of a cluster from a tree that it writes to `source`. CommandError unless it completes.

    Prints the verdict, the times of all members, and what the clients measured.
    """
    subprocess.run([sys.executable, "-B", str(example / "generate.py"), str(source)], check=True)
    tree, builds = clusters.recipe_at(source)
    evaluation = submit.submit(api, tree, builds, project="default", task="demo-cluster", prioritize=False)
    state = clusters.watch_clusters(api, evaluation, progress_for_clusters(as_json=False))
    ended = clusters.outcome(api, evaluation, state)
    for one in ended["clusters"]:
        cluster_output.print_cluster(one)
    if clusters.exit_code(ended) is not ExitCode.DONE:
        output.print_evaluation(ended["evaluation"])
        raise CommandError(f"the cluster ended {_verdict(ended)}", ExitCode.FAILED)
    _expect_apart(ended["clusters"][0])
    _print_measured(api, ended["clusters"][0])


def _verdict(ended: Json) -> str:
    found = [one["status"] for one in ended["clusters"]]
    return ", ".join(found) or f"before it began: {ended['evaluation']['error']}"


def _expect_apart(cluster: Json) -> None:
    """Every member of the last try ran on a worker of its own."""
    used = [member["worker"] for member in cluster["tries"][-1]["members"]]
    if len(set(used)) != len(cluster["members"]):
        raise CommandError(f"the members did not run on workers of their own: {used}", ExitCode.FAILED)


def _print_measured(api: Api, cluster: Json) -> None:
    """The last line of the primary's log is what it measured."""
    primary = next(member for member in cluster["members"] if member["primary"])
    log = b"".join(api.stream(f"/jobs/{primary['job']}/log")).decode(errors="replace")
    measured = log.splitlines()[-1:] or ["nothing"]
    text = f"{cluster_output.member_name(primary)} measured {measured[0]}"
    output.console.print(text, markup=False, soft_wrap=True)
