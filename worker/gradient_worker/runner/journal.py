"""The agent's journal: what must outlive the agent, so that the next one can go on.

A file of msgpack records, appended without fsync (it outlives the agent, not the host), replayed at
open. A record is a list: its kind, the assignment, and what the kind needs. An agent killed in the
middle of a record leaves a torn tail, which is cut off at the next open. When the file is much larger
than what it says, it is written anew and replaced in one step.

The states of an assignment: held or running when it is assigned, running from its start, done from its
final report. It stays, done, until it is forgotten, because reports may still be unacknowledged.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from gradient_protocol.kinds import ResumeState

__all__ = ["TAKES_KEPT", "Journal", "JournalFull", "JournaledAssignment"]

_COMPACT_BYTES_MIN = 4 << 20
_COMPACT_GROWTH = 4
_RECORD_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 20
TAKES_KEPT = 1024
"""Of an assignment: a program asks again only about its last one, and few run at a time."""


class JournalFull(Exception):  # noqa: N818 - a state of the disk
    """A record could not be written. The file stays readable; later records try to catch up."""


@dataclass(slots=True)
class JournaledAssignment:
    """What the journal says of one assignment. To be read only; `Journal` writes.

    `assign_job`: the encoded message. `reports`: encoded reports by seq, those that are not acknowledged.
    `log_offset`: uncompressed bytes of the log that the server has stored. `signals`: encoded signals by
    n, those that no `recv` has taken; `signal_n` the last n received, None if none was. `send_ids`: the
    seq of the report of each local `send`; `refused`: the reasons of those that the server refused, by seq.
    `takes`: the id of the request that took a signal, by n, the last ones. `barriers`: how many of each
    name were passed. `start_cluster`: the encoded message that started a member. `agents_died`: agents
    that had it and went without a word; `agent_left`: the last one said that it goes.
    """

    assignment_id: str
    job_id: str
    assign_job: bytes
    state: ResumeState
    acknowledged_seq: int = 0
    last_seq: int = 0
    log_offset: int = 0
    signal_n: int | None = None
    reports: dict[int, bytes] = field(default_factory=dict)
    signals: dict[int, bytes] = field(default_factory=dict)
    signals_taken: int = 0
    send_ids: dict[str, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    takes: dict[int, str] = field(default_factory=dict)
    barriers: dict[str, int] = field(default_factory=dict)
    start_cluster: bytes | None = None
    agents_died: int = 0
    agent_left: bool = False


class Journal:
    """The journal at `path`. Open it with `Journal.open`, close it with `close`.

    Every `record_` method writes at once, without waiting for the disk; on a full one the first of them
    raises JournalFull, and what it had to say still counts in `assignments`.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._size = 0
        self._size_compacted = 0
        self._behind = False
        self._assignments: dict[str, JournaledAssignment] = {}
        self.cut_bytes = 0
        """Bytes of a torn tail that were cut off at open."""

    @classmethod
    def open(cls, path: Path) -> "Journal":
        """Opens or makes the file and replays it. Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        journal = cls(path, fd)
        try:
            journal._replay()
        except BaseException:
            os.close(fd)
            raise
        return journal

    def close(self) -> None:
        """Closes the file; what was recorded stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def assignments(self) -> Mapping[str, JournaledAssignment]:
        """By assignment id, in the order they came."""
        return self._assignments

    @property
    def is_behind(self) -> bool:
        """Whether the file lacks records, because the disk was full."""
        return self._behind

    def record_assignment(
        self, assignment_id: str, job_id: str, assign_job: bytes, *, held: bool = False
    ) -> None:
        """A job was accepted; `held` for a member of a cluster, until `record_started`."""
        self._record("assignment", assignment_id, job_id, assign_job, held)

    def record_started(self, assignment_id: str, start_cluster: bytes | None = None) -> None:
        """A held job began to run, by this message."""
        self._record("started", assignment_id, start_cluster)

    def record_left(self, assignment_id: str) -> None:
        """The agent hands it over to the next one."""
        self._record("left", assignment_id)

    def record_taken_up(self, assignment_id: str) -> None:
        """An agent found it: the one before died, unless it had left."""
        self._record("taken-up", assignment_id)

    def record_report(self, assignment_id: str, seq: int, message: bytes, send_id: str | None = None) -> None:
        """A numbered report is about to be sent; `send_id` where a local `send` became it."""
        if send_id is None:
            self._record("report", assignment_id, seq, message)
        else:  # in one record, for a crash between two would send it twice or never
            self._record("report", assignment_id, seq, message, send_id)

    def record_acknowledged(self, assignment_id: str, seq: int) -> None:
        """The server has stored everything up to `seq`."""
        self._record("acknowledged", assignment_id, seq)

    def record_log_offset(self, assignment_id: str, offset: int) -> None:
        """The server has stored the log up to `offset`."""
        self._record("log", assignment_id, offset)

    def record_signal_received(self, assignment_id: str, n: int, signal: bytes) -> None:
        """A signal came for the member."""
        self._record("signal", assignment_id, n, signal)

    def record_signal_taken(self, assignment_id: str, n: int, take_id: str) -> None:
        """A local `recv` took the signal by this request; asked again, it is answered and not repeated."""
        self._record("taken", assignment_id, n, take_id)

    def record_refused(self, assignment_id: str, seq: int, reason: str) -> None:
        """The server refused the signal that the report `seq` is."""
        self._record("refused", assignment_id, seq, reason)

    def record_barrier_passed(self, assignment_id: str, name: str, k: int) -> None:
        """The k-th barrier of this name was passed."""
        self._record("barrier", assignment_id, name, k)

    def record_finished(self, assignment_id: str) -> None:
        """The final report is recorded: nothing runs any more."""
        self._record("finished", assignment_id)

    def forget(self, assignment_id: str) -> None:
        """Nothing of it is needed any more."""
        self._record("forget", assignment_id)

    def compact(self) -> None:
        """Writes the file anew with what still counts. Raises OSError and leaves the old file."""
        fresh = self._path.with_name(self._path.name + ".new")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        size = 0
        try:
            for record in self._snapshot():
                data = msgpack.packb(record)
                _write_all(fd, data)
                size += len(data)
            fresh.replace(self._path)
        except OSError:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd, self._size, self._size_compacted = fd, size, size
        self._behind = False

    def _record(self, *record: object) -> None:
        self._apply(record)
        if self._behind:
            self._catch_up()
            return
        data = msgpack.packb(record)
        try:
            _write_all(self._fd, data)
        except OSError as error:
            # Cutting needs no space: what follows must not stand behind half a record.
            os.ftruncate(self._fd, self._size)
            os.lseek(self._fd, self._size, os.SEEK_SET)
            self._behind = True
            raise JournalFull(f"{self._path}: {error.strerror}; free some space") from error
        self._size += len(data)
        if self._size > max(_COMPACT_BYTES_MIN, _COMPACT_GROWTH * self._size_compacted):
            self._catch_up()

    def _catch_up(self) -> None:
        try:
            self.compact()
        except OSError:
            # Told once already, or only larger than it need be: the next record tries again.
            self._size_compacted = max(self._size_compacted, self._size)

    def _replay(self) -> None:
        unpacker = msgpack.Unpacker(max_buffer_size=_RECORD_BYTES_MAX, use_list=True)
        good = 0
        while data := os.read(self._fd, _READ_BYTES):
            unpacker.feed(data)
            try:
                for record in unpacker:
                    self._apply(record)
                    good = unpacker.tell()
            except (ValueError, TypeError, KeyError):
                break  # no record of ours from here on: as good as torn
        end = os.lseek(self._fd, 0, os.SEEK_END)
        self.cut_bytes = end - good
        if self.cut_bytes:
            os.ftruncate(self._fd, good)
            os.lseek(self._fd, good, os.SEEK_SET)
        self._size = good

    def _apply(self, record: tuple[Any, ...]) -> None:
        kind, assignment_id, *rest = record
        if kind == "assignment":
            job_id, assign_job, held = rest
            state = ResumeState.HELD if held else ResumeState.RUNNING
            self._assignments[assignment_id] = JournaledAssignment(assignment_id, job_id, assign_job, state)
        elif kind == "forget":
            self._assignments.pop(assignment_id, None)
        elif (assignment := self._assignments.get(assignment_id)) is not None:
            _apply_to(assignment, kind, rest)

    def _snapshot(self) -> Iterator[list[Any]]:
        for known in self._assignments.values():
            name = known.assignment_id
            held = known.state is ResumeState.HELD
            yield ["assignment", name, known.job_id, known.assign_job, held]
            yield [
                "counts",
                name,
                known.acknowledged_seq,
                known.last_seq,
                known.signal_n,
                known.signals_taken,
            ]
            yield ["log", name, known.log_offset]
            if known.agents_died or known.agent_left:
                yield ["agents", name, known.agents_died, known.agent_left]
            if known.start_cluster is not None:
                yield ["cluster", name, known.start_cluster]
            yield from (["report", name, seq, message] for seq, message in known.reports.items())
            yield from (["took", name, n, take_id] for n, take_id in known.takes.items())
            yield from (["signal", name, n, signal] for n, signal in known.signals.items())
            yield from (["refused", name, seq, reason] for seq, reason in known.refused.items())
            yield from (["barrier", name, barrier, k] for barrier, k in known.barriers.items())
            yield from (["send", name, send_id, seq] for send_id, seq in known.send_ids.items())
            if known.state is ResumeState.DONE:
                yield ["finished", name]


def _apply_to(known: JournaledAssignment, kind: str, rest: list[Any]) -> None:
    match kind, rest:
        case "started", [start_cluster]:
            known.state = ResumeState.RUNNING
            known.start_cluster = start_cluster
        case "finished", []:
            known.state = ResumeState.DONE
        case "report", [seq, message]:
            known.reports[seq] = message
            known.last_seq = max(known.last_seq, seq)
        case "report", [seq, message, send_id]:
            known.reports[seq] = message
            known.last_seq = max(known.last_seq, seq)
            known.send_ids[send_id] = seq
        case "acknowledged", [seq]:
            known.acknowledged_seq = max(known.acknowledged_seq, seq)
            known.reports = {number: report for number, report in known.reports.items() if number > seq}
        case "log", [offset]:
            known.log_offset = offset
        case "left", []:
            known.agent_left = True
        case "taken-up", []:
            known.agents_died += not known.agent_left
            known.agent_left = False
        case "agents", [agents_died, agent_left]:
            known.agents_died, known.agent_left = agents_died, agent_left
        case "counts", [acknowledged_seq, last_seq, signal_n, signals_taken]:
            known.acknowledged_seq, known.last_seq = acknowledged_seq, last_seq
            known.signal_n, known.signals_taken = signal_n, signals_taken
        case _:
            _apply_signal(known, kind, rest)


def _apply_signal(known: JournaledAssignment, kind: str, rest: list[Any]) -> None:
    match kind, rest:
        case "signal", [n, signal]:
            known.signals[n] = signal
            known.signal_n = n if known.signal_n is None else max(known.signal_n, n)
        case "taken", [n, take_id]:
            if known.signals.pop(n, None) is not None:
                known.signals_taken += 1
            _note_take(known, n, take_id)
        case "took", [n, take_id]:  # of a compacted journal: it is counted already
            _note_take(known, n, take_id)
        case "send", [send_id, seq]:
            known.send_ids[send_id] = seq
        case "refused", [seq, reason]:
            known.refused[seq] = reason
        case "barrier", [name, k]:
            known.barriers[name] = max(k, known.barriers.get(name, 0))
        case "cluster", [start_cluster]:
            known.start_cluster = start_cluster
        case _:
            return  # a kind that a newer agent knows


def _note_take(known: JournaledAssignment, n: int, take_id: str) -> None:
    known.takes.pop(n, None)
    known.takes[n] = take_id
    while len(known.takes) > TAKES_KEPT:
        del known.takes[next(iter(known.takes))]


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
