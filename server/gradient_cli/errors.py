"""What can go wrong for a user, with the exit code that says so (operations.md, Commands)."""

import enum

__all__ = ["CommandError", "ExitCode"]


class ExitCode(enum.IntEnum):
    """0 done, 1 the work failed, 2 usage, 3 server unreachable or refused."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    SERVER = 3


class CommandError(Exception):
    """One line that says what to do next, and the exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.SERVER) -> None:
        super().__init__(message)
        self.code = code
