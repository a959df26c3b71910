"""Which paths a collection may remove, and in which order (pure).

A pinned path protects everything that it refers to. A path goes only after all that refer to it,
so that at no moment a valid path refers to one that is gone; of those that may go, the one used
least recently goes first. Outputs of one build may refer to one another in a ring: it goes at once.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping

from gradient_worker.stores.base import PathInfo

__all__ = ["choose_victims", "closure"]


def closure(infos: Mapping[str, PathInfo], roots: Iterable[str]) -> set[str]:
    """The roots that are held, with everything held that they refer to."""
    found: set[str] = set()
    pending = [root for root in roots if root in infos]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending.extend(reference for reference in infos[path].references if reference in infos)
    return found


def choose_victims(
    infos: Mapping[str, PathInfo], last_used: Mapping[str, float], pinned: Iterable[str], excess_bytes: int
) -> list[str]:
    """Paths to remove, in order, until `excess_bytes` are freed or nothing more may go."""
    removable = infos.keys() - closure(infos, pinned)
    referrers: dict[str, set[str]] = defaultdict(set)
    # In the order of the index, so that equal times give the same choice each time.
    for path in infos:
        for reference in infos[path].references:
            if reference != path:
                referrers[reference].add(path)
    by_age = sorted((last_used[path], path) for path in infos if path in removable)
    free = [entry for entry in by_age if not referrers.get(entry[1])]
    victims: list[str] = []
    gone: set[str] = set()
    oldest = iter(by_age)
    while excess_bytes > 0 and len(gone) < len(removable):
        if free:
            batch = [heapq.heappop(free)[1]]
        else:
            ring = next(path for _, path in oldest if path not in gone)
            batch = _with_referrers(referrers, ring)
        for path in batch:
            gone.add(path)
            victims.append(path)
            excess_bytes -= infos[path].nar_size
        for path in batch:
            for reference in set(infos[path].references):
                left = referrers.get(reference, set())
                left.discard(path)
                if not left and reference in removable and reference not in gone:
                    heapq.heappush(free, (last_used[reference], reference))
    return victims


def _with_referrers(referrers: Mapping[str, set[str]], path: str) -> list[str]:
    """`path` after everything that leads to it. All of it is removable, since `path` is."""
    found = [path]
    seen = {path}
    for member in found:
        for referrer in sorted(referrers.get(member, ())):
            if referrer not in seen:
                seen.add(referrer)
                found.append(referrer)
    return found[::-1]
