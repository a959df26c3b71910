"""What a base directory needs before a server can run in it."""

import os
from pathlib import Path

import sqlalchemy as sa
from gradient_protocol.ids import IdSource

from gradient_server.db.queries.registry import create_api_key, create_project, find_project, list_api_keys

__all__ = [
    "API_KEY_FILE",
    "DEFAULT_PROJECT",
    "ensure_registry",
    "instance_id",
    "make_first_key",
    "prepare",
    "write_secret",
]

API_KEY_FILE = "api-key"
DEFAULT_PROJECT = "default"


def prepare(base_dir: Path) -> None:
    """Makes the base directory, for its owner alone. OSError where that cannot be."""
    base_dir.mkdir(mode=0o700, parents=True, exist_ok=True)


def instance_id(base_dir: Path, ids: IdSource) -> str:
    """The id of this instance, made at its first start: a restarted server takes itself over."""
    file = base_dir / "instance_id"
    if file.exists():
        found = file.read_text(encoding="ascii").strip()
        if found:
            return found
    new = ids.new()
    replace_instance_id(base_dir, new)
    return new


def replace_instance_id(base_dir: Path, new: str) -> None:
    """Another instance took over what this one owned: it goes on under a new id."""
    _write(base_dir / "instance_id", new + "\n")


def ensure_registry(connection: sa.Connection, *, now: float, ids: IdSource) -> str | None:
    """The default project, and the first API key: its text where it was made just now."""
    if find_project(connection, DEFAULT_PROJECT) is None:
        create_project(connection, DEFAULT_PROJECT, now=now, ids=ids)
    if list_api_keys(connection):
        return None
    return create_api_key(connection, "first", None, now=now, ids=ids)


def make_first_key(connection: sa.Connection, base_dir: Path, *, now: float, ids: IdSource) -> Path | None:
    """`ensure_registry`, with the key's file within the transaction: the file where it was made just now.

    A key that is in the database alone is one that nobody will ever have. OSError, and no key, where
    the file cannot be written.
    """
    key = ensure_registry(connection, now=now, ids=ids)
    return None if key is None else write_secret(base_dir, key)


def write_secret(base_dir: Path, key: str) -> Path:
    """Keeps the first API key where only the owner can read it."""
    file = base_dir / API_KEY_FILE
    _write(file, key + "\n")
    return file


def _write(file: Path, text: str) -> None:
    """Whole or not at all, mode 0600 from the first byte."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
