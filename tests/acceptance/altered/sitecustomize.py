"""What a test alters in a process that it starts: Python runs this file first where `PYTHONPATH` names its
directory (tests/acceptance/alter.py).

GRADIENT_TEST_CLOCK      a file with the seconds that somebody has set this host's wall clock ahead by
GRADIENT_TEST_CONSTANTS  `module:NAME=number,...`: lengths of time that would make a test long
GRADIENT_TEST_DIE_AT     `module:Class.method`, in front of which the process kills itself
GRADIENT_TEST_BLOCK      seconds for which SIGRTMIN blocks the event loop
"""

import importlib
import os
import signal
import time


def _alter_clock(name: str) -> None:
    real, file = time.time, os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    time.time = lambda: real() + float(os.pread(file, 100, 0) or 0)


def _alter_constants(text: str) -> None:
    for entry in text.split(","):
        place, _, value = entry.partition("=")
        module, _, name = place.partition(":")
        found = importlib.import_module(module)
        setattr(found, name, type(getattr(found, name))(float(value)))


def _block_on_signal(secs: float) -> None:
    # Handlers run in the main thread, where the loop is; the other threads go on.
    signal.signal(signal.SIGRTMIN, lambda *_: time.sleep(secs))


def _die_at(text: str) -> None:
    module, _, path = text.partition(":")
    owner, _, method = path.partition(".")
    setattr(
        getattr(importlib.import_module(module), owner),
        method,
        lambda *_args, **_fields: os.kill(os.getpid(), signal.SIGKILL),
    )


if _clock := os.environ.get("GRADIENT_TEST_CLOCK"):
    _alter_clock(_clock)
if _constants := os.environ.get("GRADIENT_TEST_CONSTANTS"):
    _alter_constants(_constants)
if _secs := os.environ.get("GRADIENT_TEST_BLOCK"):
    _block_on_signal(float(_secs))
if _place := os.environ.get("GRADIENT_TEST_DIE_AT"):
    _die_at(_place)
