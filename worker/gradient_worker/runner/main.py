"""Starting the runner: one for each base directory, listening before anybody is told that it is there."""

# ruff: noqa: PTH103, PTH105, PTH108, PTH110, PTH112, PTH116, PTH120, PTH123
# (pathlib would cost this small process 1 MiB)

from __future__ import annotations

import binascii
import fcntl
import os
import pwd
import signal
import socket
import sys

from gradient_protocol.notify import Notifier

from gradient_worker.runner import cgroups, files, layout, processes
from gradient_worker.runner.build import Host
from gradient_worker.runner.manager import Manager
from gradient_worker.runner.options import RunnerOptions
from gradient_worker.runner.recovery import recover
from gradient_worker.runner.saying import say
from gradient_worker.runner.service import Service
from gradient_worker.runner.spawn import User, write

__all__ = ["ALREADY_RUNNING", "RunnerOptions", "run"]

ALREADY_RUNNING = 4
"""Exit status when another runner has this base directory."""

_LISTEN_BACKLOG = 16
_LOG_BYTES_MAX = 1 << 20


def run(options: RunnerOptions) -> int:
    """Runs a runner until it is told to stop or has had no agent for too long; the exit status.

    With `detach` the caller gets the status as soon as the runner listens, and a process of its own goes
    on. Raises nothing for what an operator can cause: one line on standard error says what to do.
    """
    runner_dir = f"{options.base_dir}/{layout.RUNNER}"
    # Taken out of the environment in any case; whoever detaches is nobody's service.
    notifier = Notifier.take(os.environ, os.getpid())
    if options.detach:
        notifier = Notifier(None)
    try:
        agent = _agent_of(options.base_dir)
        os.makedirs(runner_dir, mode=0o711, exist_ok=True)
        os.makedirs(f"{options.base_dir}/{layout.BUILDS}", mode=0o711, exist_ok=True)
        lock_fd = os.open(f"{runner_dir}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        say(f"{options.base_dir} cannot be used: {error.strerror}; give --base-dir a directory of your own")
        return 1
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"another runner serves {options.base_dir} already")
        return ALREADY_RUNNING
    listener = _listen(runner_dir, agent)
    if options.detach:
        if os.fork() != 0:
            return 0
        _leave_caller(runner_dir)
    os.ftruncate(lock_fd, 0)
    os.write(lock_fd, f"{os.getpid()}\n".encode())
    try:
        _serve(options, listener, agent, Manager(notifier))
    finally:
        listener.close()
        os.unlink(f"{runner_dir}/socket")
    return 0


def _serve(options: RunnerOptions, listener: socket.socket, agent: tuple[int, int], manager: Manager) -> None:
    os.umask(0o022)
    wakeup_fd = _catch_signals()
    processes.become_subreaper()
    group, reason = _cgroup(options)
    builds_dir = f"{options.base_dir}/{layout.BUILDS}"
    host = Host(
        grace_secs=options.grace_secs,
        group=group,
        home=_home(group),
        agent_uid=agent[0],
        agent_gid=agent[1],
        null_fd=os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC),
        skeletons=files.Skeletons(builds_dir),
    )
    service = Service(
        builds_dir=builds_dir,
        listener=listener,
        host=host,
        users=_users(),
        orphan_kill_secs=options.orphan_kill_secs,
        cgroup_reason=reason,
        detached=options.detach,
        manager=manager,
    )
    left = recover(builds_dir, host)
    service.adopt(left)
    say(f"serves {options.base_dir}; builds of before: {len(left)}; {reason}")
    service.serve(wakeup_fd)
    say("ended")


def _agent_of(base_dir: str) -> tuple[int, int]:
    """User and group of the agent: the owner of the base directory, where the runner is root."""
    os.makedirs(base_dir, exist_ok=True)
    owner = os.stat(base_dir)
    return (owner.st_uid, owner.st_gid) if os.getuid() == 0 else (os.getuid(), os.getgid())


def _listen(runner_dir: str, agent: tuple[int, int]) -> socket.socket:
    """A socket for the agent alone. Bound by a relative name, for the whole one may exceed 107 bytes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.chdir(runner_dir)
    if os.path.lexists("socket"):
        os.unlink("socket")  # of a runner that is gone: the lock is ours
    umask = os.umask(0o177)
    try:
        listener.bind("socket")
    finally:
        os.umask(umask)
    if os.getuid() == 0:
        os.chown("socket", *agent)
    os.chdir("/")
    listener.listen(_LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


def _leave_caller(runner_dir: str) -> None:
    os.setsid()
    log = f"{runner_dir}/log"
    if os.path.exists(log) and os.stat(log).st_size > _LOG_BYTES_MAX:
        os.replace(log, f"{log}.1")
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.close(null_fd)


def _catch_signals() -> int:
    """A descriptor that gives the number of each signal of interest."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return read_fd


def _cgroup(options: RunnerOptions) -> tuple[cgroups.Group, str]:
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mountinfo = file.read()
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        own = file.read()
    under_systemd = os.path.isdir("/run/systemd/system")
    delegated, reason = cgroups.discover(options.cgroup, mountinfo, own, under_systemd=under_systemd)
    if not delegated:
        return {}, f"no cgroups: {reason}"
    # Several workers may be given the same place; what a crash left must be told apart.
    name = f"gradient-{binascii.crc32(options.base_dir.encode()):08x}"
    group, failure = cgroups.prepare(delegated, name)
    return (group, reason) if failure is None else ({}, f"no cgroups: {failure}")


def _home(group: cgroups.Group) -> list[str]:
    """Where the runner itself is in the hierarchies of the builds; empty if it could not come back.

    It must be the builds' parent or beside it: one further off, managed by somebody else, might be removed
    in the moment when it is empty.
    """
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mountinfo = file.read()
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        own = cgroups.own_group(mountinfo, file.read())
    if not group.keys() <= own.keys():
        return []
    if not all(_is_near(own[name], path) for name, path in group.items()):
        return []
    home = [f"{own[name]}/cgroup.procs" for name in group]
    try:
        for path in home:
            write(path, "0")
    except OSError:
        return []
    return home


def _is_near(own: str, builds: str) -> bool:
    return builds.startswith((f"{own}/", f"{os.path.dirname(own)}/"))


def _users() -> list[User]:
    """Users for builds: `gradient-build-1` and on (systemd/sysusers) when we may become them."""
    own = pwd.getpwuid(os.getuid()).pw_name if _has_entry(os.getuid()) else str(os.getuid())
    users: list[User] = []
    while os.getuid() == 0:
        try:
            entry = pwd.getpwnam(f"gradient-build-{len(users) + 1}")
        except KeyError:
            break
        users.append(User(entry.pw_name, entry.pw_uid, entry.pw_gid))
    return users or [User(own)]


def _has_entry(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def main() -> int:
    """`python -m gradient_worker.runner`: options from the command line."""
    try:
        options = RunnerOptions.parse(sys.argv[1:])
    except ValueError as error:
        sys.stderr.write(f"gradient-worker runner: {error}\n")
        return 2
    return run(options)
