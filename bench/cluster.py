"""How fast clusters start together, how many a second, and what a pass of the planner costs.

    python -m bench.cluster [--postgres] [--members 2,4,16] [--secs 8] [--profile FILE]

Over TCP: the server (real sessions, scheduler, runner, graph and database, no HTTP) runs in this
process, the workers (protocol level, one process, `cluster_workers.py`) in another. `start_*` is from
the planner's decision to the arrival of the last member's StartCluster, one cluster at a time:
claim, AssignJob, acceptances, start and StartCluster, all durable. `clusters_per_sec` is with as many
clusters waiting as there are workers for, from claim to verdict: the first member of each fails, with
no retry left, the others are aborted and confirm it (a success would measure uploads).

The planner's pass is measured in memory: every cluster is placed on paper and none is taken.
"""

import argparse
import cProfile
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.shapes import Capabilities
from gradient_protocol.messages.worker import WorkerCapabilities
from gradient_server import logging
from gradient_server.cluster.attempts import Attempt
from gradient_server.cluster.book import ClusterBook
from gradient_server.cluster.dispatch import plan_pass
from gradient_server.cluster.floor import Floor
from gradient_server.cluster.instructions import Instruction
from gradient_server.cluster.reservation import ReservationDesk
from gradient_server.db.migrate import migrate
from gradient_server.domain.cluster import ClusterInfo, MemberInfo
from gradient_server.domain.job import PendingJob
from gradient_server.domain.status import ClusterStatus
from gradient_server.net.services import Services
from gradient_server.scheduler.model import WorkerInfo
from gradient_server.wiring import tune_interpreter

from bench.dispatch import prepare, server, submit


def watch_plans(services: Services) -> dict[str, float]:
    """When each attempt was planned; the monotonic clock is the machine's, so processes share it."""
    planned: dict[str, float] = {}
    executor = services.clusters.executor
    begin = executor.begin

    def noted(attempt: Attempt, instructions: list[Instruction]) -> None:
        planned[attempt.id] = time.perf_counter()
        begin(attempt, instructions)

    executor.begin = noted  # type: ignore[method-assign,assignment] - a measurement's own hook
    return planned


async def over_the_wire(
    url: str, base_dir: Path, *, members: int, at_once: int, secs: float, profile: str | None
) -> dict[str, Any]:
    """One case: `at_once` clusters of `members` waiting or running."""
    await trio.to_thread.run_sync(migrate, url)
    async with server(url, base_dir) as (services, address), trio.open_nursery() as nursery:
        await nursery.start(services.clusters.run)
        workers = await services.database.run(partial(prepare, services=services, workers=members * at_once))
        await services.transact(partial(submit, services=services))
        planned = watch_plans(services)
        plan = {
            "address": address,
            "workers": workers,
            "members": members,
            "at_once": at_once,
            "secs": secs,
        }
        cpu_began = time.process_time()
        profiler = cProfile.Profile() if profile else None
        if profiler is not None:
            profiler.enable()
        done = await trio.run_process(
            [sys.executable, "-m", "bench.cluster_workers"],
            stdin=(json.dumps(plan) + "\n").encode(),
            capture_stdout=True,
        )
        if profiler is not None:
            profiler.disable()
            profiler.dump_stats(str(profile))
        result: dict[str, Any] = json.loads(done.stdout)
        cpu_ms = (time.process_time() - cpu_began) * 1000
        started: dict[str, float] = result.pop("started")
        waits = sorted((at - planned[attempt]) * 1000 for attempt, at in started.items())
        nursery.cancel_scope.cancel()
    return {
        "members": members,
        "clusters_at_once": at_once,
        **result,
        "server_cpu_ms_per_cluster": round(cpu_ms / max(1, result["clusters_in_all"]), 2),
        "start_p50_ms": round(waits[len(waits) // 2], 2),
        "start_p99_ms": round(waits[int(len(waits) * 0.99)], 2),
    }


def planner_pass(*, workers: int, clusters: int, members: int, zones: int, idle: float) -> dict[str, Any]:
    """One pass over a full floor; the best of five, and the worst."""
    random = np.random.default_rng(1)
    floor, book = Floor(), ClusterBook()
    for number in range(workers):
        floor.connect(_worker(number, f"zone-{number % zones}"))
    for number in range(clusters):
        _queue(book, floor, number, members, random)
    slots = [(f"w{number}", JobKind.BUILD) for number in range(workers) if random.random() < idle]
    desk = ReservationDesk(after_secs=600.0, timeout_secs=1800.0)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        outcome = plan_pass(book, floor, desk, idle_slots=slots, excluded={}, now=10.0)
        times.append((time.perf_counter() - began) * 1000)
    return {
        "workers": workers,
        "clusters": clusters,
        "members": members,
        "zones": zones,
        "idle_pct": round(idle * 100),
        "placed": len(outcome.attempts),
        "pass_best_ms": round(min(times), 1),
        "pass_worst_ms": round(max(times), 1),
    }


def _worker(number: int, zone: str) -> WorkerInfo:
    capabilities = WorkerCapabilities(
        architectures=["x86_64-linux"],
        system_features=[],
        max_concurrent_builds=1,
        max_concurrent_evaluations=1,
        cpu_count=16,
        ram_total_mb=65_536,
        build_memory=False,
        zone=zone,
    )
    able = Capabilities(fetch=True, eval=True, build=True, zstd=True)
    name = f"w{number}"
    return WorkerInfo(id=name, name=name, projects=None, can=able, capabilities=capabilities)


def _queue(book: ClusterBook, floor: Floor, number: int, members: int, random: np.random.Generator) -> None:
    """A cluster under `same_zone` whose members every worker has scored."""
    keys = [f"build:{number}-{member}" for member in range(members)]
    info = ClusterInfo(
        id=f"c{number}",
        project="p",
        name=f"c{number}",
        same_zone=True,
        prioritized=False,
        created_at=float(number),
        status=ClusterStatus.QUEUED,
        attempts=0,
        retry_budget=1,
        members=tuple(MemberInfo(job_key=key, role="m", index=i) for i, key in enumerate(keys)),
    )
    book.learn(info, 0.0)
    for key in keys:
        job = PendingJob(
            job_id=key,
            kind=JobKind.BUILD,
            name=key,
            projects=("p",),
            system="x86_64-linux",
            features=frozenset(),
            queued_at=0.0,
            ready_at=0.0,
            prioritized=False,
            build_request=False,
            cluster=info.id,
        )
        book.arrive(job, 0.0)
        for worker_id in floor.workers():
            floor.score(worker_id, key, int(random.integers(0, 1 << 30)))


def run_case(options: argparse.Namespace, members: int, at_once: int) -> dict[str, Any]:
    """On a fresh database."""
    case = partial(
        over_the_wire, members=members, at_once=at_once, secs=options.secs, profile=options.profile
    )
    with tempfile.TemporaryDirectory(prefix="gradient-bench-", dir=".") as base:
        if not options.postgres:
            return trio.run(case, f"sqlite:///{Path(base).absolute()}/bench.db", Path(base))
        from tests.fixtures.postgres import PostgresServer  # noqa: PLC0415 - only where it is asked for

        postgres = PostgresServer()
        try:
            return trio.run(case, postgres.url(postgres.create()), Path(base))
        finally:
            postgres.stop()


def main() -> None:
    """Parses, measures, prints one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--postgres", action="store_true", help="PostgreSQL instead of SQLite")
    parser.add_argument("--members", default="2,4,16", help="sizes of clusters")
    parser.add_argument("--at-once", type=int, default=16, help="clusters under way for the throughput")
    parser.add_argument("--secs", type=float, default=8.0)
    parser.add_argument("--profile", help="write the server's profile to this file")
    options = parser.parse_args()
    logging.configure(level="warning")
    tune_interpreter()
    database = "postgresql" if options.postgres else "sqlite"
    for zones, idle in ((1, 1.0), (10, 1.0), (10, 0.2)):
        line = planner_pass(workers=1000, clusters=100, members=8, zones=zones, idle=idle)
        print(json.dumps({"case": "planner-pass", **line}), flush=True)
    for members in map(int, options.members.split(",")):
        line = run_case(options, members, 1)
        print(json.dumps({"case": f"cluster-start-{database}", **line}), flush=True)
    line = run_case(options, 4, options.at_once)
    print(json.dumps({"case": f"cluster-rate-{database}", **line}), flush=True)


if __name__ == "__main__":
    main()
