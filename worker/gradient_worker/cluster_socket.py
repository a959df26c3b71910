"""The socket through which a member's processes talk to the others (docs/cluster-programs.md).

One for each running member, the agent's own: `cluster/<assignment>` below the base directory. It is
there while the command runs, an agent that goes leaves it to the next one, and it is removed when the
attempt is over for this member: who finds none knows. A line of JSON comes, a line goes back; one
request at a time on a connection. What is decided is in `member_signals`.
"""

import base64
import contextlib
import os
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog
import trio
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.server import ClusterSignal
from gradient_protocol.messages.shapes import SignalTarget
from gradient_protocol.messages.worker import ClusterSignalReport

from gradient_worker.cluster_requests import (
    BadRequest,
    Enter,
    Receive,
    Request,
    Roster,
    Send,
    Take,
    Wait,
    entry_fields,
    payload_of,
    read_request,
    target_of,
)
from gradient_worker.executor.job import Job, Member, StopCause
from gradient_worker.executor.workshop import Workshop
from gradient_worker.member_signals import BARRIER_TOPIC, Taken, barrier_send_id
from gradient_worker.runner.values import build_directory

__all__ = ["cluster_socket_path", "remove_stale_sockets", "while_served"]

T = TypeVar("T")

SOCKETS: Final = "cluster"
MAX_CONNECTIONS: Final = 64
"""Of one member at a time; others wait until one ends."""

ACCEPT_AGAIN_SECS: Final = 0.5

MAX_LINE_BYTES: Final = 512 * 1024
"""64 KiB of payload, every byte of it escaped by six of JSON, and some."""

logger = structlog.get_logger(__name__)

Answer = Mapping[str, object]


def cluster_socket_path(base_dir: Path, assignment_id: str) -> Path:
    """Where a member finds its socket."""
    return base_dir.absolute() / SOCKETS / assignment_id


def remove_stale_sockets(base_dir: Path, keep: set[str]) -> None:
    """Remove what an earlier agent left, but for the members in `keep`, whose command may still run."""
    with contextlib.suppress(FileNotFoundError):
        for path in (base_dir / SOCKETS).iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)


async def while_served(shop: Workshop, job: Job, run: Callable[[], Awaitable[T]]) -> T:
    """Await `run`, with the socket for its processes if the job is a running member. Raises OSError."""
    if job.member is None:
        return await run()
    result: list[T] = []
    failed: Exception | None = None
    path = cluster_socket_path(shop.base_dir, job.assignment_id)
    with _listen(path) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_serve, shop, job, job.member, _trio_listener(listener))
            try:
                result.append(await run())
            except Exception as error:  # noqa: BLE001 - raised again below, out of the nursery's group
                failed = error
            finally:
                # Before the connections end, for who sees the end looks here. An agent that goes,
                # whatever makes it go, leaves the socket's place to the next one.
                if result or failed is not None or _is_over(job):
                    path.unlink(missing_ok=True)
            nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return result[0]


def _is_over(job: Job) -> bool:
    return job.stopped is not None and job.stopped.cause is not StopCause.HANDED_OVER


@contextlib.contextmanager
def _listen(path: Path) -> Iterator[socket.socket]:
    """A socket that any user may reach; who may talk is asked at each connection.

    Bound beside its place and renamed into it: who finds none there may conclude that all is over. By
    way of the directory's descriptor, because an address has room for 107 bytes only.
    """
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    fresh = f".{path.name}.new"
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=directory)
        listener.bind(f"/proc/self/fd/{directory}/{fresh}")
        os.chmod(fresh, 0o666, dir_fd=directory)  # noqa: S103 - build users are others; _may_talk asks
        listener.listen(MAX_CONNECTIONS)
        os.rename(fresh, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        yield listener
    finally:
        listener.close()
        os.close(directory)


def _trio_listener(listener: socket.socket) -> trio.SocketListener:
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


async def _serve(shop: Workshop, job: Job, member: Member, listener: trio.SocketListener) -> None:
    places = trio.Semaphore(MAX_CONNECTIONS)
    async with trio.open_nursery() as nursery:
        while True:
            await places.acquire()
            stream = await _accept(listener)
            nursery.start_soon(_Connection(shop, job, member, stream).run, places)


async def _accept(listener: trio.SocketListener) -> trio.SocketStream:
    """The next connection. A host without free descriptors must not cost the member its build."""
    while True:
        try:
            return await listener.accept()
        except OSError as error:
            logger.warning("a connection to a member's socket could not be taken", error=str(error))
            await trio.sleep(ACCEPT_AGAIN_SECS)


class _Connection:
    """One program's connection, and the holder of what it is offered and waits for."""

    def __init__(self, shop: Workshop, job: Job, member: Member, stream: trio.SocketStream) -> None:
        self._shop = shop
        self._job = job
        self._member = member
        self._signals = member.signals
        self._stream = stream

    async def run(self, places: trio.Semaphore) -> None:
        """Answer until it ends. Never raises for what the program does."""
        try:
            async with self._stream:
                if self._may_talk():
                    await self._answer_all()
        except trio.BrokenResourceError:
            return
        finally:
            self._signals.leave_barriers(self)
            if self._signals.put_back(self):
                self._member.changed()
            places.release()

    def _may_talk(self) -> bool:
        """The build's own user, root and the agent may."""
        credentials = self._stream.socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        _pid, uid, _gid = struct.unpack("3i", credentials)
        allowed = {0, os.getuid()}
        with contextlib.suppress(FileNotFoundError):
            place = build_directory(self._shop.base_dir, self._job.assignment_id).build
            allowed.add(place.stat().st_uid)
        if uid not in allowed:
            logger.warning("a stranger at a member's socket", assignment_id=self._job.assignment_id, uid=uid)
        return uid in allowed

    async def _answer_all(self) -> None:
        """Read ahead by one line, to notice a program that dies while it waits.

        So the end of what it sends is the end of it: nothing is answered any more.
        """
        send, lines = trio.open_memory_channel[bytes | BadRequest](1)
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                async with send, contextlib.aclosing(_lines(self._stream)) as read_ahead:
                    async for line in read_ahead:
                        await send.send(line)
                        if isinstance(line, BadRequest):
                            return  # answered, and nothing after it
                nursery.cancel_scope.cancel()

            nursery.start_soon(read)
            async for line in lines:
                answer = await self._answer(line)
                await self._stream.send_all(msgspec.json.encode(answer) + b"\n")

    async def _answer(self, line: bytes | BadRequest) -> Answer:
        if isinstance(line, BadRequest):
            return _error("bad-request", str(line))
        try:
            request = read_request(line)
            if not isinstance(request, Take) and self._signals.put_back(self):
                self._member.changed()
            return await self._do(request)
        except BadRequest as error:
            return _error("bad-request", str(error))

    async def _do(self, request: Request) -> Answer:
        match request:
            case Roster():
                return self._roster()
            case Send():
                to = target_of(request.to)
                payload = payload_of(request)
                refused = self._signals.refuse_send(request.topic, to, payload)
                return await self._send(f"send {request.id}", request.topic, to, payload, refused)
            case Receive():
                return await self._receive(request)
            case Take():
                return self._take(request)
            case Enter():
                return await self._enter(request.barrier)
            case Wait():
                return await self._wait(request)

    def _roster(self) -> Answer:
        return {
            "ok": True,
            "role": self._signals.role,
            "index": self._signals.index,
            "roster": [entry_fields(entry) for entry in self._signals.roster],
        }

    # send

    async def _send(
        self, send_id: str, topic: str, to: SignalTarget | None, payload: bytes, refused: str | None
    ) -> Answer:
        """Answered once the server has it; asked again under the same id, it is sent once."""
        seq = await self._report(send_id, topic, to, payload, refused)
        if not isinstance(seq, int):
            return seq
        return await self._outcome(seq)

    async def _report(
        self, send_id: str, topic: str, to: SignalTarget | None, payload: bytes, refused: str | None
    ) -> int | Answer:
        known = self._signals.sent(send_id)
        if known is not None:
            return known
        if refused is not None:
            return _error("refused", refused)
        assignment_id, attempt = self._job.assignment_id, self._member.attempt

        def make(seq: int) -> Message:
            return ClusterSignalReport(
                assignment_id=assignment_id, seq=seq, attempt=attempt, to=to, topic=topic, payload=payload
            )

        await self._job.reports.room_for_signal()
        known = self._signals.sent(send_id)  # the same request on another connection
        if known is not None:
            return known
        seq = self._job.reports.signal(send_id, make)
        if seq is None:
            return _error("over", "this member's part in the attempt is over")
        self._signals.note_sent(send_id, seq)
        return seq

    async def _outcome(self, seq: int) -> Answer:
        while self._job.reports.acknowledged < seq:
            if self._job.reports.finished:
                return _error("over", "this member's part in the attempt is over")
            await self._member.wait_for_change()
        refused = self._signals.refusal(seq)
        return {"ok": True} if refused is None else _error("refused", refused)

    # recv

    async def _receive(self, request: Receive) -> Answer:
        sender = target_of(request.sender)
        refused = self._signals.refuse_recv(request.topic, sender)
        if refused is not None:
            return _error("refused", refused)
        with _within(request.timeout_secs):
            while True:
                signal = self._signals.offer(self, request.topic, sender)
                if signal is not None:
                    return _signal_fields(signal)
                await self._member.wait_for_change()
        return _error("timeout", "no such signal came in time")

    def _take(self, request: Take) -> Answer:
        taken = self._signals.take(self, request.n, request.id)
        if taken is Taken.GONE:
            return _error("gone", f"signal {request.n} is not here or was taken")
        if taken is Taken.NOW:
            self._shop.journal.signal_taken(self._job.assignment_id, request.n, request.id)
        return {"ok": True}

    # barrier

    async def _enter(self, name: str) -> Answer:
        self._signals.leave_barriers(self)
        refused = self._signals.refuse_barrier(name)
        k = self._signals.enter(self, name)
        seq = await self._report(barrier_send_id(name, k), BARRIER_TOPIC, None, name.encode(), refused)
        if not isinstance(seq, int):
            self._signals.leave_barriers(self)
            return seq
        return {"ok": True, "k": k}

    async def _wait(self, request: Wait) -> Answer:
        name, k = request.barrier, request.k
        refused = self._signals.wait(self, name, k)
        if refused is not None:
            return _error("refused", refused)
        try:
            with _within(request.timeout_secs):
                return await self._pass(name, k)
            missing = [f"{one.role}:{one.index}" for one in self._signals.missing_at(name, k)]
            return _error("timeout", f"barrier {name}: {', '.join(missing) or 'the server'} did not come")
        finally:
            self._signals.leave_barriers(self)

    async def _pass(self, name: str, k: int) -> Answer:
        seq = self._signals.sent(barrier_send_id(name, k))
        assert seq is not None
        answer = await self._outcome(seq)
        if not answer["ok"]:
            return answer
        while not self._signals.have_all_come(name, k):
            await self._member.wait_for_change()
        if self._signals.passed(name, k):
            self._shop.journal.barrier_passed(self._job.assignment_id, name, k)
        return answer


def _within(timeout_secs: float | None) -> trio.CancelScope:
    return trio.CancelScope() if timeout_secs is None else trio.move_on_after(timeout_secs)


def _error(code: str, error: str) -> Answer:
    return {"ok": False, "code": code, "error": error}


def _signal_fields(signal: ClusterSignal) -> Answer:
    fields: dict[str, object] = {
        "ok": True,
        "n": signal.n,
        "from": {"role": signal.sender.role, "index": signal.sender.index},
        "topic": signal.topic,
        "payload_base64": base64.b64encode(signal.payload).decode(),
    }
    with contextlib.suppress(UnicodeDecodeError):
        fields["payload"] = signal.payload.decode()
    return fields


async def _lines(stream: trio.SocketStream) -> AsyncGenerator[bytes | BadRequest, None]:
    """Whole lines; one that is too long is the last."""
    kept = bytearray()
    async for data in stream:
        kept += data
        while (end := kept.find(b"\n")) >= 0:
            line = bytes(kept[:end])
            del kept[: end + 1]
            yield line
        if len(kept) > MAX_LINE_BYTES:
            yield BadRequest(f"a line has at most {MAX_LINE_BYTES} bytes")
            return
