"""The agent's side of the runner: connect to it, or start one, and have builds started and ended.

The runner outlives the agent, so nothing here owns it: closing the client leaves builds running.
"""

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import trio
from gradient_protocol.at_once import read_when_ready, write_at_once

from gradient_worker.runner import layout
from gradient_worker.runner.layout import ExitReason
from gradient_worker.runner.options import RunnerOptions
from gradient_worker.runner.values import (
    BuildExit,
    BuildSpec,
    RunnerBuild,
    RunnerGone,
    RunnerInfo,
    RunnerRefused,
)

__all__ = [
    "RunnerClient",
    "connect",
    "connect_or_spawn",
]

_ANSWER_BYTES_MAX = 16 << 20
_CONNECT_SECS = 15.0
_HELLO_SECS = 5.0
_RETRY_SECS = 0.02
_ALREADY_RUNNING = 4


@dataclass(slots=True)
class _Call:
    """A request that waits for its answer."""

    id: int
    request: bytes
    done: trio.Event = field(default_factory=trio.Event)
    answer: dict[str, Any] | None = None


class RunnerClient:
    """A connection to the runner. Start `run` in a nursery; every call may be made from any task."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._calls: dict[int, _Call] = {}
        self._ends: dict[str, _Call] = {}
        self._last_id = 0
        self._send_lock = trio.StrictFIFOLock()
        self._gone = False

    async def start(self, spec: BuildSpec) -> RunnerBuild:
        """Starts a build, or returns the one that this assignment has already, running or ended.

        Its end is asked for in the same breath, for `wait`. Raises RunnerRefused when it cannot be
        started, RunnerGone when there is no runner any more.
        """
        fields: dict[str, object] = {
            "assignment_id": spec.assignment_id,
            "derivation_hash": spec.derivation_hash,
            "argv": list(spec.argv),
            "env": dict(spec.env),
            "timeout_secs": spec.timeout_secs,
            "max_silent_secs": spec.max_silent_secs,
            "log_limit_bytes": spec.log_limit_bytes,
        }
        start, end = self._call("start", spec=fields), self._call("wait", assignment_id=spec.assignment_id)
        await self._send(start, end)
        build = _build_of((await _answer(start))["build"])
        self._ends[spec.assignment_id] = end
        return build

    async def wait(self, assignment_id: str) -> BuildExit:
        """The end of a build, at once if it has ended. Raises RunnerGone, RunnerRefused if unknown."""
        asked = self._ends.get(assignment_id)
        if asked is not None:
            return _exit_of((await _answer(asked))["exit"])
        return _exit_of((await self._ask("wait", assignment_id=assignment_id))["exit"])

    async def kill(self, assignment_id: str) -> None:
        """Asks for a build's end and does not wait for it: `wait` then returns, reason killed."""
        await self._ask("kill", assignment_id=assignment_id)

    async def forget(self, assignment_id: str) -> None:
        """Removes directory, result and cgroup of an ended build; nothing if it is not known."""
        self._ends.pop(assignment_id, None)
        await self._ask("forget", assignment_id=assignment_id)

    async def list(self) -> list[RunnerBuild]:
        """All builds that were started and not forgotten."""
        return [_build_of(fields) for fields in (await self._ask("list"))["builds"]]

    async def stop_runner(self) -> None:
        """Has the runner end its builds (reason runner-died) and itself; does not wait for it."""
        await self._ask("stop")

    async def info(self) -> RunnerInfo:
        """What the runner says of itself."""
        fields = await self._ask("hello")
        return RunnerInfo(
            pid=fields["pid"],
            cgroups={name: Path(path) for name, path in fields["cgroups"].items()},
            cgroup_reason=fields["cgroup_reason"],
            build_users=tuple(fields["build_users"]),
            detached=fields["detached"],
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reads answers until the connection ends; every call then raises RunnerGone. Never raises it."""
        unpacker = msgpack.Unpacker(max_buffer_size=_ANSWER_BYTES_MAX)
        task_status.started()
        try:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while data := await read_when_ready(self._stream, 1 << 16):
                    unpacker.feed(data)
                    for answer in unpacker:
                        self._settle(answer)
        finally:
            self._gone = True
            for call in self._calls.values():
                call.done.set()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await self._stream.aclose()

    @property
    def is_gone(self) -> bool:
        """Whether the connection has ended."""
        return self._gone

    async def aclose(self) -> None:
        """Ends the connection; the builds go on."""
        await self._stream.aclose()

    def _settle(self, answer: dict[str, Any]) -> None:
        call = self._calls.pop(answer.get("id", 0), None)
        if call is not None:
            call.answer = answer
            call.done.set()

    async def _ask(self, op: str, **fields: object) -> dict[str, Any]:
        call = self._call(op, **fields)
        await self._send(call)
        return await _answer(call)

    def _call(self, op: str, **fields: object) -> _Call:
        self._last_id += 1
        return _Call(self._last_id, msgpack.packb({"id": self._last_id, "op": op, **fields}))

    async def _send(self, *calls: _Call) -> None:
        """Whole requests or the end of the connection: half a one would garble all that follow.

        From here on their answers come, whether or not somebody waits for them.
        """
        try:
            self._send_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._send_lock.acquire()
        try:
            if self._gone:
                raise RunnerGone("the runner is gone")
            self._calls.update((call.id, call) for call in calls)
            data = b"".join(call.request for call in calls)
            done = write_at_once(self._stream, data)
            if done < len(data):
                await self._send_rest(data[done:])
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise RunnerGone("the runner is gone") from error
        finally:
            self._send_lock.release()

    async def _send_rest(self, data: bytes) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CONNECT_SECS):
            await self._stream.send_all(data)
            return
        await self._stream.aclose()
        raise RunnerGone("the runner does not take requests")


async def _answer(call: _Call) -> dict[str, Any]:
    await call.done.wait()
    if call.answer is None:
        raise RunnerGone("the runner is gone")
    if "error" in call.answer:
        raise RunnerRefused(call.answer["error"])
    return call.answer


async def connect(base_dir: str | os.PathLike[str]) -> RunnerClient | None:
    """A client of the runner of a base directory; None when there is none."""
    try:
        runner_dir_fd = os.open(Path(base_dir) / layout.RUNNER, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        # By way of the directory's descriptor, for a socket's address has room for 107 bytes only.
        stream = await trio.open_unix_socket(f"/proc/self/fd/{runner_dir_fd}/socket")
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
        return None
    finally:
        os.close(runner_dir_fd)
    alive = False
    try:
        alive = await _is_alive(stream)
    finally:
        if not alive:
            await trio.aclose_forcefully(stream)
    return RunnerClient(stream) if alive else None


async def _is_alive(stream: trio.abc.Stream) -> bool:
    """Whether a runner answers: one that is ending still takes connections for a moment."""
    unpacker = msgpack.Unpacker(max_buffer_size=_ANSWER_BYTES_MAX)
    with trio.move_on_after(_HELLO_SECS), contextlib.suppress(trio.BrokenResourceError):
        await stream.send_all(msgpack.packb({"id": 0, "op": "hello"}))
        while data := await stream.receive_some(1 << 16):
            unpacker.feed(data)
            for answer in unpacker:
                return "pid" in answer
    return False


async def connect_or_spawn(options: RunnerOptions) -> RunnerClient:
    """A client of the runner that is there, else of one started now, detached from this process.

    Several may call this at once: one of the runners gets the lock, all are connected to it. Raises
    RunnerGone with the runner's own words when none can be had within 15 s.
    """
    said = "it did not come up in time"
    with trio.move_on_after(_CONNECT_SECS):
        while True:
            client = await connect(options.base_dir)
            if client is not None:
                return client
            status, said = await _spawn(options)
            if status not in (0, _ALREADY_RUNNING):
                break
            if status == _ALREADY_RUNNING:
                await trio.sleep(_RETRY_SECS)
    raise RunnerGone(f"no build runner in {options.base_dir}: {said.strip() or 'it says nothing'}")


async def _spawn(options: RunnerOptions) -> tuple[int, str]:
    detached = RunnerOptions(
        base_dir=options.base_dir,
        orphan_kill_secs=options.orphan_kill_secs,
        cgroup=options.cgroup,
        grace_secs=options.grace_secs,
        detach=True,
    )
    command = [sys.executable, "-I", "-m", "gradient_worker.runner", *detached.argv()]
    done = await trio.run_process(
        command, check=False, capture_stdout=True, capture_stderr=True, start_new_session=True, cwd="/"
    )
    return done.returncode, done.stderr.decode(errors="replace")


def _build_of(fields: dict[str, Any]) -> RunnerBuild:
    return RunnerBuild(
        assignment_id=fields["assignment_id"],
        started_at=fields["started_at"],
        exit=None if fields["exit"] is None else _exit_of(fields["exit"]),
        cgroups={name: Path(path) for name, path in fields["cgroups"].items()},
    )


def _exit_of(fields: dict[str, Any]) -> BuildExit:
    return BuildExit(
        code=fields["code"],
        signal=fields["signal"],
        reason=ExitReason(fields["reason"]),
        started_at=fields["started_at"],
        ended_at=fields["ended_at"],
        duration_secs=fields["duration_secs"],
        ended_steady=fields.get("ended_steady"),  # an older runner does not say
        oom_killed=fields["oom_killed"],
        host_killed=fields["host_killed"],
        log_bytes=fields["log_bytes"],
        log_discarded_bytes=fields["log_discarded_bytes"],
        message=fields["message"],
    )
