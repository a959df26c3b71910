"""Whole lives of builds with a real process each: one server, two workers, N builds of `true`.

    python -m bench.processes [--builds 2000] [--slots 8] [--workers 2]

One JSON line: builds a second from the first build known to the last end, and the time from submission to
the final state. Everything is durable and on this machine. A build with no outputs to upload would not be a
whole life, so each makes one small file.
"""

import argparse
import json
import os
import time

from tests.acceptance.pool import Pool, write_tree


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


def main() -> None:
    """Runs the case and prints its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--builds", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with Pool() as pool:
        pool.start_server()
        for number in range(options.workers):
            pool.start_worker(f"w{number}", "--build-max-concurrent", str(options.slots))
        tree = write_tree(pool.directory / "tree", top=recipe(options.builds))
        began = time.monotonic()
        view = pool.ended(pool.submit(tree), secs=600.0)
        took = time.monotonic() - began
    builds = view["builds"]
    # The graph streams in, so the first build begins about when it is known.
    first = min(build["created_at"] for build in builds)
    last = max(build["finished_at"] for build in builds)
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
                "load_average": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
