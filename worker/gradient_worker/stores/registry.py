"""The durable half of a directory store: which paths are valid, in a small SQLite file.

One row a path. The file is read once, at the opening; the store answers from memory. Its journal is
not flushed at each commit: what a loss of power can undo is a registration, whose path is then an
unregistered leftover and is removed at the next opening.
"""

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradient_worker.stores.base import PathInfo, StoreError

__all__ = ["Registration", "Registry"]

_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE path (
    path TEXT PRIMARY KEY,
    nar_hash TEXT NOT NULL,
    nar_size INTEGER NOT NULL CHECK (nar_size >= 0),
    refs TEXT NOT NULL,
    contains_store_dir INTEGER NOT NULL,
    registered_at REAL NOT NULL,
    last_used_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE opened (boot_id TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Registration:
    """A row: times in seconds since the epoch on this host's clock."""

    info: PathInfo
    registered_at: float
    last_used_at: float


class Registry:
    """The rows. Not locked: its store's lock serves."""

    def __init__(self, file: Path) -> None:
        self._connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=10)
        try:
            self._prepare(file)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, file: Path) -> None:
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._connection.executescript(
                    f"BEGIN;{_SCHEMA}PRAGMA user_version = {_SCHEMA_VERSION};COMMIT;"
                )
            elif version != _SCHEMA_VERSION:
                raise StoreError(f"{file} is of version {version}, this program knows {_SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{file} cannot be read ({error}); with it deleted the store starts empty"
            ) from error

    def load(self) -> list[Registration]:
        """All rows."""
        rows = self._connection.execute(
            "SELECT path, nar_hash, nar_size, refs, contains_store_dir, registered_at, last_used_at FROM path"
        )
        return [
            Registration(
                PathInfo(path, nar_hash, nar_size, tuple(json.loads(refs)), bool(contains_store_dir)),
                registered_at,
                last_used_at,
            )
            for path, nar_hash, nar_size, refs, contains_store_dir, registered_at, last_used_at in rows
        ]

    def last_boot(self) -> str | None:
        """The boot that the store was last opened in, None where it never was."""
        row = self._connection.execute("SELECT boot_id FROM opened").fetchone()
        return None if row is None else str(row[0])

    def set_boot(self, boot_id: str) -> None:
        """The store is opened in this boot of the host."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("DELETE FROM opened")
            self._connection.execute("INSERT INTO opened VALUES (?)", (boot_id,))

    def put(self, registration: Registration) -> None:
        """Add or replace a row."""
        info = registration.info
        self._connection.execute(
            "INSERT OR REPLACE INTO path VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                info.path,
                info.nar_hash,
                info.nar_size,
                json.dumps(info.references),
                info.contains_store_dir,
                registration.registered_at,
                registration.last_used_at,
            ),
        )

    def remove(self, paths: Iterable[str]) -> None:
        """Remove rows, all or none."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("DELETE FROM path WHERE path = ?", [(path,) for path in paths])

    def set_last_used(self, times: Iterable[tuple[str, float]]) -> None:
        """Write down when paths were last used, all or none."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(
                "UPDATE path SET last_used_at = ? WHERE path = ?", [(at, path) for path, at in times]
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
