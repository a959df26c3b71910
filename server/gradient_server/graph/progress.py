"""How builds move on: readiness, success, failure and what follows for those that depend on them.

A Created build becomes ready when every dependency that is not runtime-only is Completed and the
server holds its sources. One that needs a derivation without a current build has a dependency that
finally failed. Both are asked of whole sets in one statement each; a finished build that nobody
depends on costs one look-up.
"""

from collections.abc import Iterable, Sequence

import sqlalchemy as sa

from gradient_server.domain.events import BuildChanged, JobQueued, JobUnqueued
from gradient_server.domain.job import build_key
from gradient_server.domain.status import BuildStatus
from gradient_server.graph import sql
from gradient_server.graph.cluster_ends import end_waiting_clusters
from gradient_server.graph.cluster_revival import announce_revived, revive_clusters
from gradient_server.graph.evaluations import settle_evaluations
from gradient_server.graph.import_results import settle_imports
from gradient_server.graph.pending import load_queued_builds
from gradient_server.graph.states import BuildEvent, build_target
from gradient_server.graph.transitions import move_builds
from gradient_server.graph.work import Work

__all__ = [
    "abort_builds",
    "advance",
    "announce_queued",
    "fail_builds",
    "finish",
    "movable",
    "release_builds",
    "reset_builds",
    "settle_ended",
]

_CURRENT = "('Created', 'Queued', 'Assigned', 'Completed')"

# PostgreSQL: two dependencies that finish at once must not each see the other as unfinished, so
# whoever finishes locks the dependents first and looks, in a new statement, second.
_DEPENDENTS = sql.statement(
    "SELECT b.id FROM derivation_build b WHERE b.status = 'Created' AND b.derivation IN"
    " (SELECT e.derivation FROM derivation_dependency e WHERE e.dependency IN [derivations]"
    " AND NOT e.runtime_only)",
    "SELECT b.id FROM derivation_build b WHERE b.status = 'Created' AND b.derivation IN"
    " (SELECT e.derivation FROM derivation_dependency e WHERE e.dependency IN [derivations]"
    " AND NOT e.runtime_only)"
    " ORDER BY b.id FOR UPDATE",
)
# The last dependency is looked at first: builds finish roughly in the order of their derivations, so
# that a build of many inputs is turned away after a step or two each time one of them finishes.
_READY = sql.statement(
    "SELECT b.id, b.derivation,"
    " NOT EXISTS (SELECT 1 FROM derivation_output o LEFT JOIN cached_path p ON p.path = o.path"
    "  WHERE o.derivation = b.derivation AND (o.nar_hash IS NULL OR p.path IS NULL OR"
    " o.nar_hash <> p.nar_hash))"
    " AND NOT EXISTS (SELECT 1 FROM cluster_member m WHERE m.derivation_build = b.id)"
    " FROM derivation_build b WHERE b.id IN [ids] AND b.status = 'Created'"
    " AND (SELECT e.dependency FROM derivation_dependency e WHERE e.derivation ="
    " b.derivation AND NOT e.runtime_only"
    "  AND NOT EXISTS (SELECT 1 FROM derivation_build c WHERE c.derivation = e.dependency"
    " AND c.status = 'Completed')"
    "  ORDER BY e.dependency DESC LIMIT 1) IS NULL"
    " AND NOT EXISTS (SELECT 1 FROM derivation_source s WHERE s.derivation = b.derivation"
    "  AND NOT EXISTS (SELECT 1 FROM cached_path p WHERE p.path = s.path))"
)
_BLOCKED = sql.statement(
    "SELECT b.id, d.name FROM derivation_build b"  # noqa: S608 - own words only
    " JOIN derivation_dependency e ON e.derivation = b.derivation AND NOT e.runtime_only"
    " JOIN derivation d ON d.id = e.dependency"
    " WHERE b.id IN [ids] AND b.status = 'Created' AND NOT EXISTS"
    f" (SELECT 1 FROM derivation_build c WHERE c.derivation = e.dependency AND c.status IN {_CURRENT})"
    " ORDER BY b.id, d.name"
)
_ALL_DEPENDENTS = sql.statement(
    "WITH RECURSIVE hit(derivation) AS (SELECT b.derivation FROM derivation_build b WHERE b.id IN [ids]"
    " UNION SELECT b.derivation FROM hit"
    " JOIN derivation_dependency e ON e.dependency = hit.derivation AND NOT e.runtime_only"
    " JOIN derivation_build b ON b.derivation = e.derivation AND b.status = 'Created')"
    " SELECT b.id FROM hit JOIN derivation_build b ON b.derivation = hit.derivation AND b.status = 'Created'"
)
_QUEUED_DEPENDENTS = sql.statement(
    "SELECT DISTINCT b.id FROM derivation_build b"
    " JOIN derivation_dependency e ON e.derivation = b.derivation AND NOT e.runtime_only"
    " WHERE e.dependency IN (SELECT r.derivation FROM derivation_build r WHERE r.id IN"
    " [ids]) AND b.status = 'Queued'"
)
_SETTLE_JOBS = sql.statement(
    "UPDATE build_job SET outcome = :outcome, finished_at = :now"
    " WHERE build IN [ids] AND outcome IS NULL RETURNING build, evaluation, attr"
)
_REOPEN_JOBS = sql.statement(
    "UPDATE build_job SET outcome = NULL, finished_at = NULL WHERE build IN [ids] AND outcome = 'Completed'"
    " AND evaluation IN (SELECT v.id FROM evaluation v WHERE v.finished_at IS NULL)"
)
_ENDED = sql.statement(
    "SELECT id, status FROM derivation_build WHERE id IN [ids] AND finished_at IS NOT NULL ORDER BY id"
)
_NAMES = sql.statement(
    "SELECT b.id, d.name FROM derivation_build b JOIN derivation d ON d.id = b.derivation WHERE b.id IN [ids]"
)
_SET_CLOSURE_SIZE = sql.statement(
    "UPDATE derivation SET closure_size = :size WHERE id = :id AND closure_size IS NULL"
)
_EXPLAIN = sql.statement("UPDATE derivation_build SET error = :error, failure_kind = :kind WHERE id IN [ids]")


def advance(work: Work, builds: Sequence[str]) -> None:
    """Looks again at builds that are Created: some are blocked for good, some ready, the rest wait."""
    if not builds:
        return
    blocked: dict[str, str] = {}
    for build, dependency in sql.run(work.connection, _BLOCKED, _ids(work, builds)):
        blocked.setdefault(build, dependency)
    by_dependency: dict[str, list[str]] = {}
    for build, dependency in blocked.items():
        by_dependency.setdefault(dependency, []).append(build)
    for dependency, stuck in by_dependency.items():
        error = f"it needs {dependency}, which failed"
        fail_builds(work, stuck, BuildEvent.DEPENDENCY_FAILED, error=error)
    _ready(work, [build for build in builds if build not in blocked])


def movable(connection: sa.Connection, builds: Sequence[str]) -> list[str]:
    """Those of `builds` that `advance` would move: Created, and ready or blocked for good. A look only."""
    if not builds:
        return []
    parameters = {"ids": sql.array(connection, builds)}
    found = [row[0] for row in sql.run(connection, _READY, parameters)]
    return [*found, *dict.fromkeys(row[0] for row in sql.run(connection, _BLOCKED, parameters))]


def release_builds(work: Work, builds: Sequence[str]) -> None:
    """These are Assigned and no worker has them: they wait for one again."""
    announce_queued(work, move_builds(work, builds, BuildEvent.RELEASED, racing=True))


def settle_ended(work: Work, builds: Sequence[str]) -> None:
    """Gives wishes that stayed open the outcome of these builds, which have ended."""
    if not builds:
        return
    evaluations: dict[str, None] = {}
    for build, status in sql.run(work.connection, _ENDED, _ids(work, builds)):
        evaluations.update(_settle_jobs(work, [build], BuildStatus(status)))
    settle_evaluations(work, evaluations)


def finish(
    work: Work,
    builds: Sequence[str],
    derivations: Sequence[int],
    *,
    worker: str | None = None,
    imported: bool = True,
    names: dict[str, str] | None = None,
) -> None:
    """What follows for others once these builds are Completed.

    `imported` False: nobody has asked to import any of them; `names`: the builds' names. Each saves a
    look-up.
    """
    evaluations = _settle_jobs(work, builds, BuildStatus.COMPLETED, worker=worker, names=names)
    if imported:
        settle_imports(work, builds, None)
    parameters = {"derivations": sql.array(work.connection, derivations)}
    dependents = [row[0] for row in sql.run(work.connection, _DEPENDENTS, parameters)]
    _ready(work, dependents)
    settle_evaluations(work, evaluations)


def fail_builds(
    work: Work,
    builds: Sequence[str],
    event: BuildEvent,
    *,
    error: str,
    kind: str | None = None,
    worker: str | None = None,
    racing: bool = False,
    counts_as: BuildStatus | None = None,
) -> list[str]:
    """Ends builds by a final event other than success, and all that wait for them. Those that moved.

    `counts_as`: their outcome for the evaluations that want them, if it is another than their status.
    """
    evaluations = _end(
        work, builds, event, error=error, kind=kind, worker=worker, racing=racing, counts_as=counts_as
    )
    if evaluations is None:
        return []
    moved, wanting = evaluations
    dependents = sql.run(work.connection, _ALL_DEPENDENTS, _ids(work, moved))
    names = _names(work, moved)
    first = min(names.values())
    how = "was aborted" if build_target(event) is BuildStatus.ABORTED else "failed"
    cascade = _end(
        work,
        [row[0] for row in dependents],
        BuildEvent.DEPENDENCY_FAILED,
        error=f"it needs {first}, which {how}",
        kind=None,
    )
    others = end_waiting_clusters(work, moved, event, error)
    if cascade is not None:
        wanting.update(cascade[1])
        others += end_waiting_clusters(work, cascade[0], BuildEvent.DEPENDENCY_FAILED, error)
    settle_evaluations(work, wanting)
    if others:
        abort_builds(work, others, error=f"it is of a cluster with {first}, which ended")
    return moved


def abort_builds(work: Work, builds: Sequence[str], *, error: str) -> list[str]:
    """Aborts those of `builds` that no worker has. A claim that was faster keeps its build."""
    return fail_builds(work, builds, BuildEvent.WITHDRAWN, error=error, racing=True)


def reset_builds(work: Work, builds: Sequence[str]) -> list[str]:
    """The outputs of these Completed builds are lost: they are to be made again.

    Evaluations that are still open wait for them again, and queued builds that need them too. Members
    of a cluster that has ended are made again with the whole of it. Returns all that are Created now,
    for the caller to advance.
    """
    if not builds:
        return []
    revived = revive_clusters(work, builds)
    builds = list(dict.fromkeys([*builds, *revived.completed]))
    move_builds(work, builds, BuildEvent.RESET)
    sql.run(work.connection, _REOPEN_JOBS, _ids(work, builds))
    dependents = [row[0] for row in sql.run(work.connection, _QUEUED_DEPENDENTS, _ids(work, builds))]
    for build in move_builds(work, dependents, BuildEvent.WAITS_AGAIN, racing=True):
        work.events.append(JobUnqueued(build_key(build), "an input is made again"))
    announce_revived(work, revived)
    return [*builds, *revived.fresh]


def announce_queued(work: Work, builds: Sequence[str]) -> None:
    """Tells the scheduler of builds that are Queued, new to it or changed; stores new closure sizes."""
    loaded = load_queued_builds(work.connection, builds)
    sizes = sorted((one.unsized, one.job.closure_size) for one in loaded if one.unsized is not None)
    sql.run_many(work.connection, _SET_CLOSURE_SIZE, [{"id": one, "size": size} for one, size in sizes])
    for queued in loaded:
        work.events.append(JobQueued(queued.job))
        work.events.append(
            BuildChanged(queued.build, queued.evaluations, queued.job.name, BuildStatus.QUEUED)
        )


def _ready(work: Work, builds: Sequence[str]) -> None:
    if not builds:
        return
    ready = sql.run(work.connection, _READY, _ids(work, builds))
    held = [(build, derivation) for build, derivation, outputs_held in ready if outputs_held]
    queued = [build for build, _, outputs_held in ready if not outputs_held]
    move_builds(work, queued, BuildEvent.READY)
    announce_queued(work, queued)
    if held:
        # What a reset build made is back already, or was never gone: no worker is needed.
        completed = [build for build, _ in held]
        move_builds(work, completed, BuildEvent.OUTPUTS_HELD)
        finish(work, completed, [derivation for _, derivation in held])


def _end(
    work: Work,
    builds: Sequence[str],
    event: BuildEvent,
    *,
    error: str,
    kind: str | None,
    worker: str | None = None,
    racing: bool = False,
    counts_as: BuildStatus | None = None,
) -> tuple[list[str], dict[str, None]] | None:
    moved = move_builds(work, builds, event, racing=racing)
    if not moved:
        return None
    sql.run(work.connection, _EXPLAIN, {**_ids(work, moved), "error": error, "kind": kind})
    status = build_target(event)
    for build in moved:
        work.events.append(JobUnqueued(build_key(build), error))
    wanting = _settle_jobs(work, moved, status, worker=worker, error=error, counts_as=counts_as)
    settle_imports(work, moved, error)
    return moved, wanting


def _settle_jobs(
    work: Work,
    builds: Sequence[str],
    status: BuildStatus,
    *,
    worker: str | None = None,
    error: str | None = None,
    names: dict[str, str] | None = None,
    counts_as: BuildStatus | None = None,
) -> dict[str, None]:
    """Gives every wish for these builds its outcome; the evaluations concerned, in order."""
    parameters = {**_ids(work, builds), "outcome": counts_as or status, "now": work.now}
    wishes: dict[str, list[tuple[str, str | None]]] = {build: [] for build in builds}
    evaluations: dict[str, None] = {}
    for build, evaluation, attr in sql.run(work.connection, _SETTLE_JOBS, parameters):
        wishes[build].append((evaluation, attr))
        evaluations[evaluation] = None
    names = names or _names(work, builds)
    for build, wanted in wishes.items():
        attr = next((attr for _, attr in wanted if attr is not None), None)
        work.events.append(
            BuildChanged(build, tuple(e for e, _ in wanted), names[build], status, worker, error, attr)
        )
    return evaluations


def _names(work: Work, builds: Sequence[str]) -> dict[str, str]:
    return {row[0]: row[1] for row in sql.run(work.connection, _NAMES, _ids(work, builds))}


def _ids(work: Work, builds: Iterable[str]) -> dict[str, object]:
    return {"ids": sql.array(work.connection, builds)}
