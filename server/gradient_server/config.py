"""The server's options (operations.md, "Configuration"); how they are read is `gradient_protocol.options`.

An option of a part that this version does not have is refused rather than ignored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from gradient_protocol.options import ConfigError, Option, Options, number, text, whole

__all__ = ["OPTIONS", "ConfigError", "Loaded", "Option", "ServerConfig", "load", "without_secrets"]

# Variables of the worker, of running cluster members and of the command line share the prefix.
_VARIABLES_OF_OTHERS: Final = re.compile(
    r"GRADIENT_(WORKER_.*|CLUSTER_.*|URL|API_KEY_FILE|CORES|BENCH_.*|TEST_.*)"
)
_GIB: Final = 1024**3
_SERVICE: Final = "gradient-server"


def without_secrets(url: str) -> str:
    """The database's URL without its password and its parameters, either of which may hold one."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        user, _, host = parts.netloc.rpartition("@")
        name = user.partition(":")[0]
        parts = parts._replace(netloc=f"{name}:***@{host}" if ":" in user else f"{name}@{host}")
    shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return f"{shown}?***" if parts.query else shown


def _positive(value: object) -> int:
    count = whole(value)
    if count == 0:
        raise ValueError("a whole number, 1 or more, is wanted")
    return count


def _port(value: object) -> int:
    port = whole(value)
    if port > 65535:
        raise ValueError("a port, 0 to 65535, is wanted")
    return port


def _interval(value: object) -> float:
    secs = number(value)
    if secs < 1:
        raise ValueError("a number, 1 or more, is wanted")
    return secs


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


OPTIONS: Final[tuple[Option, ...]] = (
    Option("listenAddr", text, "127.0.0.1", "address the HTTP API listens on"),
    Option("port", _port, 3000, "port the HTTP API listens on; 0 takes a free one"),
    Option("baseDir", text, "/var/lib/gradient", "where the server keeps everything"),
    Option("insecurePlaintext", _switch, False, "allow plain TCP for workers beyond loopback"),
    Option("proto.listen", _addresses, ("tcp://127.0.0.1:3001",), "addresses for workers: tls, tcp, unix"),
    Option("proto.tlsCert", text, None, "certificate chain (PEM) for tls://", f"{_SERVICE}.tls-cert"),
    Option("proto.tlsKey", text, None, "private key (PEM) of proto.tlsCert", f"{_SERVICE}.tls-key"),
    Option("proto.maxConnections", _positive, 1024, "workers connected at once"),
    Option("proto.workerHeartbeatTimeoutSecs", number, 120.0, "silence that ends a worker's session"),
    Option("proto.reconnectGraceSecs", number, 60.0, "how long a lost worker's jobs wait for it"),
    Option("proto.advertiseUrl", text, None, "this instance's address for workers, as others name it"),
    Option(
        "database.url",
        text,
        None,
        "sqlite:///PATH or postgresql://...; in baseDir by default",
        f"{_SERVICE}.database-url",
        in_credential=True,
        shown=without_secrets,
    ),
    Option("nar.maxConcurrentDownloads", _positive, 16, "NARs sent to workers at once"),
    Option("upload.concurrency", _positive, 8, "NARs taken in at once"),
    Option("upload.bytesBudget", _positive, 8 * _GIB, "bytes of NARs taken in at once, by their estimates"),
    Option("upload.leaseIdleSecs", number, 300.0, "how long an interrupted upload is kept"),
    Option("build.maxAttempts", _positive, 3, "tries of a build after transient failures"),
    Option("build.retryBackoffSecs", number, 30.0, "wait before the second try; doubles with each"),
    Option("build.defaultTimeoutSecs", number, 14400.0, "a build's time where its recipe sets none"),
    Option("build.defaultMaxSilentSecs", number, 3600.0, "a build's silence where its recipe sets none"),
    Option("build.inputsUnavailableMaxLoops", whole, 3, "repairs of a build's missing inputs"),
    Option("build.substituteMissEscalationThreshold", _positive, 2, "misses before building from source"),
    Option("scheduler.scoringPolicy", text, "resource-aware", "how jobs and workers are matched"),
    Option("scheduler.clusterPrepareTimeoutSecs", _interval, 30.0, "for all members of a cluster to accept"),
    Option("scheduler.clusterReserveAfterSecs", number, 600.0, "wait for seats before they are reserved"),
    Option("scheduler.clusterReserveTimeoutSecs", _interval, 1800.0, "how long reserved seats are kept"),
    Option("scheduler.clusterBackfill", _switch, False, "short builds on reserved seats meanwhile"),
    Option("metrics.instanceIntervalSecs", _interval, 30.0, "between two measurements of the instance"),
    Option("retentionDays", _interval, 90.0, "how long ended clusters are kept and history is read"),
)

_TABLE: Final = Options(
    OPTIONS,
    prefix="GRADIENT_",
    others=_VARIABLES_OF_OTHERS,
    misplaced={"worker": "[worker] belongs into the file of gradient-worker, not the server's"},
)


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
            told = option.shown(",".join(value) if isinstance(value, tuple) else str(value))
            shown[option.key] = f"{told} ({self.origins[option.key]})"
        return shown


def load(*, file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]) -> Loaded:
    """Merge the sources. `flags` by field name, None where a flag was not given.

    Raises ConfigError for an unknown key, an unreadable file or a value of the wrong kind.
    """
    found = _TABLE.load(file=file, environment=environment, flags=flags)
    return Loaded(_effective(found.values), found.origins, found.warnings)


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
