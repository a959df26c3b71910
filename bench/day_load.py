"""The load of a simulated day: what is asked for, when, how long it takes and how much memory it needs.

Everything follows from a seed. A day has a rush in its middle, and two jobs in five come in bursts, as
the builds of a finished evaluation do. Builds share a few hundred names, so that history tells something
of most of them, and nothing of the first of each name.
"""

import enum
import math
import random
from dataclasses import dataclass
from typing import Final

__all__ = ["DAY_SECS", "Host", "JobClass", "SimJob", "day_of_jobs", "hosts"]

DAY_SECS: Final = 86_400.0
_NAMES: Final = 240
_HEAVY_NAMES: Final = 24
_BURST_SHARE: Final = 0.4
_BURST_JOBS: Final = 40


class JobClass(enum.StrEnum):
    """What the waits are told apart by."""

    PRIORITISED = "prioritised"
    BUILD_REQUEST = "build request"
    ORDINARY = "ordinary"
    HEAVY = "heavy memory"
    EVALUATION = "evaluation"


_SHARES: Final = {
    JobClass.PRIORITISED: 0.03,
    JobClass.BUILD_REQUEST: 0.12,
    JobClass.ORDINARY: 0.69,
    JobClass.HEAVY: 0.05,
    JobClass.EVALUATION: 0.11,
}


@dataclass(frozen=True, slots=True)
class SimJob:
    """One job. Its time is that on a core of 3000 points with nothing beside it."""

    number: int
    kind: JobClass
    name: str
    arrives_secs: float
    run_secs: float
    peak_mb: int
    missing_bytes: int
    output_bytes: int

    @property
    def is_new_name(self) -> bool:
        """Whether nothing of this name was ever built before the day."""
        return self.name.endswith("0")


@dataclass(frozen=True, slots=True)
class Host:
    """A worker's host."""

    name: str
    ram_mb: int
    builds: int
    evaluations: int
    core_score: float


def hosts(count: int) -> list[Host]:
    """Hosts of 16 and 32 GiB in turn, their cores of different speed."""
    return [
        Host(f"w{place}", 16_384 * (1 + place % 2), 4, 1, 2600.0 + 200.0 * (place % 5))
        for place in range(count)
    ]


def _arrivals(count: int, day_secs: float, dice: random.Random) -> list[float]:
    """Moments of a day whose middle is busier than its ends, some of them shared by many."""

    def moment() -> float:
        while True:
            at = dice.random()
            if dice.random() < (1.0 - 0.6 * math.cos(2.0 * math.pi * at)) / 1.6:
                return at * day_secs

    bursts = [moment() for _ in range(max(1, round(count * _BURST_SHARE / _BURST_JOBS)))]
    return [dice.choice(bursts) if dice.random() < _BURST_SHARE else moment() for _ in range(count)]


def day_of_jobs(count: int, *, seed: int, day_secs: float = DAY_SECS) -> list[SimJob]:
    """So many jobs over so many seconds, in the order of their arrival."""
    dice = random.Random(seed)
    usual = [
        (min(dice.lognormvariate(4.4, 0.9), 3600.0), dice.lognormvariate(6.0, 0.7)) for _ in range(_NAMES)
    ]
    heavy = [(dice.uniform(120.0, 900.0), dice.uniform(6_000.0, 20_000.0)) for _ in range(_HEAVY_NAMES)]
    kinds = dice.choices(list(_SHARES), weights=list(_SHARES.values()), k=count)
    jobs: list[SimJob] = []
    for number, (at, kind) in enumerate(zip(sorted(_arrivals(count, day_secs, dice)), kinds, strict=True)):
        if kind is JobClass.EVALUATION:
            name, secs, peak_mb = "main", dice.uniform(10.0, 90.0), 300.0
        elif kind is JobClass.HEAVY:
            place = dice.randrange(_HEAVY_NAMES)
            name, (secs, peak_mb) = f"heavy-{place}", heavy[place]
        else:
            place = dice.randrange(_NAMES)
            name, (secs, peak_mb) = f"name-{place}", usual[place]
        jobs.append(
            SimJob(
                number=number,
                kind=kind,
                name=name,
                arrives_secs=at,
                run_secs=secs * dice.lognormvariate(0.0, 0.15),
                peak_mb=round(peak_mb * dice.uniform(0.93, 1.0)),
                missing_bytes=dice.randrange(1 << 28),
                output_bytes=dice.randrange(1 << 26),
            )
        )
    return jobs
