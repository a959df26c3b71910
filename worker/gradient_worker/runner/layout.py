"""Names of files and words that the runner and the agent share.

The runner joins them as strings, the agent as paths (`values.build_directory`).
"""

from __future__ import annotations

import enum

__all__ = [
    "BUILD",
    "BUILDS",
    "CGROUP_PREFIX",
    "HOME",
    "LOG",
    "OUTPUTS",
    "PROCESS",
    "RESULT",
    "RUNNER",
    "SPARE_PREFIX",
    "TMP",
    "TRASH_PREFIX",
    "ExitReason",
    "is_safe_name",
]

RUNNER = "runner"
"""Directory of the runner itself below the base directory: `socket`, `lock` and `log`."""
BUILDS = "builds"
"""Directory of the builds below the base directory, one directory for each assignment."""

BUILD = "build"
HOME = "home"
TMP = "tmp"
OUTPUTS = "outputs"
LOG = "log"
RESULT = "result"
PROCESS = "process"
SPARE_PREFIX = ".spare-"
TRASH_PREFIX = ".trash-"

CGROUP_PREFIX = "nix-build@"

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_NAME_LENGTH_MAX = 128


class ExitReason(enum.StrEnum):
    """Why a build ended."""

    EXITED = "exited"
    """Its main process ended by itself: the exit status or the signal says how."""
    TIMEOUT = "timeout"
    """It ran longer than `timeout_secs`."""
    SILENT = "silent"
    """It wrote nothing for `max_silent_secs`."""
    KILLED = "killed"
    """The agent asked for its end."""
    RUNNER_ERROR = "runner-error"
    """The runner could not start it; `message` says why."""
    RUNNER_DIED = "runner-died"
    """The runner ended before the build did: it crashed, was stopped, or had no agent for too long."""


def is_safe_name(name: str) -> bool:
    """Whether a name from outside may become a directory's name: letters, digits, `-` and `_`."""
    return 0 < len(name) <= _NAME_LENGTH_MAX and _LETTERS.issuperset(name)
