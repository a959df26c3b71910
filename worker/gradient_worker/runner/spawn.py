"""Starting one build: fork, and in the child everything that has to be so before the program runs.

The parent never waits: what goes wrong before `exec` is read from a pipe when the child is reaped.
`launch` has a cheaper way for builds that run as the runner's own user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal

__all__ = ["HANDLED", "OOM_SCORE_ADJ", "RESET", "Command", "User", "spawn", "write"]

_OWN_FAULT = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EIO})
_NOT_RUNNABLE = 127
OOM_SCORE_ADJ = "500"
HANDLED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
"""The signals that the runner has handlers for."""
RESET = tuple(
    getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ", "SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD")
)


class User:
    """Whom a build runs as. `uid` None: as the runner's own user."""

    __slots__ = ("gid", "name", "uid")

    def __init__(self, name: str, uid: int | None = None, gid: int | None = None) -> None:
        self.name = name
        self.uid = uid
        self.gid = gid


class Command:
    """What the child becomes: program, environment, directory, user, cgroup files to enter, output."""

    __slots__ = ("argv", "directory", "env", "null_fd", "output_fd", "procs_files", "user")

    def __init__(
        self,
        *,
        argv: list[str],
        env: dict[str, str],
        directory: str,
        user: User,
        procs_files: list[str],
        output_fd: int,
        null_fd: int,
    ) -> None:
        self.argv = argv
        self.env = env
        self.directory = directory
        self.user = user
        self.procs_files = procs_files
        self.output_fd = output_fd
        self.null_fd = null_fd


def spawn(command: Command) -> tuple[int, int]:
    """The child's pid, and a pipe that tells what failed before `exec` (empty: nothing). Raises OSError.

    A program that cannot be run (not found, not executable) is the build's own failure: the child says
    so in the build's log and exits with 127, as a shell would.
    """
    fault_fd, fault_write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # A signal between fork and exec must neither run the runner's handlers nor be lost.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        pid = os.fork()
        if pid == 0:
            _become(command, fault_write_fd)
    except OSError:
        os.close(fault_fd)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(fault_write_fd)
    return pid, fault_fd


def _become(command: Command, fault_fd: int) -> None:
    """Runs in the child, and never returns."""
    status = 1
    try:
        _set_up(command)
        status = _execute(command, fault_fd)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the child must not go on as a runner
        os.write(fault_fd, f"{type(error).__name__}: {error}".encode()[:1024])
    finally:
        os._exit(status)


def _set_up(command: Command) -> None:
    os.setsid()
    for path in command.procs_files:
        write(path, "0")
    # Rather one build than the agent or the runner, should the host run out of memory.
    with contextlib.suppress(PermissionError):  # who stands higher already may stay there
        write("/proc/self/oom_score_adj", OOM_SCORE_ADJ)
    os.dup2(command.null_fd, 0)
    os.dup2(command.output_fd, 1)
    os.dup2(command.output_fd, 2)
    os.umask(0o022)
    user = command.user
    if user.uid is not None and user.gid is not None:
        os.fchown(1, user.uid, user.gid)  # so that it can open /dev/stderr
        os.setgroups([])
        os.setgid(user.gid)
        os.setuid(user.uid)
    try:
        os.chdir(command.directory)
    except PermissionError as error:
        whom = f"user {user.name} cannot enter {command.directory}"
        raise PermissionError(f"{whom}: its parents need chmod o+x") from error
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _execute(command: Command, fault_fd: int) -> int:
    try:
        os.execvpe(command.argv[0], command.argv, command.env)  # noqa: S606 - no shell is the point
    except OSError as error:
        if error.errno in _OWN_FAULT:
            os.write(fault_fd, f"exec: {error.strerror}".encode())
        else:
            os.write(2, f"gradient: cannot run {command.argv[0]}: {error.strerror}\n".encode())
    except ValueError as error:  # a NUL in an argument, an `=` in a variable's name
        os.write(2, f"gradient: cannot run {command.argv[0]}: {error}\n".encode())
    return _NOT_RUNNABLE


def write(path: str, text: str) -> None:
    """Writes into a file of the kernel's. Raises OSError."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
