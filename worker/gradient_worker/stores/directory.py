"""The directory store: `<baseDir>/store/<path>`, and a registry of which of them are valid.

A path becomes valid in this order, so that a crash at any point leaves only what the next openings
remove: made under another name in the same directory, put in place by one rename, registered. It
goes in the opposite order. Contents are not flushed one by one: after a restart of the host, which
may have lost them, those registered last are hashed again (`_UNFLUSHED_SECS`).
"""

import contextlib
import fcntl
import itertools
import os
import re
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

import structlog
from gradient_protocol import nar
from gradient_protocol.kinds import Compression
from gradient_protocol.nar import NarError

from gradient_worker.stores.base import BadOutputError, GarbageReport, PathInfo, StoreError
from gradient_worker.stores.canonical import canonicalise
from gradient_worker.stores.exchange import exchange
from gradient_worker.stores.garbage import choose_victims, closure
from gradient_worker.stores.packed import KEPT_BYTES, PackedOutputs
from gradient_worker.stores.paths import check_path, hash_part
from gradient_worker.stores.registry import Registration, Registry

__all__ = ["DirectoryNarReceiver", "DirectoryStore"]

_log = structlog.get_logger(__name__)

# Linux writes back what is older than 30 s, every 5 s; after this long a file has reached the disk.
_UNFLUSHED_SECS = 120.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIMES_SECS = (1, 1)
# Kept for one opening, so that a build which had ended need not run again; gone with the next one.
_UNREGISTERED = ".unregistered-"
_BUILT = re.compile(r"\.built-[0-9]+-([0-9a-z]{32})")


class DirectoryStore:
    """A store in a plain directory. Open it with `DirectoryStore.open`, end it with `close`."""

    def __init__(
        self, base_dir: Path, registry: Registry, lock_file: int, clock: Callable[[], float]
    ) -> None:
        self._base_dir = base_dir
        self._directory = base_dir / "store"
        self._registry = registry
        self._lock_file = lock_file
        self._clock = clock
        # Guards everything below and the registry; held for single renames and rows, never for bulk.
        self._lock = threading.Lock()
        self._infos: dict[str, PathInfo] = {}
        self._last_used: dict[str, float] = {}
        self._used_since_written: set[str] = set()
        self._pins: dict[str, set[str]] = {}
        self._listeners: list[Callable[[tuple[str, ...]], None]] = []
        self._packed = PackedOutputs()
        self._numbers = itertools.count(1)
        # By hash part: what an earlier process was registering when it was killed.
        self._unregistered: dict[str, Path] = {}
        self._collected = False
        self._held_bytes = 0
        # Of all registrations so far: theirs is an order, whichever way the clock is set.
        self._registered_at = 0.0

    @classmethod
    def open(cls, base_dir: Path, *, clock: Callable[[], float] = time.time) -> Self:
        """Open, or make, the store below `base_dir`; removes what earlier crashes left.

        Raises StoreError where another process has it open or its registry cannot be read.
        """
        (base_dir / "store").mkdir(parents=True, exist_ok=True)
        lock_file = os.open(base_dir / "store.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"another worker uses the store in {base_dir}; give this one its own"
                ) from None
            registry = Registry(base_dir / "store.db")
            try:
                store = cls(base_dir, registry, lock_file, clock)
                store._recover()
            except BaseException:
                registry.close()
                raise
        except BaseException:
            os.close(lock_file)
            raise
        return store

    def close(self) -> None:
        """Write down what is in memory alone, and let another process open the store."""
        with self._lock:
            try:
                self._write_last_used()
            finally:
                self._registry.close()
                os.close(self._lock_file)

    @property
    def directory(self) -> Path:
        """Where the paths lie."""
        return self._directory

    @property
    def held_bytes(self) -> int:
        """The archives' sizes of all valid paths together."""
        return self._held_bytes

    def real_path(self, path: str) -> Path:
        """Where `path` lies, or would. Raises StoreError for what is no store path."""
        return self._directory / check_path(path)

    def info(self, path: str) -> PathInfo | None:
        """What is known of a valid path, else None."""
        return self._infos.get(path)

    def paths(self) -> list[str]:
        """All valid paths."""
        with self._lock:
            return list(self._infos)

    def closure(self, paths: Iterable[str]) -> list[str]:
        """Those of `paths` that are valid, with every valid path that they refer to, in turn."""
        with self._lock:
            return sorted(closure(self._infos, paths))

    def receive(
        self, path: str, nar_hash: str, nar_size: int, references: Iterable[str], compression: Compression
    ) -> "DirectoryNarReceiver":
        """Begin to take in `path`. Raises StoreError for a path or reference that is none."""
        check_path(path)
        info = PathInfo(path, nar_hash, nar_size, tuple(sorted(set(map(check_path, references)))))
        return DirectoryNarReceiver(self._unused_name("incoming"), info, compression, self._install)

    def register_output(self, path: str, built: Path, candidates: Iterable[str]) -> PathInfo:
        """Move what a build made at `built` into the store, and make it valid (see Store)."""
        check_path(path)
        by_hash: dict[str, list[str]] = {}
        for candidate in dict.fromkeys([*candidates, path]):
            by_hash.setdefault(hash_part(check_path(candidate)), []).append(candidate)
        hasher = nar.NarHasher()
        scanner = nar.ReferenceScanner(by_hash, self._own_names())
        pieces: list[bytes] = []
        try:
            _canonicalise(built)
            for piece in nar.pack(built):
                hasher.feed(piece)
                scanner.feed(piece)
                if hasher.size <= KEPT_BYTES:
                    pieces.append(piece)
        except FileNotFoundError:
            raise BadOutputError(f"the build did not make {path}") from None
        except NarError as error:
            raise BadOutputError(f"{path} cannot be stored: {error}") from None
        except BadOutputError as error:
            raise BadOutputError(f"{path} cannot be stored: {error}") from None
        references = sorted(itertools.chain.from_iterable(by_hash[found] for found in scanner.found))
        info = PathInfo(path, hasher.hash, hasher.size, tuple(references), bool(scanner.found_markers))
        moved = self._unused_name("built", path)
        _move(built, moved)
        installed = self._install(moved, info)
        self._packed.keep(info, pieces)
        return installed

    def take_unregistered(self, path: str) -> Path | None:
        """What an earlier process had made of `path` and did not register, once (see Store)."""
        with self._lock:
            return self._unregistered.pop(hash_part(check_path(path)), None)

    def pack(self, path: str) -> Iterator[bytes]:
        """The archive of a valid path, in pieces."""
        if self.info(path) is None:
            raise StoreError(f"{path} is not in the store")
        return nar.pack(self.real_path(path))

    def take_packed(self, info: PathInfo) -> tuple[bytes, ...] | None:
        """The pieces of a small path that was registered just now, once (see Store)."""
        return self._packed.take(info)

    def pin(self, holder: str, paths: Iterable[str]) -> None:
        """Keep `paths` and all they refer to until `unpin`; adds to what the holder has pinned."""
        with self._lock:
            now = self._clock()
            pins = self._pins.setdefault(holder, set())
            for path in paths:
                pins.add(path)
                if path in self._infos:
                    self._touch(path, now)

    def unpin(self, holder: str) -> None:
        """Drop all pins of `holder`."""
        with self._lock:
            self._pins.pop(holder, None)

    def collect_garbage(self, max_bytes: int) -> GarbageReport:
        """Remove what was used least recently until at most `max_bytes` are held (see Store)."""
        with self._lock:
            self._write_last_used()
            pinned = itertools.chain.from_iterable(self._pins.values())
            excess_bytes = self._held_bytes - max_bytes
            victims = choose_victims(self._infos, self._last_used, pinned, excess_bytes)
            before = self._held_bytes
            trash = self._withdraw(victims) if victims else []
            if self._collected:
                # Not at the first one, which a process makes as it starts: its builds may still need them.
                trash += self._unregistered.values()
                self._unregistered.clear()
            self._collected = True
            after = self._held_bytes
        self._tell(victims)
        for tree in trash:
            nar.remove_tree(tree)
        return GarbageReport(tuple(victims), before - after, after)

    def subscribe(self, listener: Callable[[tuple[str, ...]], None]) -> Callable[[], None]:
        """Call `listener` with paths that came or went; returns how to stop that."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    def _recover(self) -> None:
        """Make memory, registry and disk agree, in favour of less."""
        registrations = self._registry.load()
        self._registered_at = max((row.registered_at for row in registrations), default=0.0)
        on_disk = set(os.listdir(self._directory))  # noqa: PTH208 - names alone, there may be many
        lost = [row.info.path for row in registrations if row.info.path not in on_disk]
        for path in lost:
            _log.warning("registered path is gone from disk", path=path)
        kept = [row for row in registrations if row.info.path in on_disk]
        boot_id = _BOOT_ID.read_text().strip()
        same_boot = self._registry.last_boot() == boot_id
        if self._registry.last_boot() not in {None, boot_id}:
            lost += self._damaged(kept)
        self._registry.remove(lost)
        for row in kept:
            if row.info.path not in set(lost):
                self._remember(row.info, row.last_used_at)
        for name in sorted(on_disk - self._infos.keys()):
            hashed = _hash_of_leftover(name)
            if hashed is not None and same_boot:
                aside = self._directory / f"{_UNREGISTERED}{hashed}"
                nar.remove_tree(aside)
                _move(self._directory / name, aside)
                self._unregistered[hashed] = aside
            elif self._directory / name not in self._unregistered.values():
                _log.info("leftover removed from the store", name=ascii(name))
                nar.remove_tree(self._directory / name)
        self._registry.set_boot(boot_id)

    def _damaged(self, rows: list[Registration]) -> list[str]:
        """After a restart of the host: which of the paths registered last are not what they were."""
        # The host stopped after the newest registration, so whatever is older than it by this long
        # had been written back by then.
        newest = max((row.registered_at for row in rows), default=0.0)
        damaged = []
        for row in rows:
            if row.registered_at >= newest - _UNFLUSHED_SECS:
                try:
                    intact = _nar_hash(self._directory / row.info.path) == row.info.nar_hash
                except (NarError, OSError):
                    intact = False
                if not intact:
                    _log.warning("path was damaged by the host's restart", path=row.info.path)
                    damaged.append(row.info.path)
        return damaged

    def _install(self, made: Path, info: PathInfo) -> PathInfo:
        """Put what lies at `made`, in this directory, into its place, and register it."""
        place = self.real_path(info.path)
        try:
            with self._lock:
                held = self._infos.get(info.path)
                if held is not None and held.nar_hash == info.nar_hash and os.path.lexists(place):
                    self._touch(info.path, self._clock())
                    return held
                if held is not None:
                    # The row goes first: were it there after a crash, it would vouch for other contents.
                    self._registry.remove([info.path])
                    self._forget(info.path)
                if os.path.lexists(place):
                    exchange(made, place)
                else:
                    made.rename(place)
                self._register(place, made, info)
        except sqlite3.Error as error:
            raise StoreError(f"{info.path} cannot be registered: {error}") from error
        finally:
            nar.remove_tree(made)
        self._tell([info.path])
        return info

    def _register(self, place: Path, aside: Path, info: PathInfo) -> None:
        now = self._clock()
        self._registered_at = max(self._registered_at, now)
        try:
            self._registry.put(Registration(info, self._registered_at, now))
        except sqlite3.Error:
            # Without its row the path must not stay in its place; what it replaced is no longer valid.
            nar.remove_tree(aside)
            place.rename(aside)
            raise
        self._remember(info, now)

    def _withdraw(self, victims: list[str]) -> list[Path]:
        """Make paths invalid; returns where they lie now, to be removed without the lock."""
        self._registry.remove(victims)
        trash = []
        for path in victims:
            self._forget(path)
            aside = self._unused_name("trash")
            try:
                (self._directory / path).rename(aside)
            except OSError as error:  # gone, or it stays there: the next opening removes it
                _log.warning("collected path cannot be moved away", path=path, reason=error.strerror)
            else:
                trash.append(aside)
        return trash

    def _remember(self, info: PathInfo, last_used_at: float) -> None:
        self._infos[info.path] = info
        self._last_used[info.path] = last_used_at
        self._held_bytes += info.nar_size

    def _forget(self, path: str) -> None:
        self._held_bytes -= self._infos.pop(path).nar_size
        del self._last_used[path]
        self._used_since_written.discard(path)

    def _touch(self, path: str, now: float) -> None:
        self._last_used[path] = now
        self._used_since_written.add(path)

    def _write_last_used(self) -> None:
        used = [(path, self._last_used[path]) for path in sorted(self._used_since_written)]
        self._registry.set_last_used(used)
        self._used_since_written.clear()

    def _tell(self, paths: list[str]) -> None:
        if paths:
            with self._lock:
                listeners = list(self._listeners)
            for listener in listeners:
                listener(tuple(paths))

    def _unused_name(self, purpose: str, path: str | None = None) -> Path:
        # A dot begins no store path. Leftovers of earlier processes are gone since the opening.
        of = "" if path is None else f"-{hash_part(path)}"
        return self._directory / f".{purpose}-{next(self._numbers)}{of}"

    def _own_names(self) -> list[bytes]:
        """What an output must not contain to work on another host: this worker's directory."""
        return [os.fsencode(name) + b"/" for name in (self._base_dir.absolute(), self._base_dir.resolve())]


class DirectoryNarReceiver:
    """Unpacks an archive beside its place while it arrives (see NarReceiver)."""

    def __init__(
        self,
        unpacked: Path,
        info: PathInfo,
        compression: Compression,
        install: Callable[[Path, PathInfo], PathInfo],
    ) -> None:
        self._unpacked = unpacked
        self._info = info
        self._install = install
        self._unpacker = nar.Unpacker(unpacked)
        self._verifier = nar.NarVerifier(info.nar_hash, info.nar_size, compression, self._unpacker)

    def feed(self, travelled: bytes) -> None:
        """The next bytes off the wire."""
        self._verifier.feed(travelled)

    def commit(self) -> PathInfo:
        """Verify, and make the path valid."""
        self._verifier.finish()
        return self._install(self._unpacked, self._info)

    def abort(self) -> None:
        """Remove what was unpacked."""
        self._unpacker.abort()


def _hash_of_leftover(name: str) -> str | None:
    """The hash part of what was about to be registered; None for anything else that a crash left."""
    if matched := _BUILT.fullmatch(name):
        return matched[1]
    try:
        return hash_part(check_path(name))
    except StoreError:
        return None


def _canonicalise(built: Path) -> None:
    parent = os.open(built.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        canonicalise(parent, os.fsencode(built.name))
    finally:
        os.close(parent)


def _move(built: Path, place: Path) -> None:
    """Rename; a directory must be writable to change its parent, and is not any more."""
    is_directory = stat.S_ISDIR(built.lstat().st_mode)
    if is_directory:
        built.chmod(0o755)
    built.rename(place)
    if is_directory:
        place.chmod(0o555)
        os.utime(place, _TIMES_SECS)


def _nar_hash(path: Path) -> str:
    hasher = nar.NarHasher()
    for piece in nar.pack(path):
        hasher.feed(piece)
    return hasher.hash
