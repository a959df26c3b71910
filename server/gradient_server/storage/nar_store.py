"""The server's own NARs, in a directory (protocol.md, "Transfers").

    nar/objects/<xx>/<64 hex digits>.nar[.zst]   a whole NAR as it travelled, named by its contents
    nar/partial/<64 hex digits>                  an upload under way, named by its request id's hash

An object appears whole or not at all: its bytes are verified and synced in the partial file, which
then gets the object's name by a link, which never replaces anything. So equal contents are stored
once, whoever sent them; what the disk has damaged meanwhile is replaced by the next who sends it.
Everything here blocks and belongs in a thread; one store serves all of them.
"""

import hashlib
import os
import re
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from gradient_protocol.kinds import Compression
from gradient_protocol.nar import NarError, NarReader, NarVerifier

from gradient_server.storage.durable import (
    StorageError,
    StorageFullError,
    disk_errors,
    make_directory,
    sync_directory,
    write_at,
)

__all__ = [
    "LocalNarStore",
    "NarWriter",
    "ObjectMissingError",
    "StorageError",
    "StorageFullError",
    "StoredObject",
    "UploadGapError",
    "WriterClosedError",
]

READ_BYTES = 1024 * 1024
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_OBJECT = re.compile(r"([0-9a-f]{2})[0-9a-f]{62}\.nar(\.zst)?")
_PARTIAL = re.compile(r"[0-9a-f]{64}")


class ObjectMissingError(StorageError):
    """The store has lost, or never had, the object that a row names."""


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


class LocalNarStore:
    """The NAR store in `<base_dir>/nar`."""

    def __init__(self, base_dir: Path) -> None:
        self._root = base_dir / "nar"
        self._objects = self._root / "objects"
        self._partial = self._root / "partial"
        with disk_errors(self._root):
            for directory in (self._root, self._objects, self._partial):
                directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._writers: dict[str, NarWriter] = {}
        # Finished objects whose row is not committed yet: not to be deleted under its writer.
        self._unsettled: dict[str, int] = {}

    def open_writer(self, request_id: str, *, max_bytes: int | None = None) -> "NarWriter":
        """Begins an upload, or goes on with what an earlier session left of it.

        A writer that is still open for the same request is closed. NarError once more than
        `max_bytes` arrive.
        """
        name = _partial_name(request_id)
        with self._lock:
            earlier = self._writers.get(name)
        if earlier is not None:
            earlier.close()
        writer = NarWriter(self, self._partial / name, max_bytes)
        with self._lock:
            self._writers[name] = writer
        return writer

    def open_reader(self, name: str, offset: int = 0) -> BinaryIO:
        """The object's bytes as they travel, from `offset` on. ObjectMissingError if it is not there."""
        path = self._object_path(name)
        try:
            with disk_errors(path):
                file = path.open("rb")
                try:
                    file.seek(offset)
                except BaseException:
                    file.close()
                    raise
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise ObjectMissingError(f"the NAR store has no {name}") from error
            raise
        return file

    def has(self, name: str) -> bool:
        """Whether the object is there."""
        return self._object_path(name).exists()

    def settle(self, name: str) -> None:
        """The row of an object that `finish` returned is committed, or will never be."""
        with self._lock:
            left = self._unsettled.get(name, 0) - 1
            if left > 0:
                self._unsettled[name] = left
            else:
                self._unsettled.pop(name, None)

    def delete(self, name: str) -> bool:
        """Removes an object that no row names. False if it is not there, or an upload just made it."""
        path = self._object_path(name)
        with self._lock, disk_errors(path):
            if name in self._unsettled:
                return False
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def discard_partial(self, request_id: str) -> bool:
        """Gives up an upload: its lease ran out, or it was canceled. False if nothing was kept."""
        name = _partial_name(request_id)
        with self._lock:
            writer = self._writers.get(name)
        if writer is not None:
            writer.close()
        return self._unlink_partial(self._partial / name)

    def discard_partials_except(self, request_ids: Collection[str]) -> int:
        """At the server's start: removes what belongs to no upload that it knows. How many there were."""
        kept = {_partial_name(request) for request in request_ids}
        with disk_errors(self._partial):
            found = [path for path in self._partial.iterdir() if _PARTIAL.fullmatch(path.name)]
        return sum(self._unlink_partial(path) for path in found if path.name not in kept)

    def _unlink_partial(self, path: Path) -> bool:
        with disk_errors(path):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    def _object_path(self, name: str) -> Path:
        matched = _OBJECT.fullmatch(name)
        if matched is None:
            raise ValueError(f"{name!r} names no object of the NAR store")
        return self._objects / matched[1] / name

    def _forget_writer(self, name: str, writer: "NarWriter") -> None:
        with self._lock:
            if self._writers.get(name) is writer:
                del self._writers[name]

    def _publish(self, partial: Path, verified: StoredObject) -> StoredObject:
        """Gives the synced partial file the object's name; returns the object as it is kept.

        One that is there already is kept if it is sound, and replaced if the disk has damaged it.
        """
        path = self._object_path(verified.object)
        with disk_errors(path):
            make_directory(path.parent)
            with self._lock:
                self._unsettled[verified.object] = self._unsettled.get(verified.object, 0) + 1
            try:
                try:
                    os.link(partial, path)
                except FileExistsError:
                    if not _is_sound(path, verified):
                        partial.replace(path)
                size = path.stat().st_size
                sync_directory(path.parent)
                partial.unlink(missing_ok=True)
            except BaseException:
                self.settle(verified.object)
                raise
        return replace(verified, file_size=size)


class NarWriter:
    """One upload. Its methods may be called from any thread; each call is whole."""

    def __init__(self, store: LocalNarStore, path: Path, max_bytes: int | None) -> None:
        self._store = store
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        with disk_errors(path):
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._offset = os.fstat(self._fd).st_size

    @property
    def offset(self) -> int:
        """The bytes that are stored: where the sender goes on."""
        return self._offset

    def append(self, offset: int, data: bytes | memoryview) -> int:
        """Stores travelled bytes and returns the new offset; what is stored already is passed over.

        UploadGapError for bytes too far ahead; StorageFullError with nothing of `data` kept;
        NarError beyond the limit.
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
            with disk_errors(self._path):
                try:
                    write_at(fd, new, self._offset)
                except OSError:
                    os.ftruncate(fd, self._offset)
                    raise
            self._offset += len(new)
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
                _verify(fd, nar_hash, nar_size, compression)
                with disk_errors(self._path):
                    os.fsync(fd)
                found = StoredObject(name, nar_hash, nar_size, file_size, compression)
                return self._store._publish(self._path, found)
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
            if self._fd is not None:
                self._close()
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> "NarWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_fd(self) -> int:
        if self._fd is None:
            raise WriterClosedError("the upload goes on elsewhere, or was given up")
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._store._forget_writer(self._path.name, self)


def _verify(fd: int, nar_hash: str, nar_size: int, compression: Compression) -> None:
    verifier = NarVerifier(nar_hash, nar_size, compression, sink=NarReader())
    offset = 0
    while chunk := os.pread(fd, READ_BYTES, offset):
        verifier.feed(chunk)
        offset += len(chunk)
    verifier.finish()


def _is_sound(path: Path, declared: StoredObject) -> bool:
    with path.open("rb") as file:
        try:
            _verify(file.fileno(), declared.nar_hash, declared.nar_size, declared.compression)
        except NarError:
            return False
    return True


def _object_name(nar_hash: str, compression: Compression) -> str:
    matched = _HASH.fullmatch(nar_hash)
    if matched is None:
        raise NarError(f"{nar_hash!r} is no hash: write sha256: and 64 hex digits")
    return matched[1] + (".nar.zst" if compression is Compression.ZSTD else ".nar")


def _partial_name(request_id: str) -> str:
    # Request ids are made by workers, so they are no file names.
    return hashlib.sha256(request_id.encode()).hexdigest()
