"""Lines of logs as people see them in passing. Pure."""

import re
from typing import Final

__all__ = ["MAX_LINE_CHARACTERS", "last_line"]

MAX_LINE_CHARACTERS: Final = 500
# Colours and cursor movements of terminals, then every other control character.
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def last_line(tail: bytes) -> str | None:
    """The last complete line of the end of a log that says anything; None if there is none.

    At most 500 characters, without what would move a terminal's cursor.
    """
    complete, newline, _ = tail.rpartition(b"\n")
    if not newline:
        return None
    for line in reversed(complete.split(b"\n")):
        # What a progress bar wrote last stands after its carriage returns.
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
        shown = _CONTROLS.sub("", _ESCAPES.sub("", text)).strip()
        if shown:
            return shown[:MAX_LINE_CHARACTERS]
    return None
