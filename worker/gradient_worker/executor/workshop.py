"""What the executors work with; `app` puts it together."""

from dataclasses import dataclass
from pathlib import Path

from gradient_worker.executor.host_watch import HostWatch
from gradient_worker.executor.inputs import InputFetcher
from gradient_worker.executor.metrics import BuildMeters, Speeds
from gradient_worker.journal_keeper import JournalKeeper
from gradient_worker.keeper import RunnerKeeper
from gradient_worker.logs import LogLimits
from gradient_worker.queries import Queries
from gradient_worker.server_clock import ServerClock
from gradient_worker.stores.base import Store
from gradient_worker.threads import Threads
from gradient_worker.transfer import Transfers
from gradient_worker.wire import Link

__all__ = ["Workshop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """One for the agent. `tools`: the directory of `gradient-cluster`; `cpu_core_score`: this host's."""

    base_dir: Path
    tools: Path
    cpu_count: int
    max_concurrent_builds: int
    cpu_core_score: float | None
    log_limits: LogLimits
    clock: ServerClock
    threads: Threads
    link: Link
    store: Store
    runner: RunnerKeeper
    journal: JournalKeeper
    transfers: Transfers
    inputs: InputFetcher
    queries: Queries
    meters: BuildMeters
    speeds: Speeds
    host: HostWatch
