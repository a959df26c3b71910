"""Starting a build the cheap way where that is possible, else by fork (`spawn`).

The cheap way is `os.posix_spawn`, which does not copy this process: a third of the cost. It cannot put
the child into a cgroup or a directory, but a child inherits both: so this process, which has one thread,
steps into them itself, spawns, and steps back out. It cannot become another user: that needs the fork.
"""

# ruff: noqa: PTH112, PTH118
# (pathlib would cost this small process 1 MiB)

from __future__ import annotations

import contextlib
import os

from gradient_worker.runner.spawn import OOM_SCORE_ADJ, RESET, Command, spawn, write

__all__ = ["launch"]


def launch(command: Command, home: list[str]) -> tuple[int, int]:
    """The child's pid, and the pipe of `spawn` (-1: nothing can have failed). Raises OSError.

    `home`: the `cgroup.procs` that this process belongs to, in the order of `command.procs_files`; empty
    where it could not come back.
    """
    program = _resolve(command.argv[0], command.env.get("PATH", os.defpath))
    if program is None or command.user.uid is not None or len(home) != len(command.procs_files):
        return spawn(command)
    try:
        pid = _spawn(command, program, home)
    except (OSError, ValueError):  # ValueError: a NUL in an argument, an `=` in a variable's name
        return spawn(command)  # which tells what is wrong where it belongs
    with contextlib.suppress(OSError):  # gone already, or may not be lowered
        write(f"/proc/{pid}/oom_score_adj", OOM_SCORE_ADJ)
    return pid, -1


def _spawn(command: Command, program: str, home: list[str]) -> int:
    os.chdir(command.directory)
    try:
        for path in command.procs_files:
            write(path, "0")
        return os.posix_spawn(
            program,
            command.argv,
            command.env,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, command.null_fd, 0),
                (os.POSIX_SPAWN_DUP2, command.output_fd, 1),
                (os.POSIX_SPAWN_DUP2, command.output_fd, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=RESET,
        )
    finally:
        os.chdir("/")
        _come_home(home)


def _come_home(home: list[str]) -> None:
    for path in home:
        try:
            write(path, "0")
        except OSError as error:
            # Killing the build's cgroup would now kill the runner: better to end at once and be replaced.
            raise RuntimeError(f"the runner cannot leave a build's cgroup for {path}: {error}") from error


def _resolve(name: str, search_path: str) -> str | None:
    """The program's file, looked up as the build itself would."""
    if "/" in name:
        return name
    if "\0" in name + search_path:
        return None  # no file's name: `spawn` says so where it belongs
    for directory in search_path.split(":"):
        candidate = os.path.join(directory, name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    return None
