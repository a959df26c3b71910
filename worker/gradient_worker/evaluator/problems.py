"""What is wrong with a recipe, and how it is said (pure)."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradient_protocol.messages.shapes import Note

from gradient_worker.evaluator.positions import KeyPath, Positions

__all__ = ["Problem", "notes", "suggestion", "syntax_note"]

# More would help nobody, and a report has its limits.
_MAX_NOTES = 50
_LINE = re.compile(r" \(at line (\d+), column \d+\)$")
_KEY = re.compile(r"\s*([^=\s\[\]#]+)\s*=|\s*\[+\s*([^\]\s]+)")
# Comparing words costs some 50 us each.
_MAX_COMPARED = 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and the key that it is wrong with."""

    path: KeyPath
    message: str


def notes(file: str, text: str, problems: Sequence[Problem]) -> list[Note]:
    """The problems as an evaluation reports them, by line, each with `file:line: key`; at most 50."""
    positions = Positions(text)
    placed = sorted(((positions.line(each.path), each) for each in problems), key=lambda entry: entry[0])
    told = [
        Note(source=f"{file}:{line}: {_key(each.path)}", message=each.message)
        for line, each in placed[:_MAX_NOTES]
    ]
    if len(problems) > _MAX_NOTES:
        told.append(Note(source=file, message=f"and {len(problems) - _MAX_NOTES} more"))
    return told


def syntax_note(file: str, text: str, error: tomllib.TOMLDecodeError) -> Note:
    """What the parser said, with the line, and the key that the line begins with."""
    message = str(error)
    lines = text.split("\n")
    match = _LINE.search(message)
    line = int(match.group(1)) if match else len(lines)
    key = _KEY.match(lines[line - 1]) if line <= len(lines) else None
    named = (key.group(1) or key.group(2)) if key else lines[min(line, len(lines)) - 1].strip()[:40]
    return Note(
        source=f"{file}:{line}: {named}".rstrip(": "), message=f"not valid TOML: {_LINE.sub('', message)}"
    )


def suggestion(word: str, known: Iterable[str]) -> str:
    """`, did you mean ...?` where a known word is near, else nothing."""
    near = [each for each in known if abs(len(each) - len(word)) <= 3]
    if len(near) > _MAX_COMPARED:
        near = [each for each in near if each[:2] == word[:2]][:_MAX_COMPARED]
    matches = difflib.get_close_matches(word, near, n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""


def _key(path: KeyPath) -> str:
    return ".".join(part for part in path if isinstance(part, str))
