"""Swapping two names in one step, which the standard library does not offer."""

import ctypes
import errno
import os
from pathlib import Path

__all__ = ["exchange"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(first: Path, second: Path) -> None:
    """Each of the two takes the other's place. Atomic where kernel and file system can (renameat2).

    Elsewhere there is an instant in which `second` does not exist.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        names = (os.fsencode(first), os.fsencode(second))
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in {errno.ENOSYS, errno.EINVAL}:
            raise OSError(number, os.strerror(number), str(second))
    aside = first.with_name(first.name + "-aside")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)
