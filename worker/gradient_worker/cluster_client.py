"""For programs that run as a member of a cluster: talk to the other members (docs/cluster-programs.md).

    sys.path.append(os.path.dirname(shutil.which("gradient-cluster")))
    from gradient_cluster import Cluster

    with Cluster() as cluster:
        cluster.send("address", f"{host}:{port}")
        signal = cluster.recv("address", sender="server", timeout_secs=30)
        cluster.barrier("ready", timeout_secs=60)

`gradient_cluster.py` beside the command is this file. On the standard library alone, Python 3.8 or
newer. All of it blocks. An agent that is restarted in between costs time and nothing else: the client
connects again, and what it asked for is done once.
One `Cluster` belongs to one thread; several at a time, in threads or processes, are fine.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import time

TYPE_CHECKING = False  # typing costs a tenth of the start of `gradient-cluster`
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Any

__all__ = ["AttemptOver", "Cluster", "ClusterError", "Refused", "Signal", "TimedOut"]

_ADDRESS_BYTES_MAX = 107
_LINE_BYTES_MAX = 1 << 20
_RETRY_FIRST_SECS = 0.05
_RETRY_LIMIT_SECS = 1.0
_ANSWER_GRACE_SECS = 5.0
_TAKE_SECS = 30.0
_PAYLOAD_BYTES_MAX = 64 * 1024
_FOREVER_SECS = 1e8  # three years; the clocks of the system do not reach much farther


class ClusterError(Exception):
    """What keeps a program from talking to the others; the text is one line for people."""


class Refused(ClusterError):  # noqa: N818 - an answer, not a fault
    """It cannot be done: a reserved topic, no such member, too large, or the attempt's limits."""


class TimedOut(ClusterError):  # noqa: N818 - as above
    """It did not happen in time."""


class AttemptOver(ClusterError):  # noqa: N818 - as above
    """There is no attempt to talk to: it is over, or this program is no member's."""


class Signal:
    """What another member sent. `n` grows; `payload` is bytes, `text` the same as text."""

    __slots__ = ("index", "n", "payload", "role", "topic")

    def __init__(self, n: int, role: str, index: int, topic: str, payload: bytes) -> None:
        self.n = n
        self.role = role
        self.index = index
        self.topic = topic
        self.payload = payload

    @property
    def text(self) -> str:
        """The payload as UTF-8."""
        return self.payload.decode()

    def __repr__(self) -> str:
        """Without the payload, which may be long."""
        return f"Signal(n={self.n}, sender={self.role}:{self.index}, topic={self.topic!r})"


class Cluster:
    """The attempt that this program is a member of. Raises AttemptOver where it is none's.

    Members are named as `ROLE` (all of the role) or `ROLE:INDEX`. Times are in seconds, None waits as
    long as it takes.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        found = os.environ if environ is None else environ
        try:
            self.role = found["GRADIENT_CLUSTER_ROLE"]
            self.index = int(found["GRADIENT_CLUSTER_INDEX"])
            self._path = found["GRADIENT_CLUSTER_SOCKET"]
        except (KeyError, ValueError):
            raise AttemptOver("no cluster attempt here; run it from the command of a member") from None
        self._roster_text = found.get("GRADIENT_CLUSTER_ROSTER")
        self._socket: socket.socket | None = None
        self._received = b""

    def __enter__(self) -> Cluster:
        """Closes itself at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See close."""
        self.close()

    def close(self) -> None:
        """End the connection. The object may be used again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._received = b""

    def roster(self) -> list[dict[str, Any]]:
        """All members: `role`, `index`, `worker`, `endpoint` (None if not known), `primary`."""
        if self._roster_text is not None:
            try:
                return list(json.loads(self._roster_text))
            except ValueError:
                self._roster_text = None  # the program's own doing; the agent knows it too
        return list(self._ask({"op": "roster"}, None)["roster"])

    def send(self, topic: str, payload: bytes | str = b"", to: str | None = None) -> None:
        """Send to one member, to all of a role, or (None) to all others; returns once it is stored."""
        data = payload.encode() if isinstance(payload, str) else payload
        if len(data) > _PAYLOAD_BYTES_MAX:
            raise Refused(f"a payload has at most {_PAYLOAD_BYTES_MAX} bytes, and this one has more")
        request = {"op": "send", "id": _new_id(), "topic": topic}
        request["payload_base64"] = base64.b64encode(data).decode()
        self._ask(_aimed(request, "to", to), None)

    def recv(
        self, topic: str | None = None, sender: str | None = None, timeout_secs: float | None = None
    ) -> Signal:
        """The next signal (of this topic, of this sender) that no `recv` of this member has taken."""
        take_id, deadline = _new_id(), _deadline(timeout_secs)
        while True:
            request: dict[str, Any] = {"op": "recv"}
            if topic is not None:
                request["topic"] = topic
            answer = self._ask(_aimed(request, "from", sender), deadline)
            # From here on the signal is taken, or it goes to the next who asks: nothing in between.
            take = {"op": "take", "n": answer["n"], "id": take_id}
            took = self._ask(take, _deadline(_TAKE_SECS), may_be_gone=True)
            if took["ok"]:
                payload = base64.b64decode(answer["payload_base64"])
                source = answer["from"]
                return Signal(answer["n"], source["role"], source["index"], answer["topic"], payload)

    def barrier(self, name: str, timeout_secs: float | None = None) -> None:
        """Wait until every other member has come to the barrier of this name as often as this one.

        One that timed out is still entered: the next call for the name goes on waiting for it.
        """
        deadline = _deadline(timeout_secs)
        k = self._ask({"op": "enter", "barrier": name}, deadline)["k"]
        self._ask({"op": "wait", "barrier": name, "k": k}, deadline)

    def _ask(
        self, request: dict[str, Any], deadline: float | None, *, may_be_gone: bool = False
    ) -> dict[str, Any]:
        pause_secs = _RETRY_FIRST_SECS
        while True:
            left_secs = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                answer = self._ask_once(request, left_secs)
            except socket.timeout:  # noqa: UP041 - its name before Python 3.10
                self.close()
                raise TimedOut("no answer came in time") from None
            except (ConnectionError, EOFError, BlockingIOError):
                self.close()  # the agent goes; the next one takes over the socket
            except OSError as error:
                self.close()
                raise ClusterError(f"{self._path}: {error.strerror}") from None
            else:
                if not answer.get("ok") and not (may_be_gone and answer.get("code") == "gone"):
                    raise _ERRORS.get(answer.get("code"), ClusterError)(
                        answer.get("error", "no reason given")
                    )
                return answer
            if left_secs is not None and left_secs <= 0:
                raise TimedOut("this member's agent is away")
            time.sleep(pause_secs if left_secs is None else min(pause_secs, left_secs))
            pause_secs = min(2 * pause_secs, _RETRY_LIMIT_SECS)

    def _ask_once(self, request: dict[str, Any], left_secs: float | None) -> dict[str, Any]:
        if self._socket is None:
            self._socket = self._connect()
        if left_secs is not None and request["op"] in {"recv", "wait"}:
            request = {**request, "timeout_secs": left_secs}
        # The agent keeps the time; this is for one that is stuck.
        self._socket.settimeout(None if left_secs is None else left_secs + _ANSWER_GRACE_SECS)
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while b"\n" not in self._received:
            data = self._socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._received += data
            if len(self._received) > _LINE_BYTES_MAX:
                raise ClusterError(f"{self._path}: what answers is no agent")
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _connect(self) -> socket.socket:
        path, directory = self._path, -1
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if len(os.fsencode(path)) > _ADDRESS_BYTES_MAX:
                directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)  # noqa: PTH120 - starts fast
                path = f"/proc/self/fd/{directory}/{os.path.basename(path)}"  # noqa: PTH119 - as above
            made.connect(path)
        except FileNotFoundError:
            made.close()
            raise AttemptOver("the attempt is over") from None
        except BaseException:
            made.close()
            raise
        finally:
            if directory >= 0:
                os.close(directory)
        return made


_ERRORS: dict[Any, type[ClusterError]] = {"refused": Refused, "timeout": TimedOut, "over": AttemptOver}


def _new_id() -> str:
    return os.urandom(16).hex()


def _deadline(timeout_secs: float | None) -> float | None:
    if timeout_secs is None or timeout_secs > _FOREVER_SECS:
        return None
    return time.monotonic() + timeout_secs


def _aimed(request: dict[str, Any], key: str, member: str | None) -> dict[str, Any]:
    """With `ROLE` or `ROLE:INDEX` under `key`. A role may hold colons itself; an index is digits."""
    if member is None:
        return request
    role, colon, index = member.rpartition(":")
    if colon and index.isascii() and index.isdigit():
        return {**request, key: {"role": role, "index": int(index)}}
    return {**request, key: {"role": member}}
