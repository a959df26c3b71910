"""Options of a program: credentials, a TOML file, environment variables and flags, in rising precedence.

One table says everything about an option (operations.md, "Configuration"): from its key
`proto.maxConnections` follow its place in the file (`[proto]` `maxConnections`), its variable
(`GRADIENT_PROTO_MAX_CONNECTIONS`) and its flag (`--proto-max-connections`). Keys of the worker begin
with `worker.`, which its flags leave out.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradient_protocol.credentials import find_credential

__all__ = ["ConfigError", "Option", "Options", "Values", "names", "number", "text", "whole"]

_WORKER: Final = "worker"


class ConfigError(Exception):
    """One line that says what is wrong and what to write instead."""


def text(value: object) -> str:
    """Any text but the empty one. ValueError says what is wanted, as with every reader here."""
    if not isinstance(value, str) or not value:
        raise ValueError("text is wanted")
    return value


def whole(value: object) -> int:
    """A whole number, 0 or more."""
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[0-9]+", value) else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number, 0 or more, is wanted")
    return value


def number(value: object) -> float:
    """A finite number, 0 or more."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError("a number, 0 or more, is wanted")
    return float(value)


def names(value: object) -> tuple[str, ...]:
    """A list of texts, which stand between commas outside of the file; it may be empty."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(part, str) and part for part in value):
        raise ValueError("a list of names is wanted (with commas between them outside the file)")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its key, how its value is read, what it is when nobody says, and what it is for.

    `credential`: what the service manager may hand over in its place (docs/systemd.md). The option names
    that file; it is the file's content where `in_credential` says so. `shown` takes secrets out of a text.
    """

    key: str
    read: Callable[[object], object]
    default: object
    help: str
    credential: str | None = None
    in_credential: bool = False
    shown: Callable[[str], str] = str

    @property
    def words(self) -> list[str]:
        """The words of the key, in lower case."""
        return re.sub(r"([A-Z])", r".\1", self.key).lower().split(".")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "_".join(["GRADIENT", *self.words]).upper()

    @property
    def field(self) -> str:
        """The field of the program's configuration, and the parameter behind the flag."""
        return "_".join(self.words).removeprefix(f"{_WORKER}_")

    @property
    def flag(self) -> str:
        """The flag of the program."""
        return "--" + self.field.replace("_", "-")


_Found = list[tuple[Option, object, str]]


@dataclass(frozen=True, slots=True)
class Values:
    """What the sources say: values by field, where each came from by key, and what was odd."""

    values: dict[str, object]
    origins: dict[str, str]
    warnings: tuple[str, ...]


class Options:
    """The options of one program.

    A variable that begins with `prefix` and is none of them is told, unless it is of `others`.
    `misplaced`: what to say of a table that belongs into another program's file.
    """

    def __init__(
        self,
        options: Sequence[Option],
        *,
        prefix: str,
        others: re.Pattern[str] | None = None,
        misplaced: Mapping[str, str] | None = None,
    ) -> None:
        self._options = tuple(options)
        self._prefix = prefix
        self._others = others
        self._misplaced = misplaced or {}
        self._by_field = {option.field: option for option in options}
        self._by_key = {option.key: option for option in options}
        self._by_variable = {option.variable: option for option in options}
        parts = [option.key.split(".") for option in options]
        self._tables = {".".join(part[:length]) for part in parts for length in range(1, len(part))}

    def load(
        self, *, file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]
    ) -> Values:
        """Merge the sources. `flags` by field, None where a flag was not given.

        Raises ConfigError for an unknown key, an unreadable file or a value of the wrong kind.
        """
        values = {option.field: option.default for option in self._options}
        origins = {option.key: "default" for option in self._options}
        variables, warnings = self._from_environment(environment)
        given = [(self._by_field[name], raw) for name, raw in flags.items() if raw is not None]
        sources = [
            *self._from_credentials(environment),
            *self._from_file(file),
            *variables,
            *((option, raw, option.flag) for option, raw in given),
        ]
        for option, raw, origin in sources:
            try:
                values[option.field] = option.read(_without_nul(raw))
            except ValueError as error:
                told = option.shown(raw) if isinstance(raw, str) else raw
                raise ConfigError(f"{option.key} ({origin}): {error}, not {told!r}") from None
            origins[option.key] = origin
        return Values(values, origins, tuple(warnings))

    def _from_credentials(self, environment: Mapping[str, str]) -> _Found:
        found: _Found = []
        for option in self._options:
            file = None if option.credential is None else find_credential(environment, option.credential)
            if file is None:
                continue
            try:
                raw = file.read_text(encoding="utf-8").strip() if option.in_credential else str(file)
            except (OSError, UnicodeDecodeError):
                raise ConfigError(f"{option.key}: the credential {file} cannot be read") from None
            found.append((option, raw, f"credential {option.credential}"))
        return found

    def _from_file(self, file: Path | None) -> _Found:
        if file is None:
            return []
        try:
            tree = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {os.strerror(error.errno or 0)}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is no TOML file: {error}") from None
        return self._walk(file, tree, "")

    def _walk(self, file: Path, table: dict[str, object], prefix: str) -> _Found:
        found: _Found = []
        for name, value in table.items():
            key = f"{prefix}{name}"
            if key in self._by_key:
                found.append((self._by_key[key], value, str(file)))
            elif key in self._tables and isinstance(value, dict):
                found += self._walk(file, value, f"{key}.")
            elif key in self._tables:
                raise ConfigError(f"{file}: `{key}` must be a table: [{key}]")
            elif key in self._misplaced:
                raise ConfigError(f"{file}: {self._misplaced[key]}")
            else:
                raise ConfigError(
                    f"{file}: unknown key `{key}`; did you mean `{_nearest(key, self._by_key)}`?"
                )
        return found

    def _from_environment(self, environment: Mapping[str, str]) -> tuple[_Found, list[str]]:
        found: _Found = []
        warnings: list[str] = []
        for variable, raw in environment.items():
            option = self._by_variable.get(variable)
            if option is not None:
                found.append((option, raw, variable))
            elif variable.startswith(self._prefix) and not (
                self._others and self._others.fullmatch(variable)
            ):
                near = _nearest(variable, self._by_variable)
                warnings.append(f"unknown variable {variable}; did you mean {near}?")
        return found, warnings


def _nearest(name: str, known: Mapping[str, Option]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def _without_nul(value: object) -> object:
    # No file, address or name has one, and what takes them would complain in words of its own.
    if any(
        isinstance(part, str) and "\0" in part for part in (value if isinstance(value, list) else [value])
    ):
        raise ValueError("text without NUL is wanted")
    return value
