"""The runner's log: plain lines on standard error (`logging` would cost 1 MiB)."""

from __future__ import annotations

import os
import sys
import time

__all__ = ["say"]


def say(text: str) -> None:
    """One line to the runner's log."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        sys.stderr.write(f"{stamp} runner[{os.getpid()}] {text}\n")
        sys.stderr.flush()
    except OSError:
        return  # a full disk must end no build
