"""`gradient cluster submit`: the clusters of a recipe, submitted and watched to their verdicts."""

import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradient_cli.api import Api
from gradient_cli.cluster_progress import ClusterProgress
from gradient_cli.errors import CommandError, ExitCode
from gradient_cli.submit import RECONNECT_SECS, RECONNECTS

__all__ = ["Clusters", "exit_code", "outcome", "recipe_at", "watch_clusters"]

RECIPE = "gradient.toml"
FINAL = frozenset({"Completed", "Failed", "Aborted"})
# As many as the server takes; a cluster comes whole with any one of its members.
MAX_ATTRS = 1_000

Json = dict[str, Any]


def recipe_at(path: Path) -> tuple[Path, list[str]]:
    """The source tree of a recipe (its directory or itself), and builds that its clusters are made of.

    No builds where the recipe cannot be understood: its evaluation says what is wrong, and where.
    """
    file = path / RECIPE if path.is_dir() else path
    if file.name != RECIPE:
        raise CommandError(f"{path} is no {RECIPE}: name one, or its directory", ExitCode.USAGE)
    try:
        recipe = tomllib.loads(file.read_text())
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}", ExitCode.USAGE) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"{file} is not TOML: {error}", ExitCode.USAGE) from None
    clusters = recipe.get("cluster")
    if not clusters:
        raise CommandError(
            f"{file} has no [[cluster]]: gradient build {path} builds what it has", ExitCode.USAGE
        )
    members = [list(_members(cluster)) for cluster in clusters] if isinstance(clusters, list) else []
    if not all(members):
        return file.parent, []
    every = [name for names in members for name in names]
    return file.parent, every if len(every) <= MAX_ATTRS else [names[0] for names in members][:MAX_ATTRS]


def _members(cluster: object) -> Iterator[str]:
    members = cluster.get("member") if isinstance(cluster, dict) else None
    for member in members if isinstance(members, list) else ():
        if isinstance(member, dict) and isinstance(member.get("build"), str):
            yield member["build"]


@dataclass
class Clusters:
    """The clusters of an evaluation as their event stream tells them, by id."""

    status: str = "Queued"
    error: str | None = None
    standings: dict[str, Json] = field(default_factory=dict)

    def apply(self, name: str, data: Json) -> None:
        """Takes in one event; names it does not know are left alone."""
        if name == "cluster":
            self.standings[data["cluster"]] = data
        elif name == "evaluation":
            self.status, self.error = data["status"], data.get("error")

    @property
    def is_final(self) -> bool:
        """Whether nothing more will come."""
        return self.status in FINAL and all(one["status"] in FINAL for one in self.standings.values())


def watch_clusters(api: Api, evaluation: str, progress: ClusterProgress) -> Clusters:
    """Follows the clusters of the evaluation to their verdicts, over a few lost connections."""
    state = Clusters()
    failures = 0
    with progress:
        while True:
            told = "the server ends the event stream at once"
            try:
                for name, data in api.events(f"/evaluations/{evaluation}/clusters/events"):
                    failures = 0
                    state.apply(name, data)
                    progress.show(name, data)
            except CommandError as error:
                told = str(error)
            if state.is_final:
                return state
            # Most likely it is being restarted.
            failures += 1
            if failures > RECONNECTS:
                raise CommandError(f"{told}; the clusters go on: gradient cluster list") from None
            time.sleep(RECONNECT_SECS)


def outcome(api: Api, evaluation: str, state: Clusters) -> Json:
    """How it all ended: the evaluation, and each cluster with its tries."""
    return {
        "evaluation": api.get(f"/evaluations/{evaluation}"),
        "clusters": [api.get(f"/clusters/{cluster}") for cluster in state.standings],
    }


def exit_code(ended: Json) -> ExitCode:
    """0 only if there are clusters, every one of them is Completed, and so is the evaluation."""
    verdicts = {one["status"] for one in ended["clusters"]} | {ended["evaluation"]["status"]}
    return ExitCode.DONE if ended["clusters"] and verdicts == {"Completed"} else ExitCode.FAILED
