"""Restarts under load: how long nothing starts, and whether a build is lost or started twice.

    python -m bench.restart [--builds 400] [--workers 3] [--slots 4] [--secs 0.2] [--cases ...]

Real processes. Each case submits so many builds, each of which notes its start and takes `--secs`; when a
third of them have started, a process is sent its signal, and is started again as soon as it has ended.
Cases: `none`, `server-SIGTERM`, `server-SIGKILL`, `agent-SIGTERM`, `agent-SIGKILL`.

One JSON line a case. `back_secs`: from the signal until the new process listens (server) or is connected
(agent). `without_starts_secs`: the longest time around the restart in which no build started, on any worker
where the server was restarted, on its own worker where an agent was; `usual_secs` is the longest such time
before the signal. `after_back_secs`: from `back` to the first start on the last worker to get one. `lost`
are builds that did not complete, `doubled` the starts beyond the first of each build.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.processes import letters
from tests.acceptance.pool import Pool, wait_until, write_tree

CASES = ("none", "server-SIGTERM", "server-SIGKILL", "agent-SIGTERM", "agent-SIGKILL")
LIMIT_SECS = 300.0
AROUND_SECS = 60.0


@dataclass(frozen=True, slots=True)
class Start:
    """A build began: wall seconds, and the worker that its output lies at."""

    at: float
    build: str
    worker: str


@dataclass(frozen=True, slots=True)
class Load:
    """So many builds, which note their starts below `directory`."""

    directory: Path
    builds: int
    secs: float

    def recipe(self, case: str) -> str:
        """The source tree's `gradient.toml`."""
        script = f'echo "$(date +%s.%N) $out" >> {self.directory}/$name; sleep {self.secs}; : > $out'
        entry = '[[build]]\nname = "{name}-1.0"\ncommand = ["/bin/sh", "-ec", {script}]\n'
        names = (f"{case.lower()}-{letters(number)}" for number in range(self.builds))
        return "\n".join(
            entry.format(name=name, script=json.dumps(script.replace("$name", name))) for name in names
        )

    def started(self) -> int:
        """How many builds have started."""
        return sum(1 for _ in self.directory.iterdir())

    def starts(self) -> list[Start]:
        """Every start, in order of time."""
        return sorted(self._starts(), key=lambda start: start.at)

    def _starts(self) -> Iterator[Start]:
        for file in self.directory.iterdir():
            for line in file.read_text().splitlines():
                at, _, output = line.partition(" ")
                yield Start(float(at), file.name, Path(output).relative_to(self.directory.parent).parts[0])


def restart(pool: Pool, case: str) -> tuple[float, str | None]:
    """Ends and starts what the case names: when it was back, and whose worker it was (None: all)."""
    what, _, name = case.partition("-")
    if what == "none":
        return time.time(), None
    number = signal.Signals[name]
    if what == "server":
        assert pool.server is not None
        pool.server.end(number)
        pool.restart_server()
        return time.time(), None
    worker = next(iter(pool.workers))
    pool.workers[worker].process.end(number)
    pool.restart_worker(worker)
    pool.wait_connected(worker)
    return time.time(), worker


def gaps(starts: Sequence[Start], begin: float, end: float) -> list[float]:
    """Between one start and the next, of those that reach into the given time."""
    return [
        later.at - earlier.at for earlier, later in pairwise(starts) if later.at > begin and earlier.at < end
    ]


def run(pool: Pool, case: str, load: Load) -> dict[str, Any]:
    """One case; its figures."""
    load.directory.mkdir()
    tree = write_tree(load.directory.with_name(f"tree-{case}"), top=load.recipe(case))
    evaluation = pool.submit(tree)
    wait_until("a third of the starts", lambda: load.started() >= load.builds // 3, secs=LIMIT_SECS)
    sent = time.time()
    back, whose = restart(pool, case)
    view = pool.ended(evaluation, secs=LIMIT_SECS)
    starts = load.starts()
    seen = [start for start in starts if whose in (None, start.worker)]
    begin = starts[0].at
    around = gaps(seen, sent, min(back + AROUND_SECS, starts[-1].at))
    after: dict[str, float] = {}
    for start in seen:
        if start.at >= back:
            after.setdefault(start.worker, start.at - back)
    return {
        "case": case,
        "builds": len(view["builds"]),
        "starts_per_sec": round(len(starts) / (starts[-1].at - begin), 1),
        "usual_secs": round(max(gaps([s for s in seen if s.at < sent], begin, sent), default=0.0), 2),
        "back_secs": round(back - sent, 2),
        "without_starts_secs": round(max(around, default=0.0), 2),
        "after_back_secs": round(max(after.values(), default=float("nan")), 2),
        "evaluation": view["status"],
        "lost": load.builds - sum(build["status"] == "Completed" for build in view["builds"]),
        "doubled": len(starts) - len({start.build for start in starts}),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Runs the cases; the exit status is 1 where a build was lost or started twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--builds", type=int, default=400)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--secs", type=float, default=0.2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    options = parser.parse_args()
    wrong = 0
    with Pool() as pool:
        pool.start_server("--scheduler-scoring-policy", "simple")
        for number in range(options.workers):
            pool.start_worker(f"w{number}", "--build-max-concurrent", str(options.slots))
        for case in options.cases:
            figures = run(pool, case, Load(pool.directory / f"starts-{case}", options.builds, options.secs))
            wrong += figures["lost"] + figures["doubled"]
            sys.stdout.write(json.dumps(figures) + "\n")
            sys.stdout.flush()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
