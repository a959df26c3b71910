"""Where in a TOML text a key stands, for messages (pure).

The standard parser gives no positions. This one reads a text that it has accepted already, and only
when there is something to complain about; so it need not be strict, only find its way.
"""

import re
from bisect import bisect_right

__all__ = ["KeyPath", "Positions"]

# Keys from the outermost on; the index of an element where an array is on the way.
KeyPath = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(r"[ \t]*(?:\"((?:[^\"\\\n]|\\.)*)\"|'([^'\n]*)'|([A-Za-z0-9_-]+))[ \t]*")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}'
    r"|'''(?:[^']|'(?!''))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}\n#]*")


class Positions:
    """Line numbers, from 1, of the keys and array elements of `text`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._found: dict[KeyPath, int] = {}
        # How many tables an array of tables has had so far.
        self._tables: dict[KeyPath, int] = {}
        self._scan()

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest table around it that the text names."""
        while path and path not in self._found:
            path = path[:-1]
        return bisect_right(self._line_starts, self._found.get(path, 0))

    def _scan(self) -> None:
        text = self._text
        table: KeyPath = ()
        at = self._blank(0)
        while at < len(text):
            start = at
            if text.startswith("[[", at):
                keys, at = self._key(at + 2)
                path = self._resolve(keys[:-1]) + keys[-1:]
                index = self._tables[path] = self._tables.get(path, -1) + 1
                table = (*path, index)
                self._found.setdefault(path, start)
                self._found[table] = start
                at += 2
            elif text[at] == "[":
                keys, at = self._key(at + 1)
                table = self._resolve(keys)
                self._found.setdefault(table, start)
                at += 1
            else:
                at = self._pair(table, at)
            at = max(self._blank(at), start + 1)

    def _resolve(self, keys: KeyPath) -> KeyPath:
        """The table that a header names: within arrays of tables it is the last one's."""
        path: KeyPath = ()
        for key in keys:
            path = (*path, key)
            if path in self._tables:
                path = (*path, self._tables[path])
        return path

    def _blank(self, at: int) -> int:
        match = _BLANK.match(self._text, at)
        return at if match is None else match.end()

    def _key(self, at: int) -> tuple[KeyPath, int]:
        keys: list[str] = []
        while match := _KEY_PART.match(self._text, at):
            keys.append(next(group for group in match.groups() if group is not None))
            at = match.end()
            if not self._text.startswith(".", at):
                break
            at += 1
        return tuple(keys) or ("",), at

    def _pair(self, table: KeyPath, at: int) -> int:
        keys, after = self._key(at)
        for length in range(1, len(keys) + 1):
            self._found.setdefault(table + keys[:length], at)
        after = self._text.find("=", after) + 1
        return self._value(table + keys, self._blank(after)) if after else len(self._text)

    def _value(self, path: KeyPath, at: int) -> int:
        text = self._text
        if at >= len(text):
            return at
        if text[at] == "[":
            return self._array(path, at + 1)
        if text[at] == "{":
            return self._inline_table(path, at + 1)
        match = _STRING.match(text, at) or _SCALAR.match(text, at)
        return at if match is None else match.end()

    def _array(self, path: KeyPath, at: int) -> int:
        index = 0
        at = self._blank(at)
        while at < len(self._text) and self._text[at] != "]":
            start = at
            self._found[(*path, index)] = at
            at = self._blank(self._value((*path, index), at))
            index += 1
            if self._text.startswith(",", at):
                at = self._blank(at + 1)
            at = max(at, start + 1)
        return at + 1

    def _inline_table(self, path: KeyPath, at: int) -> int:
        at = self._blank(at)
        while at < len(self._text) and self._text[at] != "}":
            start = at
            at = self._blank(self._pair(path, at))
            if self._text.startswith(",", at):
                at = self._blank(at + 1)
            at = max(at, start + 1)
        return at + 1
