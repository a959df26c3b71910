"""Nanoseconds a candidate of a full policy score, and milliseconds of a whole decision.

`python -m bench.scoring [--rounds N]`. Cases: `policy`, `score` and `score_detailed` of each policy over 100
to 100,000 candidates, the scalar oracle of the tests beside them; `decision` from RequestJob to the chosen
job with 100 to 10,000 pending, none offered before (`unscored`) or a full window (`window`).
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from gradient_protocol.kinds import JobKind
from gradient_protocol.messages.worker import CandidateScore
from gradient_server.domain.job import PendingJob
from gradient_server.scheduler.dispatch import Dispatcher
from gradient_server.scoring.columns import JobColumns
from gradient_server.scoring.contexts import HistoryPrediction, InstanceContext, WorkerContext
from gradient_server.scoring.policy import policy_by_name

from tests.fakes.scheduler import START, World, build, worker
from tests.properties.scoring.bridge import columns_of, instance_of, worker_of
from tests.properties.scoring.oracle import Instance, Job, Worker, score

SIZES = (100, 1_000, 10_000, 100_000)
PENDING = (100, 1_000, 10_000)
# Calls are fewer where one takes longer.
CANDIDATES_A_ROUND = 200_000
NOW = 100_000.0


def candidates(count: int, dice: random.Random) -> list[Job]:
    """Builds of which some were measured before, as a busy pool has them."""
    return [
        Job(
            ready_at=NOW - dice.random() * 600,
            now=NOW,
            prioritized=dice.random() < 0.05,
            build_request=dice.random() < 0.5,
            missing_count=dice.randrange(50),
            missing_bytes=dice.randrange(1 << 28),
            outputs_present=dice.random() < 0.05,
            peak_mb=dice.uniform(50, 6000) if dice.random() < 0.7 else None,
            output_size=dice.uniform(1e4, 1e8) if dice.random() < 0.7 else None,
            oom_rate=0.0,
            uncontended_ms=dice.uniform(100, 600_000) if dice.random() < 0.7 else None,
            core_score=2900.0,
        )
        for _ in range(count)
    ]


HOST = Worker(
    core_score=3000.0,
    total_mb=16_000,
    free_mb=9_000,
    cpu_pct=60.0,
    up_mbps=500.0,
    down_mbps=800.0,
    running=3,
    assigned=4,
    reserved_mb=5000.0,
)
POOL = Instance(wait_secs=40.0, nar_mb=20.0, paths=10.0, total_workers=20, idle_workers=3, core_mean=3000.0)


def as_after_a_long_queue() -> None:
    """Leaves the allocator as it is where tables of many jobs grew.

    glibc gives each freed array back to the kernel until a larger block than that was freed, and a page that
    is asked for anew costs more than all that is computed on it. A server with a queue of this length is
    past that; `decision` needs no such help.
    """
    np.empty(24 << 20, np.uint8)


def best_ns(work: Callable[[], object], repeat: int, rounds: int) -> float:
    """The best of the rounds, in nanoseconds of processor time a call: other load counts less."""
    times = []
    for _ in range(rounds):
        started = time.process_time_ns()
        for _ in range(repeat):
            work()
        times.append((time.process_time_ns() - started) / repeat)
    return min(times)


def report(**values: object) -> None:
    """One line a case."""
    print(json.dumps(values), flush=True)


def score_once(
    call: Callable[..., object], columns: JobColumns, context: WorkerContext, instance: InstanceContext
) -> None:
    """As a decision does it: the columns are new, and nothing in them is worked out yet."""
    fresh = JobColumns(
        columns.matrix,
        now=columns.now,
        missing_count=columns.missing_count,
        missing_nar_size=columns.missing_nar_size,
        outputs_present=columns.outputs_present,
    )
    call(fresh, context, instance)


def bench_policies(rounds: int) -> None:
    """The policies alone, and the oracle."""
    dice = random.Random(1)
    as_after_a_long_queue()
    for size in SIZES:
        jobs = candidates(size, dice)
        columns = columns_of(jobs)
        took = best_ns(lambda jobs=jobs: [score(job, HOST, POOL) for job in jobs], 1, 3)
        oracle_ns = round(took / size, 1)
        for name in ("simple", "resource-aware"):
            policy = policy_by_name(name)
            ns = {}
            for case, call in (("score_ns", policy.score), ("score_detailed_ns", policy.score_detailed)):
                once = partial(score_once, call, columns, worker_of(HOST), instance_of(POOL))
                took = best_ns(once, max(CANDIDATES_A_ROUND // size, 5), rounds)
                ns[case] = round(took / size, 1)
            report(case="policy", policy=name, candidates=size, **ns, oracle_ns=oracle_ns)


def pending(count: int, dice: random.Random) -> list[PendingJob]:
    """Builds that wait."""
    return [
        build(f"{number:05}", ready_at=START - dice.random() * 600, output_size=dice.randrange(1 << 24))
        for number in range(count)
    ]


def bench_decisions() -> None:
    """From RequestJob to the decision, over and over, the queue getting shorter."""
    for size in PENDING:
        for case in ("unscored", "window"):
            world = World()
            dice = random.Random(2)
            started = time.process_time()
            world.scheduler.load(pending(size, dice))
            loading = time.process_time() - started
            table = world.scheduler.tracker.tables[JobKind.BUILD]
            for tracked in table:
                table.set_history(
                    tracked.job.job_id, HistoryPrediction(uncontended_build_time_ms=5e3, samples=3)
                )
            world.connect(worker("a"))
            state = world.scheduler.pool.workers["a"]
            if case == "unscored":
                for _ in range(4):
                    table.bump_rescore()
            else:
                while state.room_in_window and len(state.windows[JobKind.BUILD]) < size:
                    world.scheduler.dispatcher.offer_next(state, JobKind.BUILD)
                for entry in state.windows[JobKind.BUILD].entries:
                    state.windows[JobKind.BUILD].score(
                        CandidateScore(
                            job_id=entry.job.job_id,
                            missing_count=3,
                            missing_nar_size=dice.randrange(1 << 28),
                            outputs_present=False,
                        )
                    )
            times = decide_often(world, min(size // 2, 200))
            report(
                case="decision",
                jobs=case,
                pending=size,
                p50_ms=round(float(np.percentile(times, 50)), 3),
                p99_ms=round(float(np.percentile(times, 99)), 3),
                load_us_per_job=round(loading / size * 1e6, 1),
            )


def decide_often(world: World, times: int) -> list[float]:
    """Milliseconds of each of so many requests."""
    state = world.scheduler.pool.workers["a"]
    dispatcher: Dispatcher = world.scheduler.dispatcher
    took = []
    for _ in range(times):
        started = time.process_time()
        world.scheduler.request_job("a", JobKind.BUILD)
        took.append((time.process_time() - started) * 1e3)
        if len(state.assigned) != 1:
            raise RuntimeError("a request found no job: this would measure something else")
        world.scheduler.pool.remove(next(iter(state.assigned)))
    if not dispatcher.has_claims:
        raise RuntimeError("no decision was queued for its claim")
    return took


def main() -> None:
    """Runs every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    bench_policies(arguments.rounds)
    bench_decisions()


if __name__ == "__main__":
    main()
