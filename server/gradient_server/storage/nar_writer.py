"""One upload as it comes to the disk: appended, verified, made durable (protocol.md, "Transfers")."""

import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gradient_protocol.kinds import Compression
from gradient_protocol.nar import NarError, NarIntake, NarReader

from gradient_server.storage.durable import disk_errors, write_at

__all__ = ["READ_BYTES", "NarWriter", "StoredObject", "UploadGapError", "WriterClosedError"]

READ_BYTES = 1024 * 1024
# A disk that has a gigabyte to write at once lets every commit of the database wait for it.
_SYNC_EVERY_BYTES = 8 * 1024 * 1024
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_NO_LIMIT = 2**63 - 1


class UploadGapError(Exception):
    """Bytes came whose predecessors did not. `expected` is the offset to go on from."""

    def __init__(self, expected: int, offset: int) -> None:
        super().__init__(f"bytes from {offset} on came, {expected} was next")
        self.expected = expected


class WriterClosedError(Exception):
    """The upload goes on in another session, or was given up."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What `cached_path` records of an object. `file_size` is of the bytes as they are kept."""

    object: str
    nar_hash: str
    nar_size: int
    file_size: int
    compression: Compression


class NarWriter:
    """One upload. Its methods may be called from any thread; each call is whole."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int | None,
        compression: Compression | None,
        publish: Callable[[Path, StoredObject], StoredObject],
        closed: Callable[[str, "NarWriter"], None],
        is_new: bool = False,
    ) -> None:
        """`publish` makes a verified partial file an object; `closed` hears that the writer is.

        `is_new`: nothing came earlier, so the file is made when the first byte comes.
        """
        self._publish = publish
        self._closed = closed
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # None: verified at the end.
        self._intake = None if compression is None else self._new_intake(compression)
        self._is_closed = False
        self._fd: int | None = None
        self._offset = 0
        self._synced = 0
        if not is_new:
            self._fd = self._open_file()
            self._offset = os.fstat(self._fd).st_size

    @property
    def offset(self) -> int:
        """The bytes that are stored: where the sender goes on."""
        return self._offset

    def catch_up(self, limit_bytes: int) -> bool:
        """Verifies at most so much of what earlier sessions left; whether that was all.

        NarError if it is damaged. Whoever does not call it until it says so pays at the next
        `append` or `finish`.
        """
        with self._lock:
            return self._catch_up(self._open_fd(), limit_bytes)

    def append(self, offset: int, data: bytes | memoryview) -> int:
        """Stores travelled bytes and returns the new offset; what is stored already is passed over.

        UploadGapError for bytes too far ahead; StorageFullError with nothing of `data` kept;
        NarError beyond the limit, or for bytes that belong to no archive.
        """
        with self._lock:
            fd = self._open_fd()
            if offset > self._offset:
                raise UploadGapError(self._offset, offset)
            new = memoryview(data)[self._offset - offset :]
            if not new:
                return self._offset
            if self._max_bytes is not None and self._offset + len(new) > self._max_bytes:
                raise NarError(f"more than {self._max_bytes} bytes were sent")
            self._catch_up(fd, _NO_LIMIT)
            with disk_errors(self._path):
                try:
                    write_at(fd, new, self._offset)
                except OSError:
                    os.ftruncate(fd, self._offset)
                    raise
            self._offset += len(new)
            self._sync_some(fd)
            if self._intake is not None:
                self._intake.feed(new)
            return self._offset

    def finish(self, nar_hash: str, nar_size: int, file_size: int, compression: Compression) -> StoredObject:
        """Verifies all of it and makes the object durable. The writer is closed in any case.

        NarError if it is not a NAR, or not the declared one: nothing of it is kept then. On any
        other error the partial file stays for another try. After the row of the object is
        committed, or given up, call `LocalNarStore.settle`.
        """
        with self._lock:
            fd = self._open_fd()
            try:
                name = _object_name(nar_hash, compression)
                if self._offset != file_size:
                    raise NarError(f"{self._offset} bytes arrived, {file_size} were announced")
                self._verify(fd, nar_hash, nar_size, compression)
                with disk_errors(self._path):
                    os.fsync(fd)
                found = StoredObject(name, nar_hash, nar_size, file_size, compression)
                return self._publish(self._path, found)
            except NarError:
                self._path.unlink(missing_ok=True)
                raise
            finally:
                self._close()

    def close(self) -> None:
        """Ends the session's use of it; what arrived is kept for the next one."""
        with self._lock:
            self._close()

    def discard(self) -> None:
        """Ends it and removes what arrived."""
        with self._lock:
            if not self._is_closed:
                self._close()
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> "NarWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_intake(self, compression: Compression) -> NarIntake:
        limit_bytes = _NO_LIMIT if self._max_bytes is None else self._max_bytes
        return NarIntake(compression, limit_bytes, sink=NarReader())

    def _catch_up(self, fd: int, limit_bytes: int) -> bool:
        intake = self._intake
        while intake is not None and intake.travelled_bytes < self._offset:
            if limit_bytes <= 0:
                return False
            wanted = min(READ_BYTES, self._offset - intake.travelled_bytes)
            with disk_errors(self._path):
                chunk = os.pread(fd, wanted, intake.travelled_bytes)
            if not chunk:
                raise NarError("what had come of the upload is gone from the disk")
            intake.feed(chunk)
            limit_bytes -= len(chunk)
        return True

    def _sync_some(self, fd: int) -> None:
        if self._offset - self._synced >= _SYNC_EVERY_BYTES:
            with disk_errors(self._path):
                os.fdatasync(fd)
            self._synced = self._offset

    def _verify(self, fd: int, nar_hash: str, nar_size: int, compression: Compression) -> None:
        if self._intake is None or self._intake.compression is not compression:
            self._intake = self._new_intake(compression)
        self._catch_up(fd, _NO_LIMIT)
        self._intake.finish(nar_hash, nar_size)

    def _open_file(self, more_flags: int = 0) -> int:
        with disk_errors(self._path):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | more_flags
            try:
                return os.open(self._path, flags, 0o600)
            except FileNotFoundError:  # somebody has removed the directory under the running server
                self._path.parent.mkdir(exist_ok=True)
                return os.open(self._path, flags, 0o600)

    def _open_fd(self) -> int:
        if self._is_closed:
            raise WriterClosedError("the upload goes on elsewhere, or was given up")
        if self._fd is None:  # new: what lies there by mistake is not this upload's
            self._fd = self._open_file(os.O_TRUNC)
        return self._fd

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._closed(self._path.name, self)


def _object_name(nar_hash: str, compression: Compression) -> str:
    matched = _HASH.fullmatch(nar_hash)
    if matched is None:
        raise NarError(f"{nar_hash!r} is no hash: write sha256: and 64 hex digits")
    return matched[1] + (".nar.zst" if compression is Compression.ZSTD else ".nar")
