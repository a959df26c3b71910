"""Puts the worker together and runs it: the one place where everything is wired up."""

import contextlib
import os
import random
import shutil
import sysconfig
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog
import trio
from gradient_protocol.address import (
    Address,
    ClientTls,
    CredentialsError,
    TlsAddress,
    client_context,
    parse_address,
)
from gradient_protocol.ids import IdSource
from gradient_protocol.messages.shapes import BuildJob
from gradient_protocol.messages.worker import WorkerCapabilities
from gradient_protocol.nar import remove_tree
from gradient_protocol.notify import Notifier

from gradient_worker import cluster_client, service
from gradient_worker.agent import Agent, WorkerFacts
from gradient_worker.config import WorkerConfig
from gradient_worker.connector import Dial, dialler, stay_connected
from gradient_worker.executor.build import downloads_directory
from gradient_worker.executor.host_watch import HostWatch
from gradient_worker.executor.inputs import InputFetcher
from gradient_worker.executor.job import Job
from gradient_worker.executor.metrics import BuildMeters, Speeds
from gradient_worker.executor.workshop import Workshop
from gradient_worker.identity import IdentityError, Peers, load_or_make_worker_id, read_peers
from gradient_worker.journal_keeper import JournalKeeper
from gradient_worker.keeper import RunnerKeeper
from gradient_worker.logs import LogLimits
from gradient_worker.meters import cpu_benchmark, host
from gradient_worker.queries import Queries
from gradient_worker.reconnect import Reconnect
from gradient_worker.recovery import recover
from gradient_worker.runner.journal import Journal
from gradient_worker.runner.options import RunnerOptions
from gradient_worker.runner.values import RunnerGone, RunnerRefused
from gradient_worker.server_clock import ServerClock
from gradient_worker.shutdown import wait_for_leave
from gradient_worker.stores.base import StoreError
from gradient_worker.stores.directory import DirectoryStore
from gradient_worker.threads import ThreadPool
from gradient_worker.transfer import Transfers
from gradient_worker.upkeep import collect_garbage, expire_holds, watch_peers
from gradient_worker.wire import Link

__all__ = ["StartError", "client_tls", "run_worker", "runner_options"]

MIN_THREADS: Final = 8
UNWATCHED: Final = Notifier(None)

logger = structlog.get_logger(__name__)


class StartError(Exception):
    """One line that says what keeps the worker from starting, and what to do."""


def runner_options(config: WorkerConfig) -> RunnerOptions:
    """What the runner of this worker is told."""
    return RunnerOptions(
        base_dir=config.base_dir, orphan_kill_secs=config.orphan_kill_secs, cgroup=config.build_cgroup
    )


def client_tls(config: WorkerConfig) -> ClientTls:
    """How this worker knows its server."""
    fingerprint = config.server_fingerprint
    return ClientTls(
        ca_file=config.server_ca_file,
        fingerprint=None if fingerprint is None else bytes.fromhex(fingerprint),
    )


async def run_worker(
    config: WorkerConfig,
    *,
    dial: Dial | None = None,
    leave: Callable[[Agent], Awaitable[None]] | None = None,
    notifier: Notifier = UNWATCHED,
    task_status: trio.TaskStatus[Agent] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the agent until `leave` returns; by default, until a signal tells it to go.

    `notifier` tells the service manager: it is ready once the runner is reached and what an earlier agent
    left is taken over, whether or not the server answers. Raises StartError, perhaps in a group, for what
    keeps it from starting.
    """
    with contextlib.ExitStack() as stack:
        ground = _prepare(config, stack)
        async with trio.open_nursery() as nursery:
            agent = await _make_agent(config, ground, nursery)
            await recover(agent)
            for loop in _loops(config, agent, ground.address, dial or dialler(client_tls(config))):
                nursery.start_soon(loop)
            await service.tell_ready(notifier, agent, ground.address, nursery)
            task_status.started(agent)
            if leave is None:
                await wait_for_leave(agent, config.drain_timeout_secs)
            else:
                await leave(agent)
            service.announce_stop(notifier)
            nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True)
class _Ground:
    """What has to be there before anything runs."""

    ids: IdSource
    address: Address
    worker_id: str
    peers: Peers
    tools: Path
    store: DirectoryStore
    journal: JournalKeeper


def _prepare(config: WorkerConfig, stack: contextlib.ExitStack) -> _Ground:
    """Open everything on disk; the store's lock keeps a second agent out."""
    ids = IdSource()
    try:
        address = parse_address(config.server_url)
        if isinstance(address, TlsAddress):
            client_context(client_tls(config))  # a CA file of no use is told now, not at each connection
        worker_id = load_or_make_worker_id(config.base_dir, ids.new)
        peers = read_peers(config.peers_file)
        store = DirectoryStore.open(config.base_dir)
        stack.callback(store.close)
        journal = Journal.open(config.base_dir / "journal")
        stack.callback(journal.close)
        tools = _tools_directory(config.base_dir)
    except CredentialsError as error:
        raise StartError(f"{error}; correct worker.serverCaFile") from None
    except OSError as error:
        raise StartError(f"cannot use {error.filename}: {os.strerror(error.errno or 0)}") from None
    except (ValueError, IdentityError, StoreError) as error:
        raise StartError(str(error)) from None
    if not peers.tokens:
        remedy = f"gradient worker register {config.name} --worker-id {worker_id}"
        logger.warning("no token yet", peers_file=str(config.peers_file), remedy=remedy)
    return _Ground(ids, address, worker_id, peers, tools, store, JournalKeeper(journal))


async def _make_agent(config: WorkerConfig, ground: _Ground, nursery: trio.Nursery) -> Agent:
    keeper = RunnerKeeper(runner_options(config))
    await _start_runner(nursery, keeper)
    shop = await _make_shop(config, ground, keeper)
    facts = _facts(config, shop, worker_id=ground.worker_id, incarnation=ground.ids.new())
    agent = Agent(facts=facts, shop=shop, nursery=nursery, clean=_cleaner(shop))
    agent.peers = ground.peers
    return agent


def _loops(
    config: WorkerConfig, agent: Agent, address: Address, dial: Dial
) -> list[Callable[[], Awaitable[None]]]:
    shop = agent.shop
    reconnect = Reconnect(address, random.SystemRandom().random)
    return [
        shop.meters.run,
        partial(expire_holds, agent),
        partial(watch_peers, agent, config.peers_file),
        partial(collect_garbage, shop.store, shop.threads, config.store_max_bytes),
        partial(stay_connected, agent, reconnect, dial),
    ]


async def _start_runner(nursery: trio.Nursery, keeper: RunnerKeeper) -> None:
    try:
        await nursery.start(keeper.run)
    except RunnerGone as error:
        raise StartError(str(error)) from None


async def _make_shop(config: WorkerConfig, ground: _Ground, keeper: RunnerKeeper) -> Workshop:
    link = Link()
    cpu_count = host.cpu_count()
    threads = ThreadPool(max(MIN_THREADS, 2 * cpu_count))
    speeds = Speeds()
    meters = BuildMeters(threads, speeds)
    info = await (await keeper.client()).info()
    meters.measured = bool(info.cgroups)
    if not info.cgroups:
        logger.warning("builds are not measured", reason=info.cgroup_reason, remedy="gradient-worker doctor")
    transfers = Transfers(link=link, store=ground.store, threads=threads, ids=ground.ids)
    return Workshop(
        base_dir=config.base_dir,
        tools=ground.tools,
        cpu_count=cpu_count,
        max_concurrent_builds=config.build_max_concurrent,
        cpu_core_score=await _core_score(config, threads),
        log_limits=LogLimits(config.log_burst_bytes_per_min, config.log_sustained_bytes_per_hour),
        clock=ServerClock(time.time, time.monotonic),
        threads=threads,
        link=link,
        store=ground.store,
        runner=keeper,
        journal=ground.journal,
        transfers=transfers,
        inputs=InputFetcher(ground.store, transfers, speeds.download.add),
        queries=Queries(link=link, ids=ground.ids),
        meters=meters,
        speeds=speeds,
        host=HostWatch(),
    )


async def _core_score(config: WorkerConfig, threads: ThreadPool) -> float:
    if config.system_cpu_core_score is not None:
        return config.system_cpu_core_score
    result = await threads.run(cpu_benchmark.run)
    logger.info("benchmark", cpu_core_score=round(result.cpu_core_score))
    return result.cpu_core_score


def _facts(config: WorkerConfig, shop: Workshop, *, worker_id: str, incarnation: str) -> WorkerFacts:
    architectures, features = config.system_architectures, config.system_features
    return WorkerFacts(
        worker_id=worker_id,
        name=config.name,
        incarnation=incarnation,
        capabilities=WorkerCapabilities(
            architectures=list(host.architectures() if architectures is None else architectures),
            system_features=list(host.system_features() if features is None else features),
            max_concurrent_builds=config.build_max_concurrent,
            max_concurrent_evaluations=config.eval_max_concurrent,
            cpu_count=shop.cpu_count,
            ram_total_mb=host.ram_total_mb(config.system_ram_total_mb),
            cpu_core_score=shop.cpu_core_score,
            build_memory=shop.meters.measured,
            zone=config.zone,
            endpoint=config.endpoint,
        ),
    )


def _tools_directory(base_dir: Path) -> Path:
    """What members of clusters talk through alone: what else is installed beside it is no build's to find."""
    tools = base_dir / "bin"
    tools.mkdir(mode=0o755, parents=True, exist_ok=True)
    program = shutil.which("gradient-cluster", path=sysconfig.get_path("scripts"))
    if program is not None:
        _link(tools / "gradient-cluster", Path(program))
    _link(tools / "gradient_cluster.py", Path(cluster_client.__file__))
    return tools


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and link.readlink() == target:
        return
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(link)


def _cleaner(shop: Workshop) -> Callable[[Job], Awaitable[None]]:
    """Removes what a finished job left at the runner and on disk."""

    async def clean(job: Job) -> None:
        build = job.assign.job
        try:
            if not isinstance(build, BuildJob):
                return
            if build.command:
                await (await shop.runner.client()).forget(job.assignment_id)
            else:
                directory = downloads_directory(shop.base_dir, job.assignment_id)
                await shop.threads.run(lambda: remove_tree(directory))
        except (RunnerGone, RunnerRefused, OSError) as error:
            logger.warning("a build's files stay", assignment_id=job.assignment_id, error=str(error))

    return clean
