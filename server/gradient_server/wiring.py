"""Makes every part of a server and connects them; nothing runs yet. For `app`, and for tests."""

import gc
import random
import secrets
import sys
from functools import partial
from typing import Final

import trio
from gradient_protocol.ids import IdSource

from gradient_server.clock import Clock, SystemClock
from gradient_server.cluster.database_store import DatabaseClusterStore
from gradient_server.cluster.runner import ClusterRunner
from gradient_server.cluster.settings import ClusterSettings
from gradient_server.config import ServerConfig
from gradient_server.db.runner import Database
from gradient_server.domain.events import Bus
from gradient_server.graph.jobs import JobDefaults, load_builds, load_job
from gradient_server.graph.settings import GraphSettings
from gradient_server.history.book import HistoryBook
from gradient_server.history.refresh import HistoryLoader, WindowsPass
from gradient_server.history.windows import WindowsSnapshot
from gradient_server.net.announce import announcer
from gradient_server.net.authority import Authority
from gradient_server.net.graces import Graces
from gradient_server.net.resume import lose_worker
from gradient_server.net.services import Services
from gradient_server.net.sessions import Sessions
from gradient_server.net.succession import Succession
from gradient_server.net.sweeps import Sweeps
from gradient_server.scheduler.claim_store import DatabaseClaimStore
from gradient_server.scheduler.model import SchedulerSettings
from gradient_server.scheduler.scheduler import Scheduler
from gradient_server.scoring.policy import policy_by_name
from gradient_server.storage.downloads import Downloads
from gradient_server.storage.logs import LogStore
from gradient_server.storage.nar_store import LocalNarStore
from gradient_server.storage.retention import Retention
from gradient_server.storage.uploads import Uploads

__all__ = ["build_services", "make_ids", "tune_interpreter"]

SWITCH_SECS: Final = 0.0005
GC_OBJECTS: Final = 20_000


def build_services(
    config: ServerConfig, database: Database, ids: IdSource, instance_id: str, clock: Clock | None = None
) -> Services:
    """Every part of the server. StorageError if the base directory cannot be used."""
    clock = clock or SystemClock()
    bus = Bus()
    sessions = Sessions()
    graph_settings = _graph_settings(config, sessions)
    defaults = JobDefaults(
        timeout_secs=config.build_default_timeout_secs,
        max_silent_secs=config.build_default_max_silent_secs,
    )
    store = DatabaseClaimStore(
        database,
        clock=clock,
        ids=ids,
        instance_id=instance_id,
        graph_settings=graph_settings,
        load_job=partial(load_job, defaults=defaults),
        load_builds=partial(load_builds, defaults=defaults),
    )
    histories = HistoryBook()
    # Subscribes itself to the bus: memory is in step before a worker hears of a change.
    scheduler = Scheduler(
        store=store,
        bus=bus,
        clock=clock,
        ids=ids,
        settings=SchedulerSettings(
            download_slots=config.nar_max_concurrent_downloads, upload_slots=config.upload_concurrency
        ),
        policy=policy_by_name(config.scheduler_scoring_policy),
        histories=histories,
    )
    # Subscribed next, for the same reason.
    clusters = ClusterRunner(
        scheduler=scheduler,
        store=DatabaseClusterStore(
            database,
            clock=clock,
            ids=ids,
            instance_id=instance_id,
            graph_settings=graph_settings,
            load_job=partial(load_job, defaults=defaults),
        ),
        bus=bus,
        clock=clock,
        ids=ids,
        settings=ClusterSettings(
            prepare_timeout_secs=config.scheduler_cluster_prepare_timeout_secs,
            reserve_after_secs=config.scheduler_cluster_reserve_after_secs,
            reserve_timeout_secs=config.scheduler_cluster_reserve_timeout_secs,
            backfill=config.scheduler_cluster_backfill,
        ),
    )
    services = Services(
        database=database,
        bus=bus,
        clock=clock,
        ids=ids,
        settings=config,
        graph_settings=graph_settings,
        instance_id=instance_id,
        scheduler=scheduler,
        nar_store=LocalNarStore(config.base_dir),
        logs=LogStore(config.base_dir),
        sessions=sessions,
        draining=trio.Event(),
    )
    services.clusters = clusters
    services.history = HistoryLoader(
        database,
        histories,
        clock=clock,
        retention_days=config.retention_days,
        swap_in=scheduler.set_history,
    )
    services.windows = WindowsPass(
        database,
        clock=clock,
        interval_secs=config.metrics_instance_interval_secs,
        publish=partial(_publish_windows, services),
    )
    services.authority = Authority(services)
    services.graces = Graces(config.proto_reconnect_grace_secs, partial(lose_worker, services))
    services.downloads = Downloads(services)
    services.uploads = Uploads(services)
    services.retention = Retention(services)
    services.succession = Succession(services)
    services.sweeps = Sweeps(services)
    bus.subscribe(announcer(services))
    return services


def make_ids() -> IdSource:
    """Ids for one process. They are names and no secrets: a generator that the system seeded once
    spares two system calls for each.
    """
    bits = random.Random(secrets.randbits(256)).getrandbits  # noqa: S311 - no secret
    return IdSource(SystemClock(tells=False).now, bits)


def _publish_windows(services: Services, snapshot: WindowsSnapshot) -> None:
    services.scheduler.set_windows(snapshot.context())
    services.history.set_durations(snapshot.evaluations)


def tune_interpreter() -> None:
    """For the whole process: how long a thread keeps the interpreter from another that waits for it.

    The event loop and the database's writer both let go of it at every system call and statement,
    dozens of times for a job; at Python's 5 ms each return could cost that long. And how many objects
    are made before it looks for cycles: a full queue is hundreds of thousands that live long.
    """
    sys.setswitchinterval(SWITCH_SECS)
    gc.set_threshold(GC_OBJECTS, 20, 20)


def _graph_settings(config: ServerConfig, sessions: Sessions) -> GraphSettings:
    return GraphSettings(
        largest_worker_ram_mb=sessions.largest_build_ram_mb,
        max_attempts=config.build_max_attempts,
        retry_backoff_secs=config.build_retry_backoff_secs,
        inputs_unavailable_max_loops=config.build_inputs_unavailable_max_loops,
        substitute_miss_escalation_threshold=config.build_substitute_miss_escalation_threshold,
    )
