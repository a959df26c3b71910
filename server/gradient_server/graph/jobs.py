"""Jobs for the scheduler: what waits, and the wire's Job of what was claimed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa
from gradient_protocol.kinds import EvalStep, JobKind
from gradient_protocol.messages.shapes import (
    BuildInput,
    BuildJob,
    DerivationOutput,
    EvalJob,
    FixedOutput,
    GitSource,
    Job,
    PathSource,
    Source,
)

from gradient_server.domain.job import PendingJob, split_job_key
from gradient_server.graph import sql
from gradient_server.graph.closures import Closures, load_closures
from gradient_server.graph.pending import load_queued_builds, load_queued_evaluations

__all__ = ["JobDefaults", "load_builds", "load_job", "load_pending"]

_SOURCE_NAME = "source"

_BUILDS = sql.statement(
    "SELECT b.id, d.id, d.drv_path, d.name, d.system, d.features, d.command, d.env, d.fixed_output,"
    " d.timeout_secs, d.max_silent_secs,"
    " (SELECT p.name FROM build_job j JOIN evaluation v ON v.id = j.evaluation"
    "  JOIN project p ON p.id = v.project WHERE j.build = b.id ORDER BY j.outcome IS NOT NULL, j.id LIMIT 1)"
    " FROM derivation_build b JOIN derivation d ON d.id = b.derivation WHERE b.id IN [ids]"
)
_OUTPUTS = sql.statement(
    "SELECT derivation, name, path FROM derivation_output WHERE derivation IN [derivations]"
    " ORDER BY derivation, position"
)
_INPUTS = sql.statement(
    "SELECT e.derivation, e.outputs, COALESCE(e.input_name, d.name), o.name, o.path, o.nar_hash, o.nar_size"
    " FROM derivation_dependency e JOIN derivation d ON d.id = e.dependency"
    " JOIN derivation_output o ON o.derivation = e.dependency"
    " WHERE e.derivation IN [derivations] AND NOT e.runtime_only ORDER BY d.name, d.id, o.position"
)
_SOURCES = sql.statement(
    "SELECT derivation, path FROM derivation_source WHERE derivation IN [derivations] ORDER BY path"
)
_EVALUATION = sql.statement(
    "SELECT p.name, t.name, v.source, v.source_path, v.attrs, t.evaluation_timeout_secs FROM evaluation v"
    " JOIN task t ON t.id = v.task JOIN project p ON p.id = v.project WHERE v.id = :id"
)
_MARK_FETCH_ONLY = sql.statement(
    "UPDATE dispatched_job SET fetch_only = TRUE WHERE job_key = :job_key AND finished_at IS NULL"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDefaults:
    """For jobs that name no times of their own (operations.md), in seconds."""

    timeout_secs: float = 14_400.0
    max_silent_secs: float = 3_600.0
    evaluation_timeout_secs: float = 3_600.0


@dataclass(frozen=True, slots=True)
class _Direct:
    """A direct input: the name and output its variable is made from, and what is recorded of it."""

    name: str
    output: str | None
    nar_hash: str | None
    nar_size: int | None


def load_pending(connection: sa.Connection, job_ids: Sequence[str] | None, now: float) -> list[PendingJob]:
    """Those of `job_ids` (job keys) that wait for a worker; None: everything that does.

    Jobs whose backoff has not passed by `now` are among them, with their `not_before`; so are members
    of clusters, with theirs.
    """
    del now
    if job_ids is None:
        evaluations, builds = None, None
    else:
        keys = [split_job_key(key) for key in job_ids]
        evaluations = [job for kind, job in keys if kind is JobKind.EVAL]
        builds = [job for kind, job in keys if kind is JobKind.BUILD]
    queued = load_queued_builds(connection, builds)
    return [*load_queued_evaluations(connection, evaluations), *(build.job for build in queued)]


def load_job(
    connection: sa.Connection,
    job_key: str,
    *,
    steps: Sequence[EvalStep] | None = None,
    defaults: JobDefaults | None = None,
) -> Job:
    """The wire's Job of a claimed assignment. LookupError if there is no such job.

    `steps` [Fetch]: the fetch half of an evaluation whose source is not here yet; the open assignment
    is marked, so that its completion queues the follow-up. Called in the claim's own transaction.

    An input that the server has lost since is listed with what is recorded of it: the worker will find
    it unavailable, and its report heals the graph.
    """
    kind, job = split_job_key(job_key)
    if kind is JobKind.BUILD:
        return load_builds(connection, [job], defaults=defaults)[job]
    return _load_evaluation(connection, job, job_key, steps, defaults or JobDefaults())


def _load_evaluation(
    connection: sa.Connection,
    evaluation: str,
    job_key: str,
    steps: Sequence[EvalStep] | None,
    defaults: JobDefaults,
) -> EvalJob:
    rows = sql.run(connection, _EVALUATION, {"id": evaluation})
    if not rows:
        raise LookupError(f"no evaluation {evaluation}")
    project, task, source, source_path, attrs, timeout_secs = rows[0]
    if source_path is not None:
        to_read: Source = PathSource(path=source_path)
        to_do = [EvalStep.EVALUATE]
    else:
        to_read = msgspec.convert(sql.from_json(source), PathSource | GitSource)
        to_do = [EvalStep.FETCH, EvalStep.EVALUATE]
        if steps is not None and list(steps) == [EvalStep.FETCH]:
            to_do = [EvalStep.FETCH]
            sql.run(connection, _MARK_FETCH_ONLY, {"job_key": job_key})
    return EvalJob(
        project=project,
        task=task,
        evaluation=evaluation,
        steps=to_do,
        source=to_read,
        attrs=sql.from_json(attrs),
        timeout_secs=defaults.evaluation_timeout_secs if timeout_secs is None else timeout_secs,
    )


def load_builds(
    connection: sa.Connection, builds: Sequence[str], *, defaults: JobDefaults | None = None
) -> dict[str, BuildJob]:
    """The wire's Jobs of claimed builds, by the build's id: a fixed number of statements, however many.

    As `load_job`; LookupError if there is no such build.
    """
    rows = sql.run(connection, _BUILDS, {"ids": sql.array(connection, builds)}) if builds else []
    found = {row[0]: row[1:] for row in rows}
    missing = [build for build in builds if build not in found]
    if missing:
        raise LookupError(f"no build {missing[0]}")
    of_derivations = {"derivations": sql.array(connection, [row[0] for row in found.values()])}
    outputs: dict[int, list[DerivationOutput]] = {}
    for derivation, output, path in sql.run(connection, _OUTPUTS, of_derivations) if found else ():
        outputs.setdefault(derivation, []).append(DerivationOutput(name=output, path=path))
    direct = _direct_inputs(connection, of_derivations) if found else {}
    closures = load_closures(connection, (path for paths in direct.values() for path in paths))
    return {
        build: _build_job(
            row, outputs.get(row[0], []), _inputs(direct.get(row[0], {}), closures), defaults or JobDefaults()
        )
        for build, row in found.items()
    }


def _build_job(
    row: tuple[Any, ...], outputs: list[DerivationOutput], inputs: list[BuildInput], defaults: JobDefaults
) -> BuildJob:
    _, drv_path, name, system, features, command, env, download, timeout_secs, max_silent_secs, project = row
    download = sql.from_json(download)
    return BuildJob(
        project=project or "",
        drv_path=drv_path,
        name=name,
        system=system,
        features=sql.from_json(features),
        command=sql.from_json(command),
        env=sql.from_json(env),
        inputs=inputs,
        outputs=outputs,
        fixed_output=None
        if download is None
        else FixedOutput(url=download["url"], sha256=download["sha256"]),
        timeout_secs=defaults.timeout_secs if timeout_secs is None else timeout_secs,
        max_silent_secs=defaults.max_silent_secs if max_silent_secs is None else max_silent_secs,
    )


def _direct_inputs(
    connection: sa.Connection, of_derivations: dict[str, sql.Array]
) -> dict[int, dict[str, _Direct]]:
    """The direct inputs of each derivation, by path."""
    direct: dict[int, dict[str, _Direct]] = {}
    for derivation, used, name, output, path, nar_hash, nar_size in sql.run(
        connection, _INPUTS, of_derivations
    ):
        if output in sql.from_json(used):
            direct.setdefault(derivation, {})[path] = _Direct(name, output, nar_hash, nar_size)
    for derivation, path in sql.run(connection, _SOURCES, of_derivations):
        direct.setdefault(derivation, {})[path] = _Direct(_SOURCE_NAME, None, None, None)
    return direct


def _inputs(direct: dict[str, _Direct], closures: Closures) -> list[BuildInput]:
    """Direct inputs first, in the order of their names, then the rest of their closure by path."""
    everything = closures.of(direct)
    ordered = [*direct, *(path for path in everything if path not in direct)]
    inputs = []
    for path in ordered:
        held = closures.held.get(path)
        wanted = direct.get(path)
        if held is not None:
            nar_hash, nar_size = held.nar_hash, held.nar_size
        elif wanted is not None and wanted.nar_hash is not None and wanted.nar_size is not None:
            nar_hash, nar_size = wanted.nar_hash, wanted.nar_size
        else:
            nar_hash, nar_size = "", 0
        inputs.append(
            BuildInput(
                path=path,
                nar_hash=nar_hash,
                nar_size=nar_size,
                references=closures.references.get(path, []),
                name=None if wanted is None else wanted.name,
                output=None if wanted is None else wanted.output,
            )
        )
    return inputs
