"""What an earlier runner on the same base directory left: kill it, mark it as lost, keep what had ended."""

# ruff: noqa: PTH112, PTH116, PTH118
# (pathlib would cost this small process 1 MiB)

from __future__ import annotations

import os
import time
from functools import partial

from gradient_worker.runner import cgroups, files, layout, processes
from gradient_worker.runner.build import Build, Host
from gradient_worker.runner.layout import ExitReason
from gradient_worker.runner.saying import say

__all__ = ["recover"]

_KILL_SECS = 5.0
_KILL_AGAIN_SECS = 0.01


def recover(builds_dir: str, host: Host) -> list[Build]:
    """All builds that have a directory, all ended; none of their processes is left when this returns."""
    ended: list[Build] = []
    unfinished: dict[str, dict[str, object]] = {}
    for name in files.names(builds_dir):
        root = f"{builds_dir}/{name}"
        process = files.read_record(f"{root}/{layout.PROCESS}")
        result = files.read_record(f"{root}/{layout.RESULT}")
        if process is None and result is None:
            # Trash, spare directories, a start that came to nothing: no build.
            host.helpers.add(files.run_aside(partial(files.throw_away, root)))
        elif result is not None:
            build = Build.ended(name, root, result, host)
            build.group = _group_of(process)
            ended.append(build)
        elif process is not None:
            unfinished[name] = process
    _kill(builds_dir, unfinished, host.group, kept=[build.group for build in ended])
    for name, process in unfinished.items():
        root = f"{builds_dir}/{name}"
        result = _lost(process, root)
        try:
            files.write_record(f"{root}/{layout.RESULT}", result)
        except OSError as error:
            say(f"{name}: that it was lost could not be written down: {error}")
        build = Build.ended(name, root, result, host)
        build.group = _group_of(process)
        ended.append(build)
    return ended


def _kill(
    builds_dir: str,
    unfinished: dict[str, dict[str, object]],
    parent: cgroups.Group,
    kept: list[cgroups.Group],
) -> None:
    for process in unfinished.values():
        pid, ticks = process.get("pid"), process.get("start_ticks")
        if isinstance(pid, int) and ticks is not None and processes.start_ticks(pid) == ticks:
            processes.kill_tree(pid)
    needle = f"={builds_dir}/".encode()
    for pid in processes.mentioning(needle):
        processes.kill_tree(pid)
    read_later = [_group_of(process) for process in unfinished.values()]
    for group in _groups_below(parent):
        deadline = time.monotonic() + _KILL_SECS
        while not cgroups.is_empty(group) and time.monotonic() < deadline:
            cgroups.kill(group)
            time.sleep(_KILL_AGAIN_SECS)
        if group not in kept and group not in read_later:
            cgroups.remove(group)


def _groups_below(parent: cgroups.Group) -> list[cgroups.Group]:
    names = {
        name
        for path in parent.values()
        for name in files.names(path)
        if name.startswith(layout.CGROUP_PREFIX)
    }
    return [{key: os.path.join(path, name) for key, path in parent.items()} for name in sorted(names)]


def _group_of(process: dict[str, object] | None) -> cgroups.Group:
    group = process.get("cgroups") if process is not None else None
    if not isinstance(group, dict):
        return {}
    return {str(key): str(path) for key, path in group.items() if os.path.isdir(str(path))}


def _lost(process: dict[str, object], root: str) -> dict[str, object]:
    try:
        log_bytes = os.stat(f"{root}/{layout.LOG}").st_size
    except FileNotFoundError:
        log_bytes = 0
    return {
        "reason": str(ExitReason.RUNNER_DIED),
        "message": "the runner ended before the build did",
        "code": None,
        "signal": None,
        "started_at": process.get("started_at", 0.0),
        "ended_at": time.time(),
        "duration_secs": None,
        "oom_killed": False,
        "host_killed": False,
        "log_bytes": log_bytes,
        "log_discarded_bytes": 0,
    }
