"""Which idle workers seat which clusters (cluster-jobs.md, Placement). Numbers in, columns out.

Workers are columns, members are rows. A cluster's placement is a true matching: one worker a member,
never two members on one worker, the lowest sum of missing bytes. Under `same_zone` each zone is
matched on its own, and the cheapest of those that seat every member wins. Clusters are served in the
order given, and a worker that is seated for one is not offered to the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gradient_protocol.kinds import JobKind
from scipy.optimize import linear_sum_assignment

__all__ = ["Flags", "Placement", "Request", "Vector", "place", "plan", "seatable", "zones_of"]

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


def zones_of(codes: npt.NDArray[np.intp]) -> list[tuple[int, Columns]]:
    """Each zone's code with its columns, by code; workers without a zone have one code of their own."""
    return [(int(code), np.flatnonzero(codes == code)) for code in np.unique(codes)]


def plan(
    requests: Sequence[Request], idle: Mapping[JobKind, Flags], zones: Sequence[tuple[int, Columns]]
) -> dict[str, Placement]:
    """The placements of one pass by cluster id; clusters without a full one are left out.

    `idle` is (workers,) for each kind.
    """
    free = {kind: flags.copy() for kind, flags in idle.items()}
    placed: dict[str, Placement] = {}
    for request in requests:
        usable = request.able & np.stack([free[kind] for kind in request.kinds])
        placement = place(usable, request.missing_bytes, zones, same_zone=request.same_zone)
        if placement is None:
            continue
        placed[request.cluster_id] = placement
        for flags in free.values():
            flags[list(placement.columns)] = False
    return placed


def place(
    usable: Flags, cost: Vector, zones: Sequence[tuple[int, Columns]], *, same_zone: bool
) -> Placement | None:
    """The cheapest full placement of one cluster over the usable seats; None if there is none.

    Of zones that cost the same, the first wins. Without `same_zone` the zone of the answer is -1.
    """
    if not usable.any(axis=1).all():
        return None
    everywhere = [(-1, np.flatnonzero(usable.any(axis=0)))]
    best: Placement | None = None
    for code, columns in zones if same_zone else everywhere:
        if len(columns) < len(usable):
            continue
        matched = _match(usable[:, columns], cost[:, columns])
        if matched is None:
            continue
        chosen, total = matched
        if best is None or total < best.cost:
            best = Placement(code, tuple(columns[chosen].tolist()), total)
    return best


def seatable(usable: Flags) -> list[int | None]:
    """For each member the column of a largest partial matching, None for those left standing."""
    found: list[int | None] = [None] * len(usable)
    if usable.size:
        rows, columns = linear_sum_assignment(usable, maximize=True)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            if usable[row, column]:
                found[row] = column
    return found


def _match(usable: Flags, cost: Vector) -> tuple[Columns, float] | None:
    """One column a row at the lowest sum, and the sum."""
    members = len(usable)
    if not usable.any(axis=1).all():
        return None
    masked = np.where(usable, cost, np.inf)
    kept = _worth_a_look(masked, members)
    try:
        _, columns = linear_sum_assignment(masked[:, kept])
    except ValueError:
        # There is no full matching; every entry of the costs themselves is finite.
        return None
    chosen = kept[columns]
    return chosen, float(masked[np.arange(members), chosen].sum())


def _worth_a_look(masked: Vector, members: int) -> Columns:
    """The columns that can matter: of n rows, each needs its own n cheapest at most."""
    if masked.shape[1] <= members * members:
        return np.arange(masked.shape[1])
    cheapest = np.argpartition(masked, members - 1, axis=1)[:, :members]
    return np.unique(cheapest)
