"""The server's options: a TOML file, environment variables and flags, in rising precedence.

Names and defaults are operations.md, "Configuration". One table says everything about an option:
from it follow its key in the file (`[proto]` `maxConnections`), its variable
(`GRADIENT_PROTO_MAX_CONNECTIONS`) and its flag (`--proto-max-connections`). An option of a part that
this version does not have is refused rather than ignored.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from gradient_protocol.credentials import find_credential

__all__ = ["OPTIONS", "ConfigError", "Loaded", "Option", "ServerConfig", "load", "without_secrets"]

ENVIRONMENT_PREFIX: Final = "GRADIENT_"
# Variables of the worker, of running cluster members and of the command line share the prefix.
_VARIABLES_OF_OTHERS: Final = re.compile(
    r"GRADIENT_(WORKER_.*|CLUSTER_.*|URL|API_KEY_FILE|CORES|BENCH_.*|TEST_.*)"
)
_GIB: Final = 1024**3
_SERVICE: Final = "gradient-server"


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


def _whole(value: object) -> int:
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[0-9]+", value) else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number, 0 or more, is wanted")
    return value


def _positive(value: object) -> int:
    whole = _whole(value)
    if whole == 0:
        raise ValueError("a whole number, 1 or more, is wanted")
    return whole


def _port(value: object) -> int:
    port = _whole(value)
    if port > 65535:
        raise ValueError("a port, 0 to 65535, is wanted")
    return port


def _number(value: object) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError("a number, 0 or more, is wanted")
    return float(value)


def _interval(value: object) -> float:
    number = _number(value)
    if number < 1:
        raise ValueError("a number, 1 or more, is wanted")
    return number


def _switch(value: object) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if isinstance(value, str):
        value = words.get(value.lower())
    if not isinstance(value, bool):
        raise ValueError("true or false is wanted")
    return value


def _addresses(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not value or not all(isinstance(part, str) for part in value):
        raise ValueError("an address such as tls://0.0.0.0:3001 is wanted, or a list of them")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its key, how its value is read, what it is when nobody says, and what it is for.

    `credential`: what the service manager may hand over in its place (docs/systemd.md). The option names
    that file; it is the file's content where `in_credential` says so.
    """

    key: str
    read: Callable[[object], object]
    default: object
    help: str
    credential: str | None = None
    in_credential: bool = False

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
        """The field of ServerConfig, and the parameter behind the flag."""
        return "_".join(self.words)

    @property
    def flag(self) -> str:
        """The flag of `gradient-server`."""
        return "--" + "-".join(self.words)


OPTIONS: Final[tuple[Option, ...]] = (
    Option("listenAddr", _text, "127.0.0.1", "address the HTTP API listens on"),
    Option("port", _port, 3000, "port the HTTP API listens on; 0 takes a free one"),
    Option("baseDir", _text, "/var/lib/gradient", "where the server keeps everything"),
    Option("insecurePlaintext", _switch, False, "allow plain TCP for workers beyond loopback"),
    Option("proto.listen", _addresses, ("tcp://127.0.0.1:3001",), "addresses for workers: tls, tcp, unix"),
    Option("proto.tlsCert", _text, None, "certificate chain (PEM) for tls://", f"{_SERVICE}.tls-cert"),
    Option("proto.tlsKey", _text, None, "private key (PEM) of proto.tlsCert", f"{_SERVICE}.tls-key"),
    Option("proto.maxConnections", _positive, 1024, "workers connected at once"),
    Option("proto.workerHeartbeatTimeoutSecs", _number, 120.0, "silence that ends a worker's session"),
    Option("proto.reconnectGraceSecs", _number, 60.0, "how long a lost worker's jobs wait for it"),
    Option("proto.advertiseUrl", _text, None, "this instance's address for workers, as others name it"),
    Option(
        "database.url",
        _text,
        None,
        "sqlite:///PATH or postgresql://...; in baseDir by default",
        f"{_SERVICE}.database-url",
        in_credential=True,
    ),
    Option("nar.maxConcurrentDownloads", _positive, 16, "NARs sent to workers at once"),
    Option("upload.concurrency", _positive, 8, "NARs taken in at once"),
    Option("upload.bytesBudget", _positive, 8 * _GIB, "bytes of NARs taken in at once, by their estimates"),
    Option("upload.leaseIdleSecs", _number, 300.0, "how long an interrupted upload is kept"),
    Option("build.maxAttempts", _positive, 3, "tries of a build after transient failures"),
    Option("build.retryBackoffSecs", _number, 30.0, "wait before the second try; doubles with each"),
    Option("build.defaultTimeoutSecs", _number, 14400.0, "a build's time where its recipe sets none"),
    Option("build.defaultMaxSilentSecs", _number, 3600.0, "a build's silence where its recipe sets none"),
    Option("build.inputsUnavailableMaxLoops", _whole, 3, "repairs of a build's missing inputs"),
    Option("build.substituteMissEscalationThreshold", _positive, 2, "misses before building from source"),
    Option("scheduler.scoringPolicy", _text, "resource-aware", "how jobs and workers are matched"),
    Option("scheduler.clusterPrepareTimeoutSecs", _interval, 30.0, "for all members of a cluster to accept"),
    Option("scheduler.clusterReserveAfterSecs", _number, 600.0, "wait for seats before they are reserved"),
    Option("scheduler.clusterReserveTimeoutSecs", _interval, 1800.0, "how long reserved seats are kept"),
    Option("scheduler.clusterBackfill", _switch, False, "short builds on reserved seats meanwhile"),
    Option("metrics.instanceIntervalSecs", _interval, 30.0, "between two measurements of the instance"),
    Option("retentionDays", _interval, 90.0, "how long ended clusters are kept and history is read"),
)

_BY_FIELD: Final = {option.field: option for option in OPTIONS}
_BY_KEY: Final = {option.key: option for option in OPTIONS}
_BY_VARIABLE: Final = {option.variable: option for option in OPTIONS}
_SECTIONS: Final = {option.key.rpartition(".")[0] for option in OPTIONS if "." in option.key}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The effective values. Units are in the names."""

    listen_addr: str
    port: int
    base_dir: Path
    insecure_plaintext: bool
    proto_listen: tuple[str, ...]
    proto_tls_cert: Path | None
    proto_tls_key: Path | None
    proto_max_connections: int
    proto_worker_heartbeat_timeout_secs: float
    proto_reconnect_grace_secs: float
    proto_advertise_url: str | None
    database_url: str
    nar_max_concurrent_downloads: int
    upload_concurrency: int
    upload_bytes_budget: int
    upload_lease_idle_secs: float
    build_max_attempts: int
    build_retry_backoff_secs: float
    build_default_timeout_secs: float
    build_default_max_silent_secs: float
    build_inputs_unavailable_max_loops: int
    build_substitute_miss_escalation_threshold: int
    scheduler_scoring_policy: str
    metrics_instance_interval_secs: float
    retention_days: float
    scheduler_cluster_prepare_timeout_secs: float
    scheduler_cluster_reserve_after_secs: float
    scheduler_cluster_reserve_timeout_secs: float
    scheduler_cluster_backfill: bool

    def __repr__(self) -> str:
        """The base directory says enough; the database's URL may hold a password."""
        return f"ServerConfig(base_dir={str(self.base_dir)!r})"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration with where each value came from, and what was odd about its sources."""

    config: ServerConfig
    origins: Mapping[str, str]
    warnings: tuple[str, ...]

    def effective(self) -> dict[str, str]:
        """Each option with its value and its origin, fit for a log."""
        shown: dict[str, str] = {}
        for option in OPTIONS:
            value = getattr(self.config, option.field)
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            if option.field == "database_url":
                text = without_secrets(text)
            shown[option.key] = f"{text} ({self.origins[option.key]})"
        return shown


def without_secrets(url: str) -> str:
    """The database's URL without its password and its parameters, either of which may hold one."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        user, _, host = parts.netloc.rpartition("@")
        name = user.partition(":")[0]
        parts = parts._replace(netloc=f"{name}:***@{host}" if ":" in user else f"{name}@{host}")
    shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return f"{shown}?***" if parts.query else shown


def load(*, file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]) -> Loaded:
    """Merge the sources. `flags` by field name, None where a flag was not given.

    Raises ConfigError for an unknown key, an unreadable file or a value of the wrong kind.
    """
    values: dict[str, object] = {option.field: option.default for option in OPTIONS}
    origins = {option.key: "default" for option in OPTIONS}
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
            raise ConfigError(_complaint(option, origin, raw, error)) from None
        origins[option.key] = origin
    return Loaded(_effective(values), origins, tuple(warnings))


def _complaint(option: Option, origin: str, raw: object, error: ValueError) -> str:
    shown = without_secrets(raw) if option.key == "database.url" and isinstance(raw, str) else raw
    return f"{option.key} ({origin}): {error}, not {shown!r}"


def _effective(values: dict[str, Any]) -> ServerConfig:
    base_dir = Path(values["base_dir"]).absolute()
    cert, key = values["proto_tls_cert"], values["proto_tls_key"]
    if (cert is None) != (key is None):
        given, missing = (
            ("proto.tlsCert", "proto.tlsKey") if key is None else ("proto.tlsKey", "proto.tlsCert")
        )
        raise ConfigError(f"{given} is set without {missing}; set both")
    if cert is None and any(address.startswith("tls://") for address in values["proto_listen"]):
        raise ConfigError("proto.listen names a tls:// address; set proto.tlsCert and proto.tlsKey")
    url = values["database_url"] or f"sqlite:///{base_dir / 'gradient.db'}"
    if not url.startswith(("sqlite:///", "postgresql://", "postgresql+psycopg://")):
        raise ConfigError(
            f"database.url must be sqlite:///PATH or postgresql://..., not {without_secrets(url)}"
        )
    if not url.startswith("sqlite") and values["proto_advertise_url"] is None:
        raise ConfigError("on PostgreSQL set proto.advertiseUrl, the address workers reach this instance at")
    values |= {
        "base_dir": base_dir,
        "proto_tls_cert": None if cert is None else Path(cert),
        "proto_tls_key": None if key is None else Path(key),
        "database_url": url,
    }
    return ServerConfig(**values)


def _from_credentials(environment: Mapping[str, str]) -> list[tuple[Option, object, str]]:
    found: list[tuple[Option, object, str]] = []
    for option in OPTIONS:
        file = None if option.credential is None else find_credential(environment, option.credential)
        if file is None:
            continue
        try:
            raw = file.read_text(encoding="utf-8").strip() if option.in_credential else str(file)
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"{option.key}: the credential {file} cannot be read") from None
        found.append((option, raw, f"credential {option.credential}"))
    return found


def _from_file(file: Path | None) -> list[tuple[Option, object]]:
    if file is None:
        return []
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {os.strerror(error.errno or 0)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML file: {error}") from None
    return _walk(file, tree, "")


def _walk(file: Path, table: dict[str, object], prefix: str) -> list[tuple[Option, object]]:
    found: list[tuple[Option, object]] = []
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in _SECTIONS and isinstance(value, dict):
            found += _walk(file, value, f"{key}.")
        elif key in _BY_KEY:
            found.append((_BY_KEY[key], value))
        elif key == "worker":
            raise ConfigError(f"{file}: [worker] belongs into the file of gradient-worker, not the server's")
        else:
            near = difflib.get_close_matches(key, _BY_KEY, n=1, cutoff=0.0)
            raise ConfigError(f"{file}: unknown key `{key}`; did you mean `{near[0]}`?")
    return found


def _from_environment(environment: Mapping[str, str]) -> tuple[list[tuple[Option, object, str]], list[str]]:
    found: list[tuple[Option, object, str]] = []
    warnings: list[str] = []
    for variable, raw in environment.items():
        option = _BY_VARIABLE.get(variable)
        if option is not None:
            found.append((option, raw, variable))
        elif variable.startswith(ENVIRONMENT_PREFIX) and not _VARIABLES_OF_OTHERS.fullmatch(variable):
            near = difflib.get_close_matches(variable, _BY_VARIABLE, n=1, cutoff=0.0)
            warnings.append(f"unknown variable {variable}; did you mean {near[0]}?")
    return found, warnings
