"""Waiting jobs as the scheduler sees them, loaded in batches: a fixed number of statements,"
" whatever waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from gradient_protocol.kinds import EvalStep, JobKind

from gradient_server.domain.job import PendingJob, build_key, eval_key
from gradient_server.graph import sql
from gradient_server.graph.closures import Closures, load_closures

__all__ = ["QueuedBuild", "load_queued_builds", "load_queued_evaluations"]

_BATCH = 1_000
# Evaluations run anywhere: what they need is a capability, not a system.
_ANY_SYSTEM = "any"

_BUILDS = (
    "SELECT b.id, b.created_at, b.queued_at, b.ready_at, b.not_before, b.prioritized, b.build_request, b.ifd,"
    " b.peak_ram_mb, b.oom_retries, d.id, d.name, d.pname, d.drv_path, d.system, d.features, d.prefer_local,"
    " d.fixed_output IS NOT NULL, d.closure_size, m.cluster_job"
    " FROM derivation_build b JOIN derivation d ON d.id = b.derivation"
    " LEFT JOIN cluster_member m ON m.derivation_build = b.id WHERE b.status = 'Queued'"
)
_SOME_BUILDS = sql.statement(_BUILDS + " AND b.id IN [ids] ORDER BY b.id")
_ALL_IDS = sql.statement(
    "SELECT id FROM derivation_build WHERE status = 'Queued' AND finished_at IS NULL ORDER BY id"
)
_OUTPUTS = sql.statement(
    "SELECT derivation, path, nar_size FROM derivation_output WHERE derivation IN [derivations]"
    " ORDER BY derivation, position"
)
_INPUTS = sql.statement(
    "SELECT e.derivation, e.dependency, e.outputs, o.name, o.path FROM derivation_dependency e"
    " JOIN derivation_output o ON o.derivation = e.dependency"
    " WHERE e.derivation IN [derivations] AND NOT e.runtime_only"
)
_SOURCES = sql.statement("SELECT derivation, path FROM derivation_source WHERE derivation IN [derivations]")
_WANTED_BY = sql.statement(
    "SELECT j.build, v.project, v.id FROM build_job j JOIN evaluation v ON v.id = j.evaluation"
    " WHERE j.build IN [ids] AND j.outcome IS NULL ORDER BY j.id"
)
# The oldest unfinished evaluations of a task, as many as its limit lets run.
_EVALUATIONS = (
    "SELECT v.id, v.project, t.id, t.name, v.source_path, v.queued_at, v.ready_at,"
    " v.not_before, v.prioritized,"
    " v.build_request, p.name, m.cluster_job"
    " FROM evaluation v JOIN task t ON t.id = v.task JOIN project p ON p.id = v.project"
    " LEFT JOIN cluster_member m ON m.evaluation = v.id"
    " WHERE v.status = 'Queued' AND v.finished_at IS NULL"
    " AND (t.max_concurrent_evaluations IS NULL OR t.max_concurrent_evaluations > (SELECT"
    " COUNT(*) FROM evaluation o"
    "  WHERE o.task = v.task AND o.finished_at IS NULL"
    "  AND (o.created_at < v.created_at OR (o.created_at = v.created_at AND o.id < v.id))))"
)
_SOME_EVALUATIONS = sql.statement(_EVALUATIONS + " AND v.id IN [ids] ORDER BY v.created_at, v.id")
_ALL_EVALUATIONS = sql.statement(_EVALUATIONS + " ORDER BY v.created_at, v.id")


@dataclass(frozen=True, slots=True)
class QueuedBuild:
    """A queued build, its id and the evaluations that want it.

    `unsized`: its derivation, if the closure size was worked out just now and is to be stored.
    """

    build: str
    evaluations: tuple[str, ...]
    job: PendingJob
    unsized: int | None = None


def load_queued_builds(connection: sa.Connection, builds: Sequence[str] | None) -> list[QueuedBuild]:
    """Those of `builds` that are Queued, members of clusters included. None: all that are."""
    wanted = [row[0] for row in sql.run(connection, _ALL_IDS)] if builds is None else builds
    loaded: list[QueuedBuild] = []
    for chunk in sql.chunks(wanted, _BATCH):
        rows = sql.run(connection, _SOME_BUILDS, {"ids": sql.array(connection, chunk)})
        if rows:
            loaded.extend(_build_batch(connection, rows))
    return loaded


def load_queued_evaluations(connection: sa.Connection, evaluations: Sequence[str] | None) -> list[PendingJob]:
    """Those of `evaluations` that are Queued and that their task lets run. None: all of these."""
    if evaluations is None:
        rows = sql.run(connection, _ALL_EVALUATIONS)
    elif evaluations:
        rows = sql.run(connection, _SOME_EVALUATIONS, {"ids": sql.array(connection, evaluations)})
    else:
        rows = []
    return [_pending_evaluation(row) for row in rows]


def _pending_evaluation(row: tuple[Any, ...]) -> PendingJob:
    evaluation, project, task, task_name, source_path, queued_at, ready_at, not_before = row[:8]
    prioritized, build_request, project_name, cluster = row[8:]
    # Members evaluate in one job (cluster-jobs.md), which these steps are unless the source is here.
    steps = (EvalStep.FETCH, EvalStep.EVALUATE) if source_path is None else (EvalStep.EVALUATE,)
    return PendingJob(
        job_id=eval_key(evaluation),
        kind=JobKind.EVAL,
        name=f"{project_name}/{task_name}",
        projects=(project,),
        system=_ANY_SYSTEM,
        features=frozenset(),
        queued_at=queued_at,
        ready_at=ready_at,
        not_before=not_before,
        prioritized=bool(prioritized),
        build_request=bool(build_request),
        task=task,
        steps=steps,
        cluster=cluster,
    )


@dataclass(slots=True)
class _Surroundings:
    """What the builds of one batch need beside their own rows, by derivation or build."""

    outputs: dict[int, list[tuple[str, int | None]]]
    roots: dict[int, set[str]]
    dependencies: dict[int, set[int]]
    wanted_by: dict[str, list[tuple[str, str]]]
    closures: Closures


def _build_batch(connection: sa.Connection, rows: Sequence[tuple[Any, ...]]) -> list[QueuedBuild]:
    around = _load_surroundings(connection, [row[0] for row in rows], [row[10] for row in rows])
    return [_queued_build(row, around) for row in rows]


def _load_surroundings(connection: sa.Connection, builds: list[str], derivations: list[int]) -> _Surroundings:
    by_derivation = {"derivations": sql.array(connection, derivations)}
    outputs: dict[int, list[tuple[str, int | None]]] = {}
    for derivation, path, nar_size in sql.run(connection, _OUTPUTS, by_derivation):
        outputs.setdefault(derivation, []).append((path, nar_size))
    roots: dict[int, set[str]] = {derivation: set() for derivation in derivations}
    dependencies: dict[int, set[int]] = {derivation: set() for derivation in derivations}
    for derivation, dependency, used, name, path in sql.run(connection, _INPUTS, by_derivation):
        dependencies[derivation].add(dependency)
        if name in sql.from_json(used):
            roots[derivation].add(path)
    for derivation, path in sql.run(connection, _SOURCES, by_derivation):
        roots[derivation].add(path)
    wanted_by: dict[str, list[tuple[str, str]]] = {build: [] for build in builds}
    for build, project, evaluation in sql.run(connection, _WANTED_BY, {"ids": sql.array(connection, builds)}):
        wanted_by[build].append((project, evaluation))
    closures = load_closures(connection, (path for paths in roots.values() for path in paths))
    return _Surroundings(outputs, roots, dependencies, wanted_by, closures)


def _queued_build(row: tuple[Any, ...], around: _Surroundings) -> QueuedBuild:
    build, created_at, queued_at, ready_at, not_before, prioritized, build_request, ifd = row[:8]
    peak_ram_mb, oom_retries, derivation, name, pname, drv_path, system, features = row[8:16]
    prefer_local, is_fixed_output, closure_size, cluster = row[16:]
    outputs = around.outputs.get(derivation, [])
    sizes = [size for _, size in outputs]
    wanted_by = around.wanted_by[build]
    required = around.closures.required(frozenset(around.roots[derivation]))
    unsized = derivation if closure_size is None else None
    if closure_size is None:
        # Bytes of what must be there to build it: the closure of its inputs, walked for the whole batch.
        closure_size = sum(path.nar_size for path in required)
    job = PendingJob(
        job_id=build_key(build),
        kind=JobKind.BUILD,
        name=name,
        projects=tuple(dict.fromkeys(project for project, _ in wanted_by)),
        system=system,
        features=frozenset(sql.from_json(features)),
        queued_at=created_at if queued_at is None else queued_at,
        ready_at=created_at if ready_at is None else ready_at,
        not_before=not_before,
        prioritized=bool(prioritized),
        build_request=bool(build_request),
        pname=pname,
        drv_path=drv_path,
        required_paths=required,
        output_paths=tuple(path for path, _ in outputs),
        dependency_count=len(around.dependencies[derivation]),
        closure_size=closure_size,
        output_size=None if None in sizes else sum(size for size in sizes if size is not None),
        ifd=bool(ifd),
        is_fixed_output=bool(is_fixed_output),
        prefer_local_build=bool(prefer_local),
        peak_ram_mb=peak_ram_mb,
        needs_ram_over_mb=peak_ram_mb if oom_retries else None,
        cluster=cluster,
    )
    evaluations = tuple(dict.fromkeys(evaluation for _, evaluation in wanted_by))
    return QueuedBuild(build, evaluations, job, unsized)
