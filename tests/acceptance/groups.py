"""Clusters of shell scripts, and what their processes leave for a test to look at."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.acceptance.pool import COMMAND_SECS, Pool
from tests.acceptance.processes import READY_SECS, wait_until
from tests.acceptance.trees import Build

__all__ = ["FINAL", "Group"]

Json = dict[str, Any]
FINAL = {"Completed", "Failed", "Aborted"}

# Notes its process after what comes first, waits until it is let go, and goes on with what is below.
_SCRIPT = (
    "{before}echo $$ >> {directory}/$GRADIENT_CLUSTER_ROLE-$GRADIENT_CLUSTER_INDEX; "
    "until test -e {directory}/go; do sleep 0.05; done; "
)


@dataclass(frozen=True)
class Group:
    """A cluster of builds `<name>-0-1.0`, `<name>-1-1.0` and so on, of the role `member`.

    `scripts` are what its members do once they are let go; the first is the primary. Before that, all do
    what `before` says. `more` goes into the entries of the builds, `pins` into those of the members.
    """

    name: str
    directory: Path
    scripts: Sequence[str] = ("", "", "")
    before: str = ""
    retry_budget: int = 1
    more: Mapping[str, object] = field(default_factory=dict)
    pins: Mapping[int, str] = field(default_factory=dict)
    primary: bool = True
    same_zone: bool = False

    def tree(self, pool: Pool) -> Path:
        """Its source tree."""
        begin = _SCRIPT.format(directory=self.directory, before=self.before)
        builds = [
            Build(self.build(number), f"{begin}{script or 'true'}; echo done > $out", more=self.more)
            for number, script in enumerate(self.scripts)
        ]
        return pool.tree(*builds, top=self._recipe())

    def _recipe(self) -> str:
        lines = [
            "[[cluster]]",
            f"name = {json.dumps(self.name)}",
            f"retry_budget = {self.retry_budget}",
            f"same_zone = {json.dumps(self.same_zone)}",
        ]
        for number in range(len(self.scripts)):
            lines += ["[[cluster.member]]", f"build = {json.dumps(self.build(number))}", 'role = "member"']
            lines += [f"primary = {json.dumps(self.primary and number == 0)}"]
            lines += [f"pin = {json.dumps(self.pins[number])}"] if number in self.pins else []
        return "\n".join(lines)

    def build(self, number: int) -> str:
        """The name of a member's build."""
        return f"{self.name}-{number}-1.0"

    def submit(self, pool: Pool) -> "Submitted":
        """Submits it, and waits until it is a cluster."""
        evaluation = pool.gradient_json("cluster", "submit", self.tree(pool))["evaluation"]
        return self.of_evaluation(pool, evaluation)

    def of_evaluation(self, pool: Pool, evaluation: str) -> "Submitted":
        """The cluster that came of the evaluation."""

        def found() -> list[Json]:
            clusters: list[Json] = pool.get(f"/clusters?evaluation={evaluation}")["clusters"]
            return clusters

        (cluster,) = wait_until(f"a cluster of {self.name}", found)
        return Submitted(self, evaluation, cluster["id"])

    def starts(self, number: int) -> list[int]:
        """The processes that the member has had."""
        file = self.directory / f"member-{number}"
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def go(self) -> None:
        """Lets every member go on."""
        (self.directory / "go").touch()


@dataclass(frozen=True)
class Submitted:
    """A cluster at the server."""

    group: Group
    evaluation: str
    id: str

    def show(self, pool: Pool) -> Json:
        """The cluster as it stands."""
        return pool.get(f"/clusters/{self.id}")

    def why(self, pool: Pool) -> Json:
        """Whom it waits for."""
        return pool.get(f"/clusters/{self.id}/why")

    def wait_running(self, pool: Pool, *, times: int = 1, secs: float = READY_SECS) -> Json:
        """The cluster once every member has a process, for the `times`-th time."""

        def running() -> Json | None:
            numbers = range(len(self.group.scripts))
            if any(len(self.group.starts(number)) < times for number in numbers):
                return None
            shown = self.show(pool)
            return shown if shown["status"] == "Running" else None

        return wait_until(f"the members of {self.group.name}", running, secs=secs)

    def ended(self, pool: Pool, *, secs: float = COMMAND_SECS) -> Json:
        """The cluster once it has its verdict."""

        def final() -> Json | None:
            shown = self.show(pool)
            return shown if shown["status"] in FINAL else None

        return wait_until(f"the verdict of {self.group.name}", final, secs=secs)
