"""Reading a table of a recipe key by key, so that every complaint names its key (pure)."""

from collections.abc import Sequence
from typing import Any, Self

from gradient_worker.evaluator.positions import KeyPath
from gradient_worker.evaluator.problems import Problem, suggestion

__all__ = ["Entry"]

# Ten years: whoever means for ever can say so.
_MAX_SECS = 315_360_000

_TOML_NAMES = {str: "text", list: "an array", dict: "a table", bool: "true or false"}


class Entry:
    """A table of the file at `path`. What is wrong goes to `problems`, and counts as absent."""

    def __init__(
        self, table: dict[str, Any], path: KeyPath, problems: list[Problem], title: str = ""
    ) -> None:
        self._table = table
        self._problems = problems
        self._title = title
        self.path = path

    def __contains__(self, key: str) -> bool:
        """Whether the table has `key`, of whatever type."""
        return key in self._table

    def called(self, kind: str, name: str | None) -> Self:
        """The same table, with messages that begin with what it is called."""
        title = f"{kind} {name!r}: " if name else ""
        return type(self)(self._table, self.path, self._problems, title)

    def problem(self, message: str, *key: str | int) -> None:
        """Something is wrong with `key`."""
        self._problems.append(Problem((*self.path, *key), self._title + message))

    def known(self, keys: Sequence[str]) -> None:
        """Complains about every other key."""
        for key in self._table:
            if key not in keys:
                self.problem(f"unknown key {key!r:.60}{suggestion(key, keys)}", key)

    def empty(self, key: str) -> bool:
        """Whether `key` is an array without elements."""
        return self._table.get(key) == []

    def text(self, key: str) -> str | None:
        """A text that is not empty, None where there is none."""
        value = self._typed(key, str)
        if value == "":
            self.problem(f"{key} is empty", key)
        elif value is not None and "\0" in value:
            self.problem(f"{key} holds a NUL byte", key)
            return None
        return value or None

    def required_text(self, key: str) -> str | None:
        """Like `text`; complains where there is none."""
        if key not in self._table:
            self.problem(f"{key} is missing", key)
        return self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        """An array of texts, empty where there is none."""
        values = self._typed(key, list) or []
        for index, value in enumerate(values):
            if not isinstance(value, str):
                self.problem(f"{key} holds {_kind(value)} where text is due", key, index)
            elif "\0" in value:
                self.problem(f"{key} holds a NUL byte", key, index)
        return tuple(value for value in values if isinstance(value, str))

    def text_map(self, key: str) -> dict[str, str]:
        """A table of texts, empty where there is none."""
        values = self._typed(key, dict) or {}
        for name, value in values.items():
            if not isinstance(value, str):
                self.problem(f"{key}.{name} is {_kind(value)}, text is due", key, name)
        return {name: value for name, value in values.items() if isinstance(value, str)}

    def flag(self, key: str) -> bool:
        """True or false, false where there is none."""
        return bool(self._typed(key, bool))

    def seconds(self, key: str) -> float | None:
        """A positive number, None where there is none."""
        value = self._table.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problem(f"{key} is {_kind(value)}, a number of seconds is due", key)
        elif not 0 < value <= _MAX_SECS:
            self.problem(f"{key} must be over 0 and at most {_MAX_SECS} seconds", key)
        else:
            return float(value)
        return None

    def count(self, key: str, default: int) -> int:
        """A whole number from 0 on."""
        value = self._table.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            self.problem(f"{key} must be a whole number, 0 or more", key)
            return default
        return value

    def table(self, key: str) -> "Entry | None":
        """A table within."""
        value = self._typed(key, dict)
        return None if value is None else Entry(value, (*self.path, key), self._problems, self._title)

    def entries(self, key: str) -> list["Entry"]:
        """The tables of an array of tables."""
        values = self._table.get(key, [])
        if not isinstance(values, list):
            self.problem(f"{key} is {_kind(values)}; write [[{key}]] above each", key)
            return []
        found = []
        for index, value in enumerate(values):
            if isinstance(value, dict):
                found.append(Entry(value, (*self.path, key, index), self._problems, self._title))
            else:
                self.problem(f"{key} holds {_kind(value)} where a table is due", key, index)
        return found

    def _typed(self, key: str, kind: type) -> Any:  # noqa: ANN401 - of the type asked for, or None
        value = self._table.get(key)
        if value is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            return value
        self.problem(f"{key} is {_kind(value)}, {_TOML_NAMES[kind]} is due", key)
        return None


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    return _TOML_NAMES.get(type(value), "a date or time")
