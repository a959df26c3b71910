"""Whole lives of builds with a real process each: one server, two workers, N builds of `: > $out`.

    python -m bench.processes [--builds 2000] [--slots 8] [--workers 2] [--hold SECS]

One JSON line: builds a second from the first build known to the last end, the time from submission to
the final state, and the processor time a build in ms, by the kind of process: the server, the agents,
the runners, and the builds themselves with what their start costs in the child. Everything is durable
and on this machine. A build with no outputs to upload would not be a whole life, so each makes one
small file. `--hold` prints the processes' ids and waits before it submits, for a profiler to attach.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

import psutil

from tests.acceptance.pool import FINAL, Pool
from tests.acceptance.processes import wait_until
from tests.acceptance.trees import write_tree


def recipe(builds: int) -> str:
    """So many builds that need nothing and do nothing but make their output."""
    one = '[[build]]\nname = "true-{}-1.0"\ncommand = ["/bin/sh", "-c", ": > $out"]\n'
    return "\n".join(one.format(letters(number)) for number in range(builds))


def letters(number: int) -> str:
    """A name of letters alone, for a digit would begin the version."""
    digits = []
    for _ in range(4):
        number, rest = divmod(number, 26)
        digits.append(chr(ord("a") + rest))
    return "".join(reversed(digits))


def processes(pool: Pool) -> dict[str, list[psutil.Process]]:
    """What runs, by kind."""
    assert pool.server is not None
    runners = [worker.runner() for worker in pool.workers.values()]
    return {
        "server": [psutil.Process(pool.server.pid)],
        "agents": [psutil.Process(worker.process.pid) for worker in pool.workers.values()],
        "runners": [runner for runner in runners if runner is not None],
    }


def cpu_secs(running: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Processor seconds so far, by kind; those of the builds are what the runners have waited for."""
    times = {kind: [process.cpu_times() for process in some] for kind, some in running.items()}
    spent = {kind: sum(one.user + one.system for one in some) for kind, some in times.items()}
    spent["builds"] = sum(one.children_user + one.children_system for one in times["runners"])
    return spent


def ended(pool: Pool, evaluation: str) -> dict[str, Any]:
    """The evaluation once it has ended: asked for seldom, and without its builds until then."""

    def final() -> bool:
        entries = pool.get("/evaluations?limit=1")["evaluations"]
        time.sleep(0.3)
        return any(entry["id"] == evaluation and entry["status"] in FINAL for entry in entries)

    wait_until(f"the end of {evaluation}", final, secs=600.0)
    return pool.evaluation(evaluation)


def main() -> None:
    """Runs the case and prints its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--builds", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hold", type=float, default=0.0)
    options = parser.parse_args()
    with Pool() as pool:
        pool.start_server()
        for number in range(options.workers):
            pool.start_worker(f"w{number}", "--build-max-concurrent", str(options.slots))
        tree = write_tree(pool.directory / "tree", top=recipe(options.builds))
        running = processes(pool)
        if options.hold:
            pids = {kind: [process.pid for process in some] for kind, some in running.items()}
            print(json.dumps(pids), file=sys.stderr, flush=True)
            time.sleep(options.hold)
        before = cpu_secs(running)
        began = time.monotonic()
        view = ended(pool, pool.submit(tree))
        took = time.monotonic() - began
        spent = {kind: secs - before[kind] for kind, secs in cpu_secs(running).items()}
    builds = view["builds"]
    # The graph streams in, so the first build begins about when it is known.
    first = min(build["created_at"] for build in builds)
    last = max(build["finished_at"] for build in builds)
    each = {kind: round(1000 * secs / len(builds), 2) for kind, secs in spent.items()}
    print(
        json.dumps(
            {
                "case": "processes",
                "builds": len(builds),
                "completed": sum(build["status"] == "Completed" for build in builds),
                "workers": options.workers,
                "slots": options.slots,
                "builds_per_sec": round(len(builds) / (last - first), 1),
                "submit_to_end_secs": round(took, 2),
                "cpu_ms_per_build": {"all": round(sum(each.values()), 2), **each},
                "load_average": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
