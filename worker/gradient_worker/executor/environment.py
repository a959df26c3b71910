"""The environment of a build's command, all of it (operations.md, "Recipes")."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gradient_protocol.messages.shapes import BuildJob

from gradient_worker.cluster_requests import roster_text
from gradient_worker.evaluator.environment import input_variable
from gradient_worker.member_signals import MemberSignals
from gradient_worker.runner.values import BuildDirectory

__all__ = ["command_environment", "member_environment"]

SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"


def command_environment(
    build: BuildJob,
    directory: BuildDirectory,
    real_path: Callable[[str], Path],
    *,
    tools: Path,
    cores: int,
) -> Mapping[str, str]:
    """Nothing of the worker's own environment is in it. `tools`: the directory of `gradient-cluster`."""
    environment = {output.name: str(directory.outputs / output.path) for output in build.outputs}
    for one in build.inputs:
        if one.name is not None:
            environment[input_variable(one.name, one.output)] = str(real_path(one.path))
    environment |= {
        "GRADIENT_CORES": str(cores),
        "HOME": str(directory.home),
        "TMPDIR": str(directory.tmp),
        "PATH": f"{tools}:{SYSTEM_PATH}",
    }
    return environment | build.env


def member_environment(signals: MemberSignals, socket: Path) -> Mapping[str, str]:
    """What a running member of a cluster finds besides (docs/cluster-programs.md)."""
    environment = {
        "GRADIENT_CLUSTER_ROLE": signals.role,
        "GRADIENT_CLUSTER_INDEX": str(signals.index),
        "GRADIENT_CLUSTER_SOCKET": str(socket),
    }
    roster = roster_text(signals.roster)
    return environment if roster is None else {**environment, "GRADIENT_CLUSTER_ROSTER": roster}
