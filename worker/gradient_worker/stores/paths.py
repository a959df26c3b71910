"""What is a store path: the one check of every name that comes from elsewhere (pure)."""

import re

from gradient_worker.stores.base import StoreError

__all__ = ["check_path", "hash_part"]

# The letters of a hash and of a name as Nix has them; 211 characters of name leave room for a suffix.
_STORE_PATH = re.compile(r"[0-9abcdfghijklmnpqrsvwxyz]{32}-[0-9A-Za-z+\-._?=]{1,211}")


def check_path(path: str) -> str:
    """`path` itself. Raises StoreError for anything but `<32 characters>-<name>`."""
    if not _STORE_PATH.fullmatch(path):
        raise StoreError(f"not a store path: {path[:80]!r}")
    return path


def hash_part(path: str) -> str:
    """The 32 characters that a path begins with."""
    return path[:32]
