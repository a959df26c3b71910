"""What no cluster may be, asked of the stored graph (design.md, Rows and verdicts).

A cluster starts as one, so it is one node of the graph: no circle may lead through it, for a member
that waits for another's output, or for a cluster that waits for it, could never start jointly. And the
primary's success ends its helpers, so nothing may be built from a helper's outputs.
"""

from collections.abc import Sequence

from gradient_server.graph import sql
from gradient_server.graph.work import Work

__all__ = ["find_circle", "find_needed_helper", "find_shared_pin"]

_NEEDS = sql.statement(
    "SELECT DISTINCT dependency FROM derivation_dependency WHERE derivation IN [derivations]"
    " AND NOT runtime_only"
)
_STARTS_WITH = sql.statement(
    "SELECT DISTINCT b.derivation FROM cluster_member m JOIN derivation_build b ON b.id = m.derivation_build"
    " WHERE m.cluster_job IN (SELECT o.cluster_job FROM derivation_build c"
    "  JOIN cluster_member o ON o.derivation_build = c.id JOIN cluster_job j ON j.id = o.cluster_job"
    "  WHERE c.derivation IN [derivations] AND j.status IN ('Queued', 'Running'))"
)
_WORKERS = sql.statement("SELECT id, name FROM worker WHERE id IN [pins] OR name IN [pins]")
_NAME = sql.statement("SELECT name FROM derivation WHERE id = :id")
_NEEDS_HELPER = sql.statement(
    "SELECT d.name, h.name, c.name FROM derivation_dependency e JOIN derivation d ON d.id = e.derivation"
    " JOIN derivation h ON h.id = e.dependency JOIN derivation_build b ON b.derivation = e.dependency"
    ' JOIN cluster_member m ON m.derivation_build = b.id AND NOT m."primary"'
    " JOIN cluster_job c ON c.id = m.cluster_job AND c.status IN ('Queued', 'Running', 'Completed')"
    " WHERE e.derivation IN [derivations]"
    ' AND EXISTS (SELECT 1 FROM cluster_member p WHERE p.cluster_job = c.id AND p."primary") LIMIT 1'
)
_NEEDED_HELPER = sql.statement(
    "SELECT d.name, h.name FROM derivation_dependency e JOIN derivation d ON d.id = e.derivation"
    " JOIN derivation h ON h.id = e.dependency JOIN derivation_build w ON w.derivation = e.derivation"
    " AND w.status IN ('Created', 'Queued', 'Assigned') WHERE e.dependency IN [derivations] LIMIT 1"
)


def find_circle(work: Work, members: Sequence[int]) -> str | None:
    """The name of a member that another member needs, directly or through others and their clusters.

    `members` are the derivations of one cluster. The graph is walked downwards, one statement a level.
    """
    targets = set(members)
    frontier = targets
    seen: set[int] = set()
    while frontier:
        needed = _derivations(work, _NEEDS, frontier)
        joined = _derivations(work, _STARTS_WITH, needed)
        found = targets & (needed | (joined if needed.isdisjoint(targets) else set()))
        if found:
            return str(sql.run(work.connection, _NAME, {"id": min(found)})[0][0])
        frontier = (needed | joined) - seen
        seen |= frontier
    return None


def find_needed_helper(work: Work, derivations: Sequence[int], helpers: Sequence[int]) -> str | None:
    """Why one of `derivations` needs a helper of a stored cluster, or a build that waits needs one of
    `helpers` (derivations that are to become such): one line, None if none does.
    """
    if derivations:
        parameters = {"derivations": sql.array(work.connection, derivations)}
        for name, helper, cluster in sql.run(work.connection, _NEEDS_HELPER, parameters):
            return f"{name!r} needs {helper!r}, which is a helper of the primary of cluster {cluster!r}"
    if helpers:
        parameters = {"derivations": sql.array(work.connection, helpers)}
        for name, helper in sql.run(work.connection, _NEEDED_HELPER, parameters):
            return f"{name!r} needs {helper!r}, which is to be a helper of the cluster's primary"
    return None


def find_shared_pin(work: Work, pins: Sequence[str | None]) -> str | None:
    """The worker that two members are pinned to, by its id or by its name; None if there is none."""
    wanted = [pin for pin in pins if pin is not None]
    if len(wanted) < 2:
        return None
    rows = sql.run(work.connection, _WORKERS, {"pins": sql.array(work.connection, wanted)})
    workers = {name: worker for worker, name in rows}
    seen: set[str] = set()
    for pin in wanted:
        worker = workers.get(pin, pin)
        if worker in seen:
            return pin
        seen.add(worker)
    return None


def _derivations(work: Work, statement: sql.GraphStatement, of: set[int]) -> set[int]:
    if not of:
        return set()
    rows = sql.run(work.connection, statement, {"derivations": sql.array(work.connection, sorted(of))})
    return {row[0] for row in rows}
