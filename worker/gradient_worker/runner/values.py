"""What the agent tells the runner and hears from it, and where a build's files are (pure)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradient_worker.runner import layout
from gradient_worker.runner.layout import ExitReason

__all__ = [
    "BuildDirectory",
    "BuildExit",
    "BuildSpec",
    "RunnerBuild",
    "RunnerGone",
    "RunnerInfo",
    "RunnerRefused",
    "build_directory",
]


class RunnerGone(Exception):  # noqa: N818 - a state of the world
    """The connection to the runner ended: it died, or the client was closed."""


class RunnerRefused(Exception):  # noqa: N818 - an answer
    """The runner did not do what it was asked; the text says why."""


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """A build to start. `argv[0]` is looked up in the PATH of `env`, and `env` is the whole environment.

    Times in seconds; `log_limit_bytes` is how much output is kept, None all of it. `HOME` or `TMPDIR`
    should lie in the build's directory: without cgroups that is how its stray processes are known.
    """

    assignment_id: str
    derivation_hash: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    timeout_secs: float
    max_silent_secs: float
    log_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BuildExit:
    """How a build ended. `code` or `signal` where its main process was seen to end, else both None.

    `started_at`, `ended_at`: seconds since the epoch on this host. `ended_steady`: the same end on the
    monotonic clock, which all processes of a host share; None where another runner saw it, or none.
    `duration_secs`: by the monotonic clock; None when the runner died. `oom_killed`: the kernel killed in
    the build's cgroup for want of memory; `host_killed`: while the build ran, it killed outside of it too.
    `log_bytes` were kept, `log_discarded_bytes` thrown away beyond the limit or on a full disk.
    """

    code: int | None
    signal: int | None
    reason: ExitReason
    started_at: float
    ended_at: float
    duration_secs: float | None
    oom_killed: bool
    host_killed: bool
    log_bytes: int
    log_discarded_bytes: int
    message: str = ""
    ended_steady: float | None = None

    @property
    def log_truncated(self) -> bool:
        """Whether output is missing from the log."""
        return self.log_discarded_bytes > 0


@dataclass(frozen=True, slots=True)
class RunnerBuild:
    """A build that the runner knows. `exit` is None while it runs.

    `cgroups`: hierarchy (`unified`, `memory`, `blkio`, ...) to directory, for `meters.cgroup`; empty when
    builds have none. It stays until `forget`.
    """

    assignment_id: str
    started_at: float
    exit: BuildExit | None
    cgroups: Mapping[str, Path]

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.exit is None

    @property
    def state(self) -> Literal["running", "ended"]:
        """As a word."""
        return "running" if self.is_running else "ended"

    @property
    def cgroup(self) -> Path | None:
        """The directory that names the build's memory."""
        return self.cgroups.get("memory") or self.cgroups.get("unified")


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """The runner itself. `cgroups` empty: builds are not measured, and `cgroup_reason` says why.

    `detached`: an agent started it in the background, no service manager looks after it.
    """

    pid: int
    cgroups: Mapping[str, Path]
    cgroup_reason: str
    build_users: tuple[str, ...]
    detached: bool


@dataclass(frozen=True, slots=True)
class BuildDirectory:
    """Where a build's files are. `build` is its working directory, `result` the runner's own record."""

    root: Path

    @property
    def build(self) -> Path:
        """The working directory of the command."""
        return self.root / layout.BUILD

    @property
    def home(self) -> Path:
        """`HOME` of the command."""
        return self.root / layout.HOME

    @property
    def tmp(self) -> Path:
        """`TMPDIR` of the command."""
        return self.root / layout.TMP

    @property
    def outputs(self) -> Path:
        """Where the command makes its outputs; the agent's to read and move once the build has ended."""
        return self.root / layout.OUTPUTS

    @property
    def log(self) -> Path:
        """Standard output and error, growing while the build runs."""
        return self.root / layout.LOG

    @property
    def result(self) -> Path:
        """The record of the end (msgpack); empty or absent until the build has ended."""
        return self.root / layout.RESULT


def build_directory(base_dir: str | os.PathLike[str], assignment_id: str) -> BuildDirectory:
    """The directory of an assignment's build; ValueError for an id that is no plain name."""
    if not layout.is_safe_name(assignment_id):
        raise ValueError(f"{assignment_id!r} cannot name a directory")
    return BuildDirectory(Path(base_dir).absolute() / layout.BUILDS / assignment_id)
