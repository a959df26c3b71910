"""The worker's options (operations.md, "Configuration"); how they are read is `gradient_protocol.options`.

`docs/worker.md` lists those added here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gradient_protocol.options import ConfigError, Option, Options, names, number, text, whole

__all__ = ["OPTIONS", "ConfigError", "Loaded", "Option", "WorkerConfig", "load"]


def _address(value: object) -> str:
    address = text(value)
    if not address.startswith(("tls://", "tcp://", "unix:///")):
        raise ValueError("tls://host:port, tcp://host:port or unix:///path is wanted")
    return address


def _fingerprint(value: object) -> str:
    digits = text(value).lower().removeprefix("sha256:").replace(":", "")
    if not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise ValueError("a SHA-256 fingerprint is wanted, 64 hex digits")
    return digits


def _store(value: object) -> str:
    if value == "nix":
        raise ValueError("the Nix store is not part of this version; use `directory`")
    if value != "directory":
        raise ValueError("`directory` is wanted")
    return "directory"


_SERVICE: Final = "gradient-worker"

OPTIONS: Final[tuple[Option, ...]] = (
    Option("worker.serverUrl", _address, "tcp://127.0.0.1:3001", "server: tls://, tcp:// or unix:///path"),
    Option(
        "worker.serverCaFile",
        text,
        None,
        "CA certificates that the server's must be signed by",
        f"{_SERVICE}.server-ca",
    ),
    Option(
        "worker.serverFingerprint", _fingerprint, None, "SHA-256 of the server's certificate, instead of a CA"
    ),
    Option("worker.baseDir", text, "/var/lib/gradient-worker", "where the worker keeps everything"),
    Option(
        "worker.peersFile",
        text,
        None,
        "`peer_id:token` lines; <baseDir>/peers by default",
        f"{_SERVICE}.peers",
    ),
    Option("worker.name", text, None, "suggested name; people see the one it is registered by"),
    Option("worker.zone", text, None, "zone of this host, for clusters that must not span zones"),
    Option("worker.endpoint", text, None, "address that other cluster members may reach this host by"),
    Option("worker.store", _store, "directory", "the store: directory"),
    Option("worker.storeMaxBytes", whole, 0, "collect garbage above this size; 0: never"),
    Option("worker.build.maxConcurrent", whole, None, "builds at once; the number of CPUs by default"),
    Option("worker.build.cgroup", text, "auto", "the delegated cgroup: auto, off or its path"),
    Option("worker.eval.maxConcurrent", whole, 1, "evaluations at once"),
    Option("worker.system.architectures", names, None, "Nix system strings; detected by default"),
    Option("worker.system.features", names, None, "features that builds may ask for; detected by default"),
    Option("worker.system.cpuCoreScore", number, None, "score of one core instead of the benchmark's"),
    Option("worker.system.ramTotalMb", whole, None, "memory for builds; MemTotal within the cgroup's limit"),
    Option("worker.drainTimeoutSecs", number, 60.0, "how long a drain lets jobs run"),
    Option("worker.orphanKillSecs", number, 120.0, "how long builds outlive the agent"),
    Option("worker.log.burstBytesPerMin", whole, 8 * 1024 * 1024, "log of one build, a minute"),
    Option("worker.log.sustainedBytesPerHour", whole, 64 * 1024 * 1024, "log of one build, an hour"),
)

_TABLE: Final = Options(OPTIONS, prefix="GRADIENT_WORKER_")


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
    found = _TABLE.load(file=file, environment=environment, flags=flags)
    config = _effective(found.values, hostname=hostname, cpu_count=cpu_count)
    return Loaded(config, found.origins, found.warnings)


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
