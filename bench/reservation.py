"""Starvation: a cluster of four beside an endless stream of single builds on four workers.

    python -m bench.reservation

The real scheduler with the clock of a simulation (tests/fakes/starvation.py): `control` has no
reservations, `reservation` the defaults, `backfill` `scheduler.clusterBackfill` too. Seconds are simulated;
`started_after_secs` is null where the cluster did not start within `for_secs`. `idle_worker_secs` is what
the reserved seats stood idle for, `builds_meanwhile` the builds that began on them.
"""

import json
import logging
import sys
from dataclasses import asdict
from functools import partial

import structlog
import trio

from tests.fakes.starvation import LONG_SECS, SHORT_SECS, simulate

CASES = {
    "control": {"reserves": False},
    "reservation": {"reserves": True},
    "backfill": {"reserves": True, "backfill": True},
}
FOR_SECS = 6_000.0


def main() -> None:
    """One line a case."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    for name, options in CASES.items():
        outcome = trio.run(partial(simulate, for_secs=FOR_SECS, **options))
        lengths = {"short_secs": SHORT_SECS, "long_secs": LONG_SECS, "for_secs": FOR_SECS}
        sys.stdout.write(json.dumps({"case": name, **lengths, **asdict(outcome)}) + "\n")


if __name__ == "__main__":
    main()
