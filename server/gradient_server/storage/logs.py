"""Logs of assignments, one file each, compressed as they came (protocol.md, "Lanes and flow").

    logs/<xx>/<assignment>.log      records: u32 compressed length, u32 plain length, one zstd frame

A record that a crash cut short is dropped when the log is opened again, so an offset that was
acknowledged stays good. Logs are not synced: they outlive this process and its crash, not the
machine's. A log that can take no more (disk full, or MAX_LOG_BYTES) is truncated: it goes on to
accept, and drop, what comes, for a build never waits for its log.

Everything here blocks and belongs in a thread; any number of threads may use one store.
"""

import bisect
import collections
import hashlib
import os
import re
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zstandard
from gradient_protocol.limits import MAX_CHUNK_DATA

from gradient_server.storage.durable import StorageError, disk_errors, write_at

__all__ = ["LogError", "LogGapError", "LogStore"]

logger = structlog.get_logger(__name__)

MAX_LOG_BYTES = 4 * 1024**3
# Logs whose index is kept in memory; the one that was used longest ago makes room.
MAX_OPEN_LOGS = 512
_HEADER = struct.Struct("<II")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_SUFFIX = ".log"
_SHARD_LETTERS = 2
MAX_WINDOW_BYTES = 8 * 1024 * 1024
_PIECE_BYTES = 64


class LogError(Exception):
    """A chunk that is no zstd frame of at most 255 KiB; one line says why."""


class LogGapError(Exception):
    """A chunk came whose predecessors did not. `expected` is the offset that was next."""

    def __init__(self, expected: int, offset: int) -> None:
        super().__init__(f"log from {offset} on came, {expected} was next")
        self.expected = expected


@dataclass(slots=True)
class _Log:
    """An open log: where each record lies. Offsets are of plain bytes, positions of the file."""

    fd: int
    offsets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    size: int = 0
    end: int = 0
    truncated: bool = False


class LogStore:
    """The logs in `<base_dir>/logs`."""

    def __init__(self, base_dir: Path, *, max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self._root = base_dir / "logs"
        self._max_log_bytes = max_log_bytes
        with disk_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._logs: collections.OrderedDict[str, _Log] = collections.OrderedDict()
        # Of truncated logs that are not open: the size, which their files do not tell.
        self._truncated: dict[str, int] = {}

    def append(self, assignment_id: str, offset: int, data: bytes, *, compressed: bool = True) -> int:
        """Stores one chunk, a zstd frame (or plain bytes), that starts at the plain `offset`.

        Returns the new offset, which counts what a truncated log dropped. What is stored already is
        ignored. LogGapError for a chunk too far ahead, LogError for one that cannot be read.
        """
        plain = _decompress(data) if compressed else data
        if len(plain) > MAX_CHUNK_DATA:
            raise LogError(f"a log chunk of {len(plain)} bytes; at most {MAX_CHUNK_DATA} are allowed")
        with self._lock:
            log = self._open(assignment_id)
            if offset > log.size:
                raise LogGapError(log.size, offset)
            new = plain[log.size - offset :]
            if not new:
                return log.size
            if not compressed or len(new) != len(plain):
                data = zstandard.ZstdCompressor(level=1).compress(new)
            if not log.truncated:
                self._store(assignment_id, log, data, len(new))
            log.size += len(new)
            return log.size

    def size(self, assignment_id: str) -> int:
        """The plain bytes of a log that are stored or were dropped after its truncation; 0 without a log."""
        with self._lock:
            return self._open(assignment_id).size if self._exists(assignment_id) else 0

    def is_truncated(self, assignment_id: str) -> bool:
        """Whether something of the log was dropped since this store was opened; the row remembers longer."""
        with self._lock:
            log = self._logs.get(assignment_id)
            return assignment_id in self._truncated if log is None else log.truncated

    def read(self, assignment_id: str, offset: int, limit: int) -> bytes:
        """Up to `limit` plain bytes from `offset` on; b"" where nothing is stored."""
        with self._lock:
            if not self._exists(assignment_id):
                return b""
            log = self._open(assignment_id)
            at = bisect.bisect_right(log.offsets, offset) - 1
            parts: list[bytes] = []
            left = limit
            while 0 <= at < len(log.offsets) and left > 0:
                plain = self._read_record(assignment_id, log, at)
                piece = plain[max(0, offset - log.offsets[at]) :][:left]
                if not piece:
                    break
                parts.append(piece)
                left -= len(piece)
                at += 1
        return b"".join(parts)

    def delete(self, assignment_id: str) -> bool:
        """Removes a log. False if there is none."""
        with self._lock:
            log = self._logs.pop(assignment_id, None)
            if log is not None:
                os.close(log.fd)
            self._truncated.pop(assignment_id, None)
            path = self._path(assignment_id)
            with disk_errors(path):
                try:
                    path.unlink()
                except FileNotFoundError:
                    return False
        return True

    def shards(self) -> list[str]:
        """The directories that logs lie in."""
        with disk_errors(self._root):
            return sorted(path.name for path in self._root.iterdir() if len(path.name) == _SHARD_LETTERS)

    def logs_in(self, shard: str, *, older_than: float) -> list[str]:
        """The assignments of a shard whose logs were last written before `older_than` (wall seconds)."""
        directory = self._root / shard
        with disk_errors(directory), os.scandir(directory) as entries:
            return sorted(
                entry.name.removesuffix(_SUFFIX)
                for entry in entries
                if entry.name.endswith(_SUFFIX)
                and _SAFE_NAME.fullmatch(entry.name.removesuffix(_SUFFIX))
                and entry.stat(follow_symlinks=False).st_mtime < older_than
            )

    def close(self) -> None:
        """Closes every file. The store may be used again."""
        with self._lock:
            while self._logs:
                self._close_oldest()

    def _store(self, assignment_id: str, log: _Log, frame: bytes, plain_size: int) -> None:
        record = _HEADER.pack(len(frame), plain_size) + frame
        if log.size + plain_size > self._max_log_bytes:
            log.truncated = True
            logger.warning("a log is too long and goes on truncated", assignment_id=assignment_id)
            return
        try:
            write_at(log.fd, record, log.end)
        except OSError as error:
            log.truncated = True
            os.ftruncate(log.fd, log.end)
            logger.error(
                "a log cannot be stored and goes on truncated",
                assignment_id=assignment_id,
                reason=error.strerror,
            )
            return
        log.offsets.append(log.size)
        log.positions.append(log.end)
        log.end += len(record)

    def _open(self, assignment_id: str) -> _Log:
        log = self._logs.get(assignment_id)
        if log is not None:
            self._logs.move_to_end(assignment_id)
            return log
        path = self._path(assignment_id)
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                log = _scan(fd)
            except BaseException:
                os.close(fd)
                raise
        if assignment_id in self._truncated:
            log.truncated = True
            log.size = self._truncated.pop(assignment_id)
        self._logs[assignment_id] = log
        if len(self._logs) > MAX_OPEN_LOGS:
            self._close_oldest()
        return log

    def _close_oldest(self) -> None:
        name, log = self._logs.popitem(last=False)
        os.close(log.fd)
        if log.truncated:
            self._truncated[name] = log.size

    def _read_record(self, assignment_id: str, log: _Log, at: int) -> bytes:
        with disk_errors(self._path(assignment_id)):
            frame_size, plain_size = _HEADER.unpack(os.pread(log.fd, _HEADER.size, log.positions[at]))
            frame = os.pread(log.fd, frame_size, log.positions[at] + _HEADER.size)
        try:
            plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=plain_size)
        except zstandard.ZstdError as error:
            raise StorageError(f"the log of {assignment_id} is damaged on the disk: {error}") from error
        return plain

    def _exists(self, assignment_id: str) -> bool:
        return assignment_id in self._logs or self._path(assignment_id).exists()

    def _path(self, assignment_id: str) -> Path:
        if not _SAFE_NAME.fullmatch(assignment_id):
            raise ValueError(f"{assignment_id!r} is no assignment's id")
        # UUIDs of one second begin alike; their hash spreads them over the directories.
        spread = hashlib.sha256(assignment_id.encode()).hexdigest()[:_SHARD_LETTERS]
        return self._root / spread / f"{assignment_id}{_SUFFIX}"


def _scan(fd: int) -> _Log:
    """Reads the record headers of a file and cuts off one that a crash left incomplete."""
    log = _Log(fd)
    file_size = os.fstat(fd).st_size
    while log.end + _HEADER.size <= file_size:
        frame_size, plain_size = _HEADER.unpack(os.pread(fd, _HEADER.size, log.end))
        after = log.end + _HEADER.size + frame_size
        if after > file_size or not frame_size:
            break
        log.offsets.append(log.size)
        log.positions.append(log.end)
        log.size += plain_size
        log.end = after
    if log.end != file_size:
        os.ftruncate(fd, log.end)
    return log


def _decompress(frame: bytes) -> bytes:
    """The plain bytes of exactly one zstd frame, at most MAX_CHUNK_DATA. LogError for anything else."""
    try:
        size = zstandard.frame_content_size(frame)
        if size > MAX_CHUNK_DATA:
            raise LogError(f"a log chunk holds more than {MAX_CHUNK_DATA} bytes")
        if size < 0:
            return _decompress_unsized(frame)
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        return decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise LogError(f"a log chunk is no zstd frame, or damaged: {error}") from error


def _decompress_unsized(frame: bytes) -> bytes:
    """A frame that does not tell its size: in pieces so small that none can stand for much."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
    plain = bytearray()
    for start in range(0, len(frame), _PIECE_BYTES):
        if decompressor.eof:
            break
        plain += decompressor.decompress(frame[start : start + _PIECE_BYTES])
        if len(plain) > MAX_CHUNK_DATA:
            raise LogError(f"a log chunk holds more than {MAX_CHUNK_DATA} bytes")
    if not decompressor.eof or decompressor.unused_data:
        raise LogError("a log chunk is not exactly one zstd frame")
    return bytes(plain)
