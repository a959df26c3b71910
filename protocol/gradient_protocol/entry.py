"""Starts a program of this distribution, or says which extra it was installed without."""

import importlib
import sys

__all__ = ["start"]

USAGE_EXIT = 2


def start(module: str, program: str, extra: str) -> None:
    """Calls `main` of `module`. Ends with 2 and one line where a library of `extra` is missing."""
    try:
        importlib.import_module(module).main()
    except ModuleNotFoundError as error:  # some modules are only imported by the command that needs them
        missing = error.name or ""
        if missing.startswith("gradient_"):
            raise
        sys.stderr.write(f"{program}: {missing} is missing: install gradient-pair[{extra}]\n")
        raise SystemExit(USAGE_EXIT) from None
