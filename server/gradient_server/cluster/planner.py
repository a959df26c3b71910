"""Which idle workers seat which clusters (cluster-jobs.md, Placement). Numbers in, columns out.

Workers are columns, members are rows. A cluster's placement is a true matching: one worker a member,
never two members on one worker, the lowest sum of missing bytes. Under `same_zone` each zone is
matched on its own, and the cheapest of those that seat every member wins. Clusters are served in the
order given, and a worker that is seated for one is not offered to the next.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import JobKind

from gradient_server.cluster.matching import match

__all__ = ["Flags", "Placement", "Request", "Vector", "Zones", "place", "seatable"]

Flags = npt.NDArray[np.bool_]
Vector = npt.NDArray[np.float64]
Columns = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Request:
    """A cluster that can start. `able` and `missing_bytes` are (members, workers).

    `able`: eligible, pinned there if pinned, not excluded; whether the worker is idle is not in it.
    """

    cluster_id: str
    same_zone: bool
    kinds: tuple[JobKind, ...]
    able: Flags
    missing_bytes: Vector


@dataclass(frozen=True, slots=True)
class Placement:
    """A seat for every member, as worker columns in the order of the members. `zone` is a zone's code.

    `cost` is the sum of the missing bytes (of the busy seats first, where a reservation is planned).
    """

    zone: int
    columns: tuple[int, ...]
    cost: float


@dataclass(frozen=True, slots=True)
class Zones:
    """The workers' columns sorted by zone: zone `codes[k]` has `order[starts[k]:starts[k + 1]]`."""

    codes: tuple[int, ...]
    order: Columns
    starts: tuple[int, ...]

    @classmethod
    def of(cls, codes: npt.NDArray[np.intp]) -> "Zones":
        """From each column's code; workers without a zone have one code of their own, -1 is nobody."""
        order = np.argsort(codes, kind="stable")
        order = order[codes[order] >= 0]
        found, starts = np.unique(codes[order], return_index=True)
        return cls(tuple(found.tolist()), order, (*starts.tolist(), len(order)))

    @classmethod
    def one(cls, columns: Columns) -> "Zones":
        """All columns together, under the code -1."""
        return cls((-1,), columns, (0, len(columns)))

    def columns(self, place: int) -> Columns:
        """The columns of the zone at `place` in `codes`."""
        return self.order[self.starts[place] : self.starts[place + 1]]


def place(usable: Flags, cost: Vector, zones: Zones, *, same_zone: bool) -> Placement | None:
    """The cheapest full placement of one cluster over the usable seats; None if there is none.

    Of zones that cost the same, the first wins. Without `same_zone` the zone of the answer is -1.
    """
    if not same_zone:
        zones = Zones.one(np.flatnonzero(usable.any(axis=0)))
    if len(zones.order) < len(usable):
        return None
    masked = np.where(usable, cost, np.inf)
    # Each member at its cheapest worker of the zone: no matching can cost less, and many zones are
    # passed over by it; infinite where a member has no worker there.
    cheapest = np.minimum.reduceat(masked[:, zones.order], zones.starts[:-1], axis=1).sum(axis=0)
    best: Placement | None = None
    for place_ in np.argsort(cheapest, kind="stable").tolist():
        bound = float(cheapest[place_])
        if np.isinf(bound) or (best is not None and bound > best.cost):
            break
        columns = zones.columns(place_)
        matched = _match(masked[:, columns])
        if matched is None:
            continue
        chosen, total = matched
        code = zones.codes[place_]
        if best is None or (total, code) < (best.cost, best.zone):
            best = Placement(code, tuple(columns[chosen].tolist()), total)
    return best


def seatable(usable: Flags) -> list[int | None]:
    """For each member the column of a largest partial matching, None for those left standing."""
    found: list[int | None] = [None] * len(usable)
    if usable.size:
        rows, columns = match(usable, maximize=True)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            if usable[row, column]:
                found[row] = column
    return found


def _match(masked: Vector) -> tuple[Columns, float] | None:
    """One column a row at the lowest sum, and the sum; infinite where a seat is not usable."""
    members, workers = masked.shape
    if workers < members:
        return None
    kept = _worth_a_look(masked)
    try:
        _, columns = match(masked[:, kept])
    except ValueError:
        # There is no full matching; every cost itself is finite.
        return None
    chosen = kept[columns]
    return chosen, float(masked[np.arange(members), chosen].sum())


def _worth_a_look(masked: Vector) -> Columns:
    """The columns that can matter: of n rows, each needs its own n cheapest at most."""
    members, workers = masked.shape
    if workers <= 2 * members * members:
        return np.arange(workers)
    cheapest = np.argpartition(masked, members - 1, axis=1)[:, :members]
    return np.unique(cheapest)
