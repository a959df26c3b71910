"""Clusters over several server processes on one PostgreSQL, watched from outside.

    python -m bench.instances [--servers 2,4] [--clusters 200] [--workers 40] [--work-secs 0.05]

Servers are real processes; the workers (protocol level) are in this one, and so is the watcher, who looks
at the database every 50 ms in a connection of its own. Clusters have 2 to 6 members and are submitted by
turns through every server. `secs` is from the first submission to the last verdict. `problems` counts
what must not be: two open attempts of a cluster, a member that ran alone, a started attempt without all
its rows, a start before its attempt's, attempts that overlap in time. The exit status is 1 if there is one.
"""

import argparse
import json
import sys
import time
from statistics import quantiles
from typing import Any

import trio

from tests.acceptance.cluster_load import all_completed, crew_of, submit, until
from tests.acceptance.crew import Crew
from tests.acceptance.instances import Servers, Watcher
from tests.fixtures.postgres import PostgresServer


async def case(url: str, *, servers: int, clusters: int, workers: int, work_secs: float) -> dict[str, Any]:
    """One run."""
    with Servers(url, servers) as running, Watcher(url) as watcher:
        async with crew_of(running, work_secs=work_secs, workers=workers) as crew:
            crew.go.set()
            began = time.monotonic()
            await submit(crew, clusters)
            await until(all_completed(watcher, clusters), crew, watcher, secs=600)
            took = time.monotonic() - began
        return {
            "servers": servers,
            "clusters": clusters,
            "workers": workers,
            "secs": round(took, 1),
            "clusters_per_sec": round(clusters / took, 1),
            **figures(watcher),
            "redirected": crew.seen.redirected,
            "problems": problems(crew, watcher),
        }


def figures(watcher: Watcher) -> dict[str, Any]:
    """What the rows say of the attempts."""
    outcomes = watcher.rows("SELECT outcome, count(*) FROM cluster_attempt GROUP BY outcome")
    owners = watcher.rows("SELECT count(DISTINCT instance) FROM cluster_attempt WHERE outcome = 'Succeeded'")
    starts = watcher.rows("SELECT started_at - created_at FROM cluster_attempt WHERE started_at IS NOT NULL")
    cuts = quantiles([row[0] * 1000 for row in starts], n=100)
    return {
        "attempts": {str(outcome): count for outcome, count in outcomes},
        "owners": owners[0][0],
        "claim_to_start_ms_p50": round(cuts[49], 1),
        "claim_to_start_ms_p99": round(cuts[98], 1),
        "looks": watcher.looks,
        "most_open": watcher.most_open,
    }


def problems(crew: Crew, watcher: Watcher) -> int:
    """What must not be; told on standard error."""
    found = [*watcher.problems, *crew.seen.alone, *crew.seen.early, *watcher.faults(crew.seen.heard)]
    for problem in found:
        sys.stderr.write(f"{problem}\n")
    return len(found)


def main() -> None:
    """One line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--servers", default="2,4")
    parser.add_argument("--clusters", type=int, default=200)
    parser.add_argument("--workers", type=int, default=40)
    parser.add_argument("--work-secs", type=float, default=0.05)
    options = parser.parse_args()
    wrong = 0
    postgres = PostgresServer()
    try:
        for servers in map(int, options.servers.split(",")):
            name = postgres.create()

            async def run(url: str = postgres.url(name), servers: int = servers) -> dict[str, Any]:
                return await case(
                    url,
                    servers=servers,
                    clusters=options.clusters,
                    workers=options.workers,
                    work_secs=options.work_secs,
                )

            answer = trio.run(run)
            wrong += answer["problems"]
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
            postgres.drop(name)
    finally:
        postgres.stop()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
