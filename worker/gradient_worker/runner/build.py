"""One build at the runner: carries out what its life (`lifecycle`) demands.

Nothing here waits. `Build` is told of events and of the time, and says when it wants to be told again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from gradient_worker.runner import cgroups, files, layout, processes
from gradient_worker.runner.launch import launch
from gradient_worker.runner.layout import ExitReason
from gradient_worker.runner.lifecycle import Act, Event, Phase, step
from gradient_worker.runner.spawn import Command, User
from gradient_worker.runner.spool import Spool

__all__ = ["Build", "Host"]

_KILL_AGAIN_SECS = 0.05
_KILL_AGAIN_MAX_SECS = 5.0
_SWEEP_AGAIN_SECS = 0.005
_SWEEP_SECS = 10.0
_OOM_KILLS_SECS = 1.0
_NEVER = float("inf")


class Host:
    """What all builds of one runner share.

    `agent_uid`, `agent_gid`: whom ended outputs belong to. `group`: where builds get their cgroups, empty
    if nowhere; `home`: the runner's own, for `launch`. `clock` gives monotonic seconds, `wall` seconds
    since the epoch.
    """

    __slots__ = (
        "_oom_kills",
        "_oom_kills_at",
        "agent_gid",
        "agent_uid",
        "clock",
        "grace_secs",
        "group",
        "helpers",
        "home",
        "known_pids",
        "null_fd",
        "skeletons",
        "wall",
    )

    def __init__(
        self,
        *,
        grace_secs: float,
        group: cgroups.Group,
        home: list[str],
        agent_uid: int,
        agent_gid: int,
        null_fd: int,
        skeletons: files.Skeletons,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.wall = wall
        self.grace_secs = grace_secs
        self.group = group
        self.home = home
        self.agent_uid = agent_uid
        self.agent_gid = agent_gid
        self.null_fd = null_fd
        self.skeletons = skeletons
        self.known_pids: dict[int, Build] = {}
        """Processes of builds, main ones and helpers, that the runner started and has not reaped."""
        self._oom_kills: int | None = None
        self._oom_kills_at = -_NEVER
        self.helpers: set[int] = set()
        """Helpers of no build."""

    def recent_oom_kills(self, now: float) -> int | None:
        """As `cgroups.host_oom_kills`, up to a second old: reading it costs a tenth of a fork."""
        if now >= self._oom_kills_at + _OOM_KILLS_SECS:
            self._oom_kills, self._oom_kills_at = cgroups.host_oom_kills(), now
        return self._oom_kills


class Build:
    """A build from its start on. `exit` is None until it has ended, then the record of its end."""

    def __init__(self, assignment_id: str, root: str, user: User, host: Host) -> None:
        self.assignment_id = assignment_id
        self.root = root
        self.user = user
        self._host = host
        self.group: cgroups.Group = {}
        self.phase = Phase.RUNNING
        self.exit: dict[str, object] | None = None
        self.started_at = 0.0
        self.spool: Spool | None = None
        self._pid = 0
        self._fault_fd = -1
        self._started = 0.0
        self._timeout_at = _NEVER
        self._max_silent_secs = _NEVER
        self._timer = _NEVER
        self._sweep_until = _NEVER
        self._kill_again_secs = _KILL_AGAIN_SECS
        self._reason = ExitReason.EXITED
        self._message = ""
        self._status: int | None = None
        self._duration_secs = 0.0
        self._host_oom_kills: int | None = None

    @classmethod
    def ended(cls, assignment_id: str, root: str, exit_record: dict[str, object], host: Host) -> Build:
        """A build that ended under an earlier runner."""
        build = cls(assignment_id, root, User(""), host)
        build.phase = Phase.ENDED
        # Perhaps before the host started anew, and its steady clock with it.
        build.exit = {**exit_record, "ended_steady": None}
        build.started_at = float(str(exit_record.get("started_at", 0.0)))
        return build

    def start(self, spec: dict[str, object]) -> None:
        """Makes directory and cgroup and forks. Raises OSError or ValueError with nothing left running."""
        host, now = self._host, self._host.clock()
        user = self.user
        host.skeletons.make(
            self.root,
            os.getuid() if user.uid is None else user.uid,
            os.getgid() if user.gid is None else user.gid,
        )
        self._started, self.started_at = now, host.wall()
        self._timeout_at = now + float(str(spec["timeout_secs"]))
        self._max_silent_secs = float(str(spec["max_silent_secs"]))
        limit = spec.get("log_limit_bytes")
        self.spool = Spool(f"{self.root}/{layout.LOG}", limit if isinstance(limit, int) else None, now)
        try:
            if host.group:
                name = f"{layout.CGROUP_PREFIX}{spec['derivation_hash']}-{self.user.name}"
                self.group = cgroups.create(host.group, name)
                self._host_oom_kills = host.recent_oom_kills(now)
            self._pid, self._fault_fd = launch(self._command(spec), host.home)
        except BaseException:
            self.spool.finish(now)
            cgroups.remove(self.group)
            raise
        self.spool.close_write_end()
        host.known_pids[self._pid] = self
        self._record_process()

    def stop(self, reason: ExitReason) -> None:
        """Somebody wants the end of this build."""
        if self.phase is Phase.RUNNING:
            self._reason = reason
        self._feed(Event.STOP)

    def exited(self, pid: int, status: int) -> None:
        """A process of this build, the main one or the helper, was reaped."""
        if pid == self._pid:
            now = self._host.clock()
            self._status = status
            self._duration_secs = now - self._started
            self._sweep_until = now + _SWEEP_SECS
            self._read_fault()
            self._feed(Event.EXITED)
        else:
            if status != 0:
                self._fail("outputs could not be handed over: the log of the runner says why")
            self._feed(Event.HANDED_OVER)

    def tick(self) -> None:
        """Looks at the deadlines."""
        now = self._host.clock()
        if self.phase is Phase.RUNNING:
            if now >= self._timeout_at:
                self.stop(ExitReason.TIMEOUT)
            elif now >= self._silent_at():
                self.stop(ExitReason.SILENT)
        elif now >= self._timer:
            self._feed(Event.TIMER)

    def next_tick(self) -> float:
        """When `tick` has something to do, monotonic seconds."""
        if self.phase is Phase.RUNNING:
            return min(self._timeout_at, self._silent_at())
        return self._timer

    def describe(self) -> dict[str, object]:
        """The build as the agent sees it."""
        return {
            "assignment_id": self.assignment_id,
            "state": "ended" if self.exit is not None else "running",
            "started_at": self.started_at,
            "cgroups": self.group,
            "exit": self.exit,
        }

    def _fail(self, message: str) -> None:
        self._reason, self._message = ExitReason.RUNNER_ERROR, message

    def _silent_at(self) -> float:
        last = self.spool.last_output if self.spool is not None else self._started
        return last + self._max_silent_secs

    def _feed(self, event: Event) -> None:
        self.phase, act = step(self.phase, event)
        if act is Act.NOTHING:
            return
        self._timer = _NEVER
        now = self._host.clock()
        if act is Act.TERMINATE:
            self._terminate()
            self._timer = now + self._host.grace_secs
        elif act is Act.KILL:
            self._kill()
            self._timer = now + self._kill_again_secs
            self._kill_again_secs = min(2 * self._kill_again_secs, _KILL_AGAIN_MAX_SECS)
        elif act is Act.SWEEP:
            self._sweep(now)
        elif act is Act.HAND_OVER:
            self._hand_over()
        else:
            self._finish(now)

    def _terminate(self) -> None:
        # Not reaped yet, so the pid is still this process's, if only as a zombie.
        try:
            os.killpg(self._pid, signal.SIGTERM)
        except ProcessLookupError:
            os.kill(self._pid, signal.SIGTERM)  # between fork and setsid there is no group
        except PermissionError:
            return  # a program that changed its user; the grace ends with SIGKILL to what can be killed

    def _kill(self) -> None:
        if self.group:
            cgroups.kill(self.group)
        else:
            for pid in self._leftovers():
                processes.kill_tree(pid)
        processes.kill_tree(self._pid)

    def _sweep(self, now: float) -> None:
        if self.group:
            empty = cgroups.is_empty(self.group)
            if not empty:
                cgroups.kill(self.group)
        else:
            left = self._leftovers()
            empty = not left
            for pid in left:
                processes.kill_tree(pid)
        if not empty and now >= self._sweep_until:
            self._message = "some of its processes could not be killed"
            empty = True
        if empty:
            self._feed(Event.EMPTY)
        else:
            self._timer = now + _SWEEP_AGAIN_SECS

    def _leftovers(self) -> list[int]:
        """Orphans that the runner inherited and that were this build's, as far as can be told."""
        host = self._host
        ours = host.known_pids.keys() | host.helpers
        strangers = [pid for pid in processes.children_of(os.getpid()) if pid not in ours]
        if not strangers:
            return []
        others = any(build is not self for build in host.known_pids.values())
        return [pid for pid in strangers if not others or self._is_mine(pid)]

    def _is_mine(self, pid: int) -> bool:
        # HOME and TMPDIR of a build lie in its directory (operations.md, "Recipes").
        return processes.session_of(pid) == self._pid or f"={self.root}/".encode() in (
            processes.environment_of(pid)
        )

    def _hand_over(self) -> None:
        host, uid = self._host, self.user.uid if self.user.uid is not None else os.getuid()
        if uid == host.agent_uid:
            self._feed(Event.HANDED_OVER)
            return
        outputs = f"{self.root}/{layout.OUTPUTS}"
        try:
            helper = files.run_aside(lambda: files.hand_over(outputs, uid, host.agent_uid, host.agent_gid))
        except OSError as error:
            self._fail(f"outputs could not be handed over: {error}")
            self._feed(Event.HANDED_OVER)
        else:
            host.known_pids[helper] = self

    def _finish(self, now: float) -> None:
        spool = self.spool
        if spool is not None:
            spool.finish(now)
        oom_kills = cgroups.oom_kills(self.group) if self.group else None
        status = self._status
        self.exit = {
            "reason": str(self._reason),
            "message": self._message,
            "code": os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            "started_at": self.started_at,
            "ended_at": self._host.wall(),
            "ended_steady": self._host.clock(),
            "duration_secs": self._duration_secs,
            "oom_killed": bool(oom_kills),
            "host_killed": self._host_killed(oom_kills),
            "log_bytes": spool.kept if spool is not None else 0,
            "log_discarded_bytes": spool.discarded if spool is not None else 0,
        }

    def _host_killed(self, oom_kills: int | None) -> bool:
        """Whether the kernel, while this build ran, also killed outside its cgroup for want of memory."""
        if not oom_kills or self._host_oom_kills is None:
            return False
        host_oom_kills = cgroups.host_oom_kills()
        return host_oom_kills is not None and host_oom_kills - self._host_oom_kills > oom_kills

    def _read_fault(self) -> None:
        if self._fault_fd < 0:
            return
        try:
            fault = os.read(self._fault_fd, 4096)
        except BlockingIOError:
            fault = b""
        os.close(self._fault_fd)
        self._fault_fd = -1
        if fault:
            self._fail(fault.decode(errors="replace"))

    def _command(self, spec: dict[str, object]) -> Command:
        argv, env = spec["argv"], spec["env"]
        if not isinstance(argv, list) or not argv or not isinstance(env, dict) or self.spool is None:
            raise OSError("a build needs argv and env")
        return Command(
            argv=argv,
            env=env,
            directory=f"{self.root}/{layout.BUILD}",
            user=self.user,
            procs_files=cgroups.procs_files(self.group),
            output_fd=self.spool.write_fd,
            null_fd=self._host.null_fd,
        )

    def _record_process(self) -> None:
        record: dict[str, object] = {
            "pid": self._pid,
            "start_ticks": processes.start_ticks(self._pid),
            "started_at": self.started_at,
            "cgroups": self.group,
        }
        try:
            files.write_record(f"{self.root}/{layout.PROCESS}", record)
        except OSError:
            # Only a runner that dies with a full disk would miss it: the next one still finds the
            # processes, by cgroup and by environment, but knows nothing of the build.
            return
