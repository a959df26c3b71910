"""Control groups of the builds: finding the delegated one, making, killing and removing those below it.

A group is a dict from hierarchy to directory. With cgroup v2 alone it is `{"unified": ...}`. With v1 it
has `memory`, and beside it what the host has and we may write: `unified` (a v2 hierarchy without the
memory controller, good for killing and CPU time), or `cpuacct` and `freezer`; and `blkio`.
Measuring is the agent's (`meters/cgroup.py`); here only what starting, stopping and the verdict
"killed for memory" need.
"""

# ruff: noqa: PTH102, PTH103, PTH106, PTH110, PTH112, PTH118, PTH120, PTH123
# (pathlib would cost this small process 1 MiB)

from __future__ import annotations

import os
import signal

__all__ = [
    "Group",
    "create",
    "discover",
    "host_oom_kills",
    "is_empty",
    "kill",
    "oom_kills",
    "own_group",
    "prepare",
    "procs_files",
    "remove",
]

Group = dict[str, str]
"""Hierarchy to directory; empty: builds have no cgroup."""

_V1_HIERARCHIES = ("memory", "blkio", "cpuacct", "freezer")
_V2_CONTROLLERS = ("memory", "io", "cpu", "pids")
_SAME_NAME_MAX = 64
_DELEGATED_XATTRS = ("trusted.delegate", "user.delegate")


def discover(setting: str, mountinfo: str, own: str, *, under_systemd: bool) -> tuple[Group, str]:
    """Where builds may have cgroups, and one line that says why there or why nowhere.

    `setting`: `auto`, `off` or a path (operations.md, `worker.build.cgroup`). `mountinfo` and `own`: the
    texts of /proc/self/mountinfo and /proc/self/cgroup. `under_systemd`: a group that systemd has not
    marked as delegated is then left alone, for systemd may rearrange it.
    """
    if setting == "off":
        return {}, "switched off by worker.build.cgroup"
    mounts = _mounts(mountinfo)
    if not mounts:
        return {}, "no cgroup file system is mounted"
    wanted = "memory" if "memory" in mounts else "unified"
    if setting == "auto":
        paths = _own_paths(own, mounts)
        if wanted not in paths:
            return {}, "this process's own cgroup is not visible under /sys/fs/cgroup"
    else:
        relative = _below_mount(setting, mounts[wanted][0])
        if relative is None:
            return {}, f"{setting} is not below {mounts[wanted][0]}: name a directory there"
        paths = {name: os.path.join(mount, relative) for name, (mount, _) in mounts.items()}
    top = paths[wanted]
    if setting == "auto" and under_systemd and not _is_delegated(top):
        return {}, f"{top} is not delegated: set Delegate=yes in the runner's unit"
    if not os.path.isdir(top):
        return {}, f"{top} is not there: make it, or set worker.build.cgroup to auto"
    if not (os.access(top, os.W_OK) and os.access(f"{top}/cgroup.procs", os.W_OK)):
        return {}, f"{top} is not writable: set Delegate=yes in the runner's unit, or run as root"
    group = {name: path for name, path in paths.items() if _can_make(path)}
    if "unified" in group and wanted == "memory":
        group.pop("cpuacct", None)
        group.pop("freezer", None)
    return group, f"builds are measured below {top}"


def own_group(mountinfo: str, own: str) -> Group:
    """Where this process is, as far as it can be seen."""
    return _own_paths(own, _mounts(mountinfo))


def prepare(delegated: Group, name: str) -> tuple[Group, str | None]:
    """Makes the group `name` that builds get theirs below; an empty group and a reason if that fails.

    On v2 a group with processes cannot give controllers to its children, so the runner first moves
    itself into a group of its own beside the builds'.
    """
    try:
        if list(delegated) == ["unified"]:
            _enable_controllers(delegated["unified"])
        group = {key: os.path.join(path, name) for key, path in delegated.items()}
        for path in group.values():
            os.makedirs(path, exist_ok=True)
        if list(group) == ["unified"]:
            _write(f"{group['unified']}/cgroup.subtree_control", _enabled(group["unified"]))
    except OSError as error:
        return {}, f"{error.filename or delegated}: {error.strerror}: run the runner in a unit of its own"
    return group, None


def create(parent: Group, name: str) -> Group:
    """A group for one build. Its name is as asked, or with `.2`, `.3`, ... while older ones are unread."""
    for number in range(1, _SAME_NAME_MAX):
        unique = name if number == 1 else f"{name}.{number}"
        group = {key: os.path.join(path, unique) for key, path in parent.items()}
        made: Group = {}
        try:
            for key, path in group.items():
                os.mkdir(path)
                made[key] = path
        except FileExistsError:
            remove(made)
        except OSError:
            remove(made)
            raise
        else:
            return group
    raise OSError(f"{_SAME_NAME_MAX} cgroups named {name} are there: is nobody reading them?")


def procs_files(group: Group) -> list[str]:
    """The files that a process writes itself into, all hierarchies."""
    return [f"{path}/cgroup.procs" for path in group.values()]


def is_empty(group: Group) -> bool:
    """Whether no process is left in the group or below it."""
    if "unified" in group:
        return "populated 1" not in (_read(f"{group['unified']}/cgroup.events") or "")
    return not _pids(group)


def kill(group: Group) -> None:
    """SIGKILL to all processes in the group: by `cgroup.kill`, else frozen first where that is possible.

    Killing is not waiting: call it again until `is_empty`.
    """
    if "unified" in group and os.path.exists(f"{group['unified']}/cgroup.kill"):
        _try_write(f"{group['unified']}/cgroup.kill", "1")
        return
    freezer = group.get("freezer")
    if freezer is not None:
        _try_write(f"{freezer}/freezer.state", "FROZEN")
    elif "unified" in group:
        _try_write(f"{group['unified']}/cgroup.freeze", "1")
    for pid in _pids(group):
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    if freezer is not None:
        _try_write(f"{freezer}/freezer.state", "THAWED")
    elif "unified" in group:
        _try_write(f"{group['unified']}/cgroup.freeze", "0")


def oom_kills(group: Group) -> int | None:
    """Processes of the group that the kernel killed for want of memory; None where it does not count."""
    if "memory" in group:
        return _field(_read(f"{group['memory']}/memory.oom_control"), "oom_kill")
    if "unified" in group:
        return _field(_read(f"{group['unified']}/memory.events"), "oom_kill")
    return None


def host_oom_kills() -> int | None:
    """Processes that the kernel of this host has killed for want of memory since it started."""
    return _field(_read("/proc/vmstat"), "oom_kill")


def remove(group: Group) -> bool:
    """Removes the group with what a build made below it; False if something is still in use."""
    left = [path for path in group.values() if not (_remove_one(path) or _remove_tree(path))]
    return not left


def _remove_tree(path: str) -> bool:
    left = [directory for directory in _tree(path) if not _remove_one(directory)]
    return not left


def _remove_one(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # still in use
    return True


def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """Hierarchy to (mount point, root of the mount); only those that concern builds."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        if kinds[0] == "cgroup2":
            mounts.setdefault("unified", (fields[4], fields[3]))
        elif kinds[0] == "cgroup":
            for option in kinds[2].split(","):
                if option in _V1_HIERARCHIES:
                    mounts.setdefault(option, (fields[4], fields[3]))
    return mounts


def _own_paths(own: str, mounts: dict[str, tuple[str, str]]) -> Group:
    paths: Group = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(",") if controllers else ["unified"]:
            if name not in mounts:
                continue
            mount, root = mounts[name]
            inside = os.path.relpath(path, root)
            if not inside.startswith(".."):
                paths[name] = os.path.normpath(os.path.join(mount, inside))
    return paths


def _below_mount(setting: str, mount: str) -> str | None:
    path = os.path.normpath(setting)
    if path == mount or path.startswith(mount + "/"):
        return os.path.relpath(path, mount)
    return None


def _can_make(path: str) -> bool:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return os.access(path, os.W_OK)


def _is_delegated(path: str) -> bool:
    for name in _DELEGATED_XATTRS:
        try:
            if os.getxattr(path, name) == b"1":
                return True
        except OSError:
            continue
    return False


def _enable_controllers(top: str) -> None:
    own = os.path.join(top, "runner")
    os.makedirs(own, exist_ok=True)
    _write(f"{own}/cgroup.procs", str(os.getpid()))
    _write(f"{top}/cgroup.subtree_control", _enabled(top))


def _enabled(path: str) -> str:
    there = (_read(f"{path}/cgroup.controllers") or "").split()
    return " ".join(f"+{name}" for name in _V2_CONTROLLERS if name in there)


def _pids(group: Group) -> list[int]:
    path = group.get("memory") or next(iter(group.values()))
    texts = [_read(f"{directory}/cgroup.procs") or "" for directory in _tree(path)]
    return [int(word) for text in texts for word in text.split()]


def _tree(path: str) -> list[str]:
    """The directory and all below it, the deepest first."""
    return [directory for directory, _, _ in os.walk(path, topdown=False)] or [path]


def _field(text: str | None, name: str) -> int | None:
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return None  # a file that has vanished or that this kernel does not have


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _try_write(path: str, text: str) -> None:
    try:
        _write(path, text)
    except OSError:
        return  # gone or going; whoever kills looks at `is_empty`
