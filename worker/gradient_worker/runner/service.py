"""The runner's loop: one thread, one selector; it waits for nothing but the selector.

What it answers (docs/runner.md has the fields): `hello`, `start`, `wait`, `kill`, `forget`,
`list`, `stop`.
"""

# ruff: noqa: PTH105
# (pathlib would cost this small process 1 MiB)

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct

from gradient_worker.runner import cgroups, files, layout
from gradient_worker.runner.build import Build, Host
from gradient_worker.runner.connection import BadRequest, Connection
from gradient_worker.runner.layout import ExitReason
from gradient_worker.runner.lifecycle import Phase
from gradient_worker.runner.manager import Manager
from gradient_worker.runner.saying import say
from gradient_worker.runner.spawn import User

__all__ = ["STOP_SECS", "Service"]

_CONNECTIONS_MAX = 16
_SELECT_SECS_MAX = 3600.0
STOP_SECS = 15.0
_NEVER = float("inf")


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """A request that cannot be done; the text goes to the agent."""


class Service:
    """All builds of one base directory, and the connections of their agent."""

    def __init__(
        self,
        *,
        builds_dir: str,
        listener: socket.socket,
        host: Host,
        users: list[User],
        orphan_kill_secs: float,
        cgroup_reason: str,
        detached: bool,
        manager: Manager,
    ) -> None:
        self._builds_dir = builds_dir
        self._listener = listener
        self._host = host
        self._users = users
        self._orphan_kill_secs = orphan_kill_secs
        self._cgroup_reason = cgroup_reason
        self._detached = detached
        self._manager = manager
        self._clock = host.clock
        self._selector = selectors.DefaultSelector()
        self._builds: dict[str, Build] = {}
        self._outputs: dict[str, int] = {}
        self._waiting: dict[str, list[tuple[Connection, object]]] = {}
        self._connections: list[Connection] = []
        self._alone_since = host.clock()
        self._stop_until = _NEVER
        self._ops = {
            "hello": self._hello,
            "start": self._start,
            "kill": self._kill,
            "forget": self._forget,
            "list": self._list,
            "stop": self._stop,
        }

    def adopt(self, builds: list[Build]) -> None:
        """Takes over what an earlier runner left (ended, all of it)."""
        self._builds.update((build.assignment_id, build) for build in builds)

    def serve(self, wakeup_fd: int) -> None:
        """Runs until told to stop or orphaned; `wakeup_fd` gives the numbers of signals that came."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
        self._selector.register(wakeup_fd, selectors.EVENT_READ, wakeup_fd)
        self._tick()
        while not self._is_done():
            for key, _ in self._selector.select(self._select_secs()):
                if isinstance(key.data, Build):
                    self._on_output(key.data)
                elif isinstance(key.data, Connection):
                    self._on_connection(key.data)
                elif key.data is self._listener:
                    self._on_connect()
                else:
                    self._on_signals(os.read(wakeup_fd, 512))
            self._reap()
            self._tick()
            self._flush()
        for connection in list(self._connections):
            self._disconnect(connection)
        self._selector.close()
        for build in self._builds.values():
            cgroups.remove(build.group)  # stopped after its agent, or orphaned: nobody will read them
        cgroups.remove(self._host.group)
        self._host.skeletons.clear()

    def stop(self, why: str) -> None:
        """Ends all builds, and then the loop."""
        if self._stop_until == _NEVER:
            say(f"{why}: builds to end: {len(self._running())}")
            self._stop_until = self._clock() + self._host.grace_secs + STOP_SECS
            self._manager.stopping(why)
        for build in self._running():
            build.stop(ExitReason.RUNNER_DIED)

    def _is_done(self) -> bool:
        if self._stop_until == _NEVER:
            return False
        return not self._running() or self._clock() >= self._stop_until

    def _running(self) -> list[Build]:
        return [build for build in self._builds.values() if build.exit is None]

    def _select_secs(self) -> float:
        wanted = min((build.next_tick() for build in self._running()), default=_NEVER)
        if not self._connections and self._stop_until == _NEVER:
            wanted = min(wanted, self._alone_since + self._orphan_kill_secs)
        wanted = min(wanted, self._stop_until, self._manager.next_tick(self._status()))
        return min(max(0.0, wanted - self._clock()), _SELECT_SECS_MAX)

    def _tick(self) -> None:
        now = self._clock()
        self._manager.tick(now, self._status())
        for build in self._running():
            if now >= build.next_tick():
                build.tick()
                self._settle(build)
        if not self._connections and now >= self._alone_since + self._orphan_kill_secs:
            self.stop(f"no agent for {self._orphan_kill_secs:g} s")

    def _status(self) -> str:
        running = len(self._running())
        agent = "agent connected" if self._connections else "no agent"
        return f"{agent}; builds: {running} running, {len(self._builds) - running} ended and kept"

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self.stop("told to stop")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            build = self._host.known_pids.pop(pid, None)
            self._host.helpers.discard(pid)
            if build is not None:  # else a helper of no build, or an orphan that became ours
                build.exited(pid, status)
                self._settle(build)

    def _settle(self, build: Build) -> None:
        """Writes down and tells the end of a build once it has ended."""
        if build.exit is None or build.phase is not Phase.ENDED:
            return
        self._forget_output(build)
        try:
            files.write_record(f"{build.root}/{layout.RESULT}", build.exit)
        except OSError as error:
            say(f"{build.assignment_id}: the result could not be written: {error}")
        for connection, request_id in self._waiting.pop(build.assignment_id, []):
            self._answer(connection, {"id": request_id, "exit": build.exit})

    def _on_output(self, build: Build) -> None:
        if build.assignment_id not in self._outputs or build.spool is None:
            return  # ended in this very round
        if not build.spool.drain(self._clock()):
            self._forget_output(build)  # closed by the build, which may go on

    def _forget_output(self, build: Build) -> None:
        fd = self._outputs.pop(build.assignment_id, None)
        if fd is not None:
            self._selector.unregister(fd)

    def _on_connect(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError as error:  # gone again, or no descriptor is left: no build must end for that
            say(f"a connection could not be taken: {error}")
            return
        _, uid, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        allowed = uid in (0, os.getuid(), self._host.agent_uid)
        if not allowed or len(self._connections) >= _CONNECTIONS_MAX:
            say(f"refused a connection of uid {uid}")
            connected.close()
            return
        connection = Connection(connected)
        self._connections.append(connection)
        connection.watched = selectors.EVENT_READ
        self._selector.register(connected, selectors.EVENT_READ, connection)

    def _disconnect(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        for waiting in self._waiting.values():
            waiting[:] = [entry for entry in waiting if entry[0] is not connection]
        if not self._connections:
            self._alone_since = self._clock()

    def _on_connection(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        try:
            requests = connection.receive()
            for request in requests or []:
                self._on_request(connection, request)
        except (OSError, BadRequest) as error:
            say(f"a connection broke: {error}")
            requests = None
        if requests is None:
            self._disconnect(connection)

    def _flush(self) -> None:
        """One write for all that a turn of the loop had to answer."""
        for connection in list(self._connections):
            try:
                connection.flush()
            except OSError as error:
                say(f"a connection broke: {error}")
                self._disconnect(connection)
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
            if wanted != connection.watched:
                connection.watched = wanted
                self._selector.modify(connection.socket, wanted, connection)

    def _on_request(self, connection: Connection, request: dict[str, object]) -> None:
        request_id, op = request.get("id"), request.get("op")
        try:
            if op == "wait":
                self._wait(connection, request_id, request)
                return
            handler = self._ops.get(str(op))
            if handler is None:
                raise Refused(f"unknown request {op}")
            answer = handler(request)
        except Refused as refusal:
            answer = {"error": str(refusal)}
        connection.send({"id": request_id, **answer})

    def _answer(self, connection: Connection, answer: dict[str, object]) -> None:
        try:
            connection.send(answer)
        except BadRequest as error:
            say(f"a connection broke: {error}")
            self._disconnect(connection)

    def _hello(self, _: dict[str, object]) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "cgroups": self._host.group,
            "cgroup_reason": self._cgroup_reason,
            "detached": self._detached,
            "build_users": [user.name for user in self._users if user.uid is not None],
        }

    def _list(self, _: dict[str, object]) -> dict[str, object]:
        return {"builds": [build.describe() for build in self._builds.values()]}

    def _stop(self, _: dict[str, object]) -> dict[str, object]:
        self.stop("told to stop by the agent")
        return {}

    def _start(self, request: dict[str, object]) -> dict[str, object]:
        spec = request.get("spec")
        if not isinstance(spec, dict):
            raise Refused("start needs a spec")
        assignment_id, derivation_hash = str(spec.get("assignment_id")), str(spec.get("derivation_hash"))
        known = self._builds.get(assignment_id)
        if known is not None:
            return {"build": known.describe()}
        if not (layout.is_safe_name(assignment_id) and layout.is_safe_name(derivation_hash)):
            raise Refused("assignment_id and derivation_hash must be plain names")
        if self._stop_until != _NEVER:
            raise Refused("the runner is ending")
        build = Build(assignment_id, f"{self._builds_dir}/{assignment_id}", self._free_user(), self._host)
        try:
            build.start(spec)
        except (OSError, KeyError, TypeError, ValueError) as error:
            self._host.skeletons.remove(build.root)
            raise Refused(f"the build could not be started: {error}") from error
        self._builds[assignment_id] = build
        if build.spool is not None:
            self._outputs[assignment_id] = build.spool.read_fd
            self._selector.register(build.spool.read_fd, selectors.EVENT_READ, build)
        return {"build": build.describe()}

    def _free_user(self) -> User:
        taken = {build.user.name for build in self._running()}
        for user in self._users:
            if user.uid is None or user.name not in taken:
                return user
        raise Refused(f"all {len(self._users)} build users are taken: add users gradient-build-N")

    def _wait(self, connection: Connection, request_id: object, request: dict[str, object]) -> None:
        build = self._known(request)
        if build.exit is not None:
            connection.send({"id": request_id, "exit": build.exit})
        else:
            self._waiting.setdefault(build.assignment_id, []).append((connection, request_id))

    def _kill(self, request: dict[str, object]) -> dict[str, object]:
        self._known(request).stop(ExitReason.KILLED)
        return {}

    def _forget(self, request: dict[str, object]) -> dict[str, object]:
        build = self._builds.get(str(request.get("assignment_id")))
        if build is None:
            return {}
        if build.exit is None:
            raise Refused("the build still runs: kill it first")
        del self._builds[build.assignment_id]
        if not cgroups.remove(build.group):
            say(f"{build.assignment_id}: its cgroup is still in use")
        if not self._host.skeletons.remove(build.root):
            trash = f"{self._builds_dir}/{layout.TRASH_PREFIX}{build.assignment_id}"
            try:
                os.replace(build.root, trash)
                self._host.helpers.add(files.run_aside(lambda: files.throw_away(trash)))
            except OSError as error:
                raise Refused(f"{build.root} could not be removed: {error}") from error
        return {}

    def _known(self, request: dict[str, object]) -> Build:
        build = self._builds.get(str(request.get("assignment_id")))
        if build is None:
            raise Refused("unknown build")
        return build
