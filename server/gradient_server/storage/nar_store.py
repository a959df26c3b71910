"""The server's own NARs, in a directory (protocol.md, "Transfers").

    nar/objects/<xx>/<64 hex digits>.nar[.zst]   a whole NAR as it travelled, named by its contents
    nar/partial/<64 hex digits>                  an upload under way, named by its request id's hash

An object appears whole or not at all: its bytes are verified and synced in the partial file, which
then gets the object's name by a link, which never replaces anything. So equal contents are stored
once, whoever sent them; what the disk has damaged meanwhile is replaced by the next who sends it.
Bytes are verified as they come. Of an upload that goes on in another session, what had come before
is read once more (`catch_up`), for the state of a hash outlives no restart.

An object that nothing names any more goes in two steps (`doom`, `delete_doomed`), with the look into
the database between them: whoever stores the same contents meanwhile takes the doom off.
One store serves all threads. What touches the disk blocks and belongs in one; `doom`, `spare`, `settle` and
the writer of a new upload do not.
"""

import hashlib
import os
import re
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from gradient_protocol.kinds import Compression
from gradient_protocol.nar import NarError, NarReader, NarVerifier

from gradient_server.storage.durable import (
    StorageError,
    StorageFullError,
    disk_errors,
    make_directory,
    sync_directory,
)
from gradient_server.storage.nar_writer import (
    READ_BYTES,
    NarWriter,
    StoredObject,
    UploadGapError,
    WriterClosedError,
)

__all__ = [
    "Doom",
    "LocalNarStore",
    "NarWriter",
    "ObjectMissingError",
    "StorageError",
    "StorageFullError",
    "StoredObject",
    "UploadGapError",
    "WriterClosedError",
]

_OBJECT = re.compile(r"([0-9a-f]{2})[0-9a-f]{62}\.nar(\.zst)?")
_PARTIAL = re.compile(r"[0-9a-f]{64}")
_SHARD_LETTERS = 2


class ObjectMissingError(StorageError):
    """The store has lost, or never had, the object that a row names."""


@dataclass(frozen=True, slots=True, eq=False)
class Doom:
    """One intention to delete an object; void once somebody stores the object again."""

    name: str


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
        # Objects that are about to be deleted, unless somebody stores them again.
        self._doomed: dict[str, Doom] = {}

    def open_writer(
        self,
        request_id: str,
        *,
        max_bytes: int | None = None,
        compression: Compression | None = None,
        is_new: bool = False,
    ) -> "NarWriter":
        """Begins an upload, or goes on with what an earlier session left of it.

        A writer that is still open for the same request is closed. NarError once more than
        `max_bytes` arrive, or stand for more than that as an archive. With `compression`, bytes are
        verified as they come; else all of them at the end. `is_new`: nobody has sent anything of it, so
        the disk is not touched before the first byte, and this needs no thread.
        """
        name = _partial_name(request_id)
        with self._lock:
            earlier = self._writers.get(name)
        if earlier is not None:
            earlier.close()
        writer = NarWriter(
            self._partial / name,
            max_bytes=max_bytes,
            compression=compression,
            publish=self._publish,
            closed=self._forget_writer,
            is_new=is_new,
        )
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

    def doom(self, name: str) -> Doom | None:
        """The first half of a deletion; look whether a row names it, then `delete_doomed`.

        None if an upload just made it, or somebody else is about to delete it.
        """
        self._object_path(name)
        with self._lock:
            if name in self._unsettled or name in self._doomed:
                return None
            doom = self._doomed[name] = Doom(name)
        return doom

    def spare(self, doom: Doom) -> None:
        """It is not to be deleted after all."""
        with self._lock:
            self._take_off(doom)

    def delete_doomed(self, doom: Doom) -> bool:
        """Removes a doomed object. False if it is not there, or somebody stored it again since."""
        path = self._object_path(doom.name)
        # Freeing a large file may take the disk a second, and the event loop takes the lock, too.
        trash = self._partial / _partial_name(f"\0{doom.name}")  # no request has such an id
        with disk_errors(path):
            try:
                with self._lock:
                    if not self._take_off(doom):
                        return False
                    path.rename(trash)
                trash.unlink()
            except FileNotFoundError:
                return False
        return True

    def _take_off(self, doom: Doom) -> bool:
        """Whether it still stood."""
        if self._doomed.get(doom.name) is not doom:
            return False
        del self._doomed[doom.name]
        return True

    def delete(self, name: str) -> bool:
        """Removes an object of which it is certain that no row names it, nor will.

        False if it is not there, or an upload just made it.
        """
        doom = self.doom(name)
        return doom is not None and self.delete_doomed(doom)

    def shards(self) -> list[str]:
        """The directories that objects lie in."""
        with disk_errors(self._objects):
            return sorted(path.name for path in self._objects.iterdir() if len(path.name) == _SHARD_LETTERS)

    def objects_in(self, shard: str, *, older_than: float) -> list[str]:
        """The objects of a shard that were written before `older_than` (wall seconds)."""
        directory = self._objects / shard
        with disk_errors(directory), os.scandir(directory) as entries:
            return sorted(
                entry.name
                for entry in entries
                if _OBJECT.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < older_than
            )

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
                self._doomed.pop(verified.object, None)
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


def _is_sound(path: Path, declared: StoredObject) -> bool:
    verifier = NarVerifier(declared.nar_hash, declared.nar_size, declared.compression, sink=NarReader())
    with path.open("rb", buffering=0) as file:
        try:
            while chunk := file.read(READ_BYTES):
                verifier.feed(chunk)
            verifier.finish()
        except NarError:
            return False
    return True


def _partial_name(request_id: str) -> str:
    # Request ids are made by workers, so they are no file names.
    return hashlib.sha256(request_id.encode()).hexdigest()
