"""The worker's options: credentials, a TOML file, environment variables and flags, in rising precedence.

Names and defaults are operations.md, "Configuration"; `docs/worker.md` lists those added here. One
table says everything about an option: from it follow its key in the file (`[worker.build]`
`maxConcurrent`), its variable (`GRADIENT_WORKER_BUILD_MAX_CONCURRENT`) and its flag
(`--build-max-concurrent`).
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gradient_protocol.credentials import find_credential

__all__ = ["OPTIONS", "ConfigError", "Loaded", "Option", "WorkerConfig", "load"]

ENVIRONMENT_PREFIX: Final = "GRADIENT_WORKER_"


class ConfigError(Exception):
    """One line that says what is wrong and what to write instead."""


def _without_nul(value: object) -> object:
    # No file, address or name has one, and what takes them would complain in words of its own.
    if any(
        isinstance(text, str) and "\0" in text for text in (value if isinstance(value, list) else [value])
    ):
        raise ValueError("text without NUL is wanted")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("text is wanted")
    return value


def _address(value: object) -> str:
    text = _text(value)
    if not text.startswith(("tls://", "tcp://", "unix:///")):
        raise ValueError("tls://host:port, tcp://host:port or unix:///path is wanted")
    return text


def _whole(value: object) -> int:
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[0-9]+", value) else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number, 0 or more, is wanted")
    return value


def _number(value: object) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError("a number, 0 or more, is wanted")
    return float(value)


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(part, str) and part for part in value):
        raise ValueError("a list of names is wanted (with commas between them outside the file)")
    return tuple(value)


def _fingerprint(value: object) -> str:
    text = _text(value).lower().removeprefix("sha256:").replace(":", "")
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise ValueError("a SHA-256 fingerprint is wanted, 64 hex digits")
    return text


def _store(value: object) -> str:
    if value == "nix":
        raise ValueError("the Nix store is not part of this version; use `directory`")
    if value != "directory":
        raise ValueError("`directory` is wanted")
    return "directory"


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its key below `worker`, how its value is read, and what it is for."""

    key: str
    read: Callable[[object], object]
    default: object
    help: str
    credential: str | None = None
    """The file of the service manager that stands in for the option (docs/systemd.md)."""

    @property
    def dotted(self) -> str:
        """The name people know it by: `worker.build.maxConcurrent`."""
        return f"worker.{self.key}"

    @property
    def words(self) -> list[str]:
        """The words of the key, in lower case."""
        return re.sub(r"([A-Z])", r".\1", self.key).lower().split(".")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + "_".join(self.words).upper()

    @property
    def field(self) -> str:
        """The field of WorkerConfig, and the parameter behind the flag."""
        return "_".join(self.words)

    @property
    def flag(self) -> str:
        """The flag of `gradient-worker`."""
        return "--" + "-".join(self.words)


_SERVICE: Final = "gradient-worker"

OPTIONS: Final[tuple[Option, ...]] = (
    Option("serverUrl", _address, "tcp://127.0.0.1:3001", "server: tls://, tcp:// or unix:///path"),
    Option(
        "serverCaFile",
        _text,
        None,
        "CA certificates that the server's must be signed by",
        f"{_SERVICE}.server-ca",
    ),
    Option("serverFingerprint", _fingerprint, None, "SHA-256 of the server's certificate, instead of a CA"),
    Option("baseDir", _text, "/var/lib/gradient-worker", "where the worker keeps everything"),
    Option(
        "peersFile", _text, None, "`peer_id:token` lines; <baseDir>/peers by default", f"{_SERVICE}.peers"
    ),
    Option("name", _text, None, "suggested name; people see the one it is registered by"),
    Option("zone", _text, None, "zone of this host, for clusters that must not span zones"),
    Option("endpoint", _text, None, "address that other cluster members may reach this host by"),
    Option("store", _store, "directory", "the store: directory"),
    Option("storeMaxBytes", _whole, 0, "collect garbage above this size; 0: never"),
    Option("build.maxConcurrent", _whole, None, "builds at once; the number of CPUs by default"),
    Option("build.cgroup", _text, "auto", "the delegated cgroup: auto, off or its path"),
    Option("eval.maxConcurrent", _whole, 1, "evaluations at once"),
    Option("system.architectures", _names, None, "Nix system strings; detected by default"),
    Option("system.features", _names, None, "features that builds may ask for; detected by default"),
    Option("system.cpuCoreScore", _number, None, "score of one core instead of the benchmark's"),
    Option("system.ramTotalMb", _whole, None, "memory for builds; MemTotal within the cgroup's limit"),
    Option("drainTimeoutSecs", _number, 60.0, "how long a drain lets jobs run"),
    Option("orphanKillSecs", _number, 120.0, "how long builds outlive the agent"),
    Option("log.burstBytesPerMin", _whole, 8 * 1024 * 1024, "log of one build, a minute"),
    Option("log.sustainedBytesPerHour", _whole, 64 * 1024 * 1024, "log of one build, an hour"),
)

_BY_FIELD: Final = {option.field: option for option in OPTIONS}
_BY_KEY: Final = {option.key: option for option in OPTIONS}
_BY_VARIABLE: Final = {option.variable: option for option in OPTIONS}
_SECTIONS: Final = {option.key.rpartition(".")[0] for option in OPTIONS if "." in option.key}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The effective values. Units are in the names; None where the host decides."""

    server_url: str
    server_ca_file: Path | None
    server_fingerprint: str | None
    base_dir: Path
    peers_file: Path
    name: str
    zone: str | None
    endpoint: str | None
    store: str
    store_max_bytes: int
    build_max_concurrent: int
    build_cgroup: str
    eval_max_concurrent: int
    system_architectures: tuple[str, ...] | None
    system_features: tuple[str, ...] | None
    system_cpu_core_score: float | None
    system_ram_total_mb: int | None
    drain_timeout_secs: float
    orphan_kill_secs: float
    log_burst_bytes_per_min: int
    log_sustained_bytes_per_hour: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration with where each value came from, and what was odd about its sources."""

    config: WorkerConfig
    origins: Mapping[str, str]
    warnings: tuple[str, ...]


def load(
    *,
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[str, object],
    hostname: str,
    cpu_count: int,
) -> Loaded:
    """Merge the sources. `flags` by field name, None where a flag was not given.

    Raises ConfigError for an unknown key, an unreadable file or a value of the wrong kind.
    """
    values: dict[str, object] = {option.field: option.default for option in OPTIONS}
    origins = {option.dotted: "default" for option in OPTIONS}
    found, warnings = _from_environment(environment)
    sources = [
        *_from_credentials(environment),
        *((option, raw, str(file)) for option, raw in _from_file(file)),
        *found,
        *((_BY_FIELD[name], raw, _BY_FIELD[name].flag) for name, raw in flags.items() if raw is not None),
    ]
    for option, raw, origin in sources:
        try:
            values[option.field] = option.read(_without_nul(raw))
        except ValueError as error:
            raise ConfigError(f"{option.dotted} ({origin}): {error}, not {raw!r}") from None
        origins[option.dotted] = origin
    config = _effective(values, hostname=hostname, cpu_count=cpu_count)
    return Loaded(config, origins, tuple(warnings))


def _effective(values: dict[str, Any], *, hostname: str, cpu_count: int) -> WorkerConfig:
    base_dir = Path(values["base_dir"]).absolute()
    if values["server_ca_file"] is not None and values["server_fingerprint"] is not None:
        raise ConfigError("worker.serverCaFile and worker.serverFingerprint exclude each other; keep one")
    ca_file = values["server_ca_file"]
    builds = values["build_max_concurrent"]
    values |= {
        "base_dir": base_dir,
        "peers_file": Path(values["peers_file"]) if values["peers_file"] else base_dir / "peers",
        "server_ca_file": None if ca_file is None else Path(ca_file),
        "name": values["name"] or hostname,
        "build_max_concurrent": cpu_count if builds is None else builds,
    }
    return WorkerConfig(**values)


def _from_file(file: Path | None) -> list[tuple[Option, object]]:
    if file is None:
        return []
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {os.strerror(error.errno or 0)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML file: {error}") from None
    worker = tree.pop("worker", {})
    if tree:
        name = next(iter(tree))
        raise ConfigError(f"{file}: unknown key `{name}`; the worker's options stand under [worker]")
    if not isinstance(worker, dict):
        raise ConfigError(f"{file}: `worker` must be a table: [worker]")
    return _walk(file, worker, "")


def _walk(file: Path, table: dict[str, object], prefix: str) -> list[tuple[Option, object]]:
    found: list[tuple[Option, object]] = []
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in _SECTIONS and isinstance(value, dict):
            found += _walk(file, value, f"{key}.")
        elif key in _BY_KEY:
            found.append((_BY_KEY[key], value))
        else:
            near = difflib.get_close_matches(key, _BY_KEY, n=1, cutoff=0.0)
            raise ConfigError(f"{file}: unknown key `worker.{key}`; did you mean `worker.{near[0]}`?")
    return found


def _from_credentials(environment: Mapping[str, str]) -> list[tuple[Option, object, str]]:
    found: list[tuple[Option, object, str]] = []
    for option in OPTIONS:
        file = None if option.credential is None else find_credential(environment, option.credential)
        if file is not None:
            found.append((option, str(file), f"credential {option.credential}"))
    return found


def _from_environment(environment: Mapping[str, str]) -> tuple[list[tuple[Option, object, str]], list[str]]:
    found: list[tuple[Option, object, str]] = []
    warnings: list[str] = []
    for variable, raw in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        option = _BY_VARIABLE.get(variable)
        if option is None:
            near = difflib.get_close_matches(variable, _BY_VARIABLE, n=1, cutoff=0.0)
            warnings.append(f"unknown variable {variable}; did you mean {near[0]}?")
        else:
            found.append((option, raw, variable))
    return found, warnings
