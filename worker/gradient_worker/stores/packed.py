"""Small outputs as archives, between their registration and their upload.

An output is packed to be hashed, and uploaded next: a small one needs no second look at the disk.
"""

import threading
from collections.abc import Iterable
from typing import Final

from gradient_worker.stores.base import PathInfo

__all__ = ["KEPT_BYTES", "KEPT_MAX", "PackedOutputs"]

KEPT_BYTES: Final = 64 * 1024
"""An archive of more is not kept."""

KEPT_MAX: Final = 64


class PackedOutputs:
    """The last `KEPT_MAX`, each until it is taken. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: dict[tuple[str, str], tuple[bytes, ...]] = {}

    def keep(self, info: PathInfo, pieces: Iterable[bytes]) -> None:
        """The whole archive of `info`, in pieces; ignored if it is too large."""
        if info.nar_size > KEPT_BYTES:
            return
        with self._lock:
            if len(self._pieces) >= KEPT_MAX:
                del self._pieces[next(iter(self._pieces))]
            self._pieces[info.path, info.nar_hash] = tuple(pieces)

    def take(self, info: PathInfo) -> tuple[bytes, ...] | None:
        """The pieces, once; None for what is not kept."""
        with self._lock:
            return self._pieces.pop((info.path, info.nar_hash), None)
