"""Which candidate is assigned: the best that passes. Pure.

Candidates are ordered by total, the smaller job id first among equals; the first that is unvetoed
and not below the floor is assigned, and a vetoed higher one stays pending (scoring.md, "Assignment
Floor and Vetoes").
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradient_server.scoring.columns import Flags, Vector

__all__ = ["best", "in_order"]


def in_order(total: Vector, job_ids: Sequence[str], places: npt.NDArray[np.intp], limit: int) -> list[int]:
    """At most `limit` of `places`, the best first; `job_ids` is indexed by place."""
    if not len(places):
        return []
    totals = total[places]
    if len(places) > limit:
        threshold = np.partition(totals, len(places) - limit)[len(places) - limit]
        kept = totals >= threshold
        places, totals = places[kept], totals[kept]
    ranked = sorted(
        zip((-totals).tolist(), places.tolist(), strict=True), key=lambda one: (one[0], job_ids[one[1]])
    )
    return [place for _, place in ranked[:limit]]


def best(total: Vector, wins: Flags, job_ids: Sequence[str]) -> int | None:
    """The place of the candidate to assign; None where none passes."""
    passing = np.flatnonzero(wins)
    if not len(passing):
        return None
    totals = total[passing]
    first = passing[totals == totals.max()]
    if len(first) == 1:
        return int(first[0])
    tied: list[int] = first.tolist()
    return min(tied, key=lambda place: job_ids[place])
