"""Stores the derivations of a batch: the rows that every evaluation shares and nobody changes.

A derivation's path is the hash of what decides its outputs, so a path that is stored already is left
as it is, its timeouts and preference apart. Since a batch is stored whole or not at all, and names no
input that is unknown, the closure of every stored derivation is stored too.
"""

from collections.abc import Collection, Sequence
from typing import Any

from gradient_protocol.messages.shapes import Derivation

from gradient_server.graph import sql
from gradient_server.graph.work import Work

__all__ = ["check_inputs", "find_derivations", "store_derivations"]

_FIND = sql.statement("SELECT drv_path, id FROM derivation WHERE drv_path IN [paths]")
_MARKED = sql.statement("SELECT drv_path FROM derivation WHERE id IN [derivations] AND clustered")
_OUTPUT_NAMES = sql.statement(
    "SELECT derivation, name FROM derivation_output WHERE derivation IN [derivations]"
)
_INSERT = sql.statement(
    "INSERT INTO derivation (drv_path, name, pname, history_name, system, features, command,"
    " env, fixed_output,"
    " prefer_local, clustered, timeout_secs, max_silent_secs, created_at) VALUES (:drv_path, :name,"
    " :pname, :history_name,"
    " :system, :features, :command, :env, :fixed_output, :prefer_local, :clustered, :timeout_secs,"
    " :max_silent_secs, :now)"
    " ON CONFLICT (drv_path) DO NOTHING"
)
_INSERT_OUTPUT = sql.statement(
    "INSERT INTO derivation_output (derivation, name, position, path) VALUES (:derivation,"
    " :name, :position, :path)"
    " ON CONFLICT DO NOTHING"
)
_INSERT_DEPENDENCY = sql.statement(
    "INSERT INTO derivation_dependency (derivation, dependency, runtime_only, outputs, input_name)"
    " VALUES (:derivation, :dependency, :runtime_only, :outputs, :input_name) ON CONFLICT DO NOTHING"
)
_INSERT_SOURCE = sql.statement(
    "INSERT INTO derivation_source (derivation, path) VALUES (:derivation, :path) ON CONFLICT DO NOTHING"
)
_PREFERENCES = sql.statement(
    "SELECT id, timeout_secs, max_silent_secs, prefer_local FROM derivation WHERE id IN [derivations]"
)
_SET_PREFERENCES = sql.statement(
    "UPDATE derivation SET timeout_secs = :timeout_secs, max_silent_secs = :max_silent_secs,"
    " prefer_local = :prefer_local WHERE id = :id"
)


def find_derivations(work: Work, drv_paths: Sequence[str]) -> dict[str, int]:
    """The row ids of those of `drv_paths` that are stored."""
    parameters = {"paths": sql.array(work.connection, drv_paths)}
    return {row[0]: row[1] for row in sql.run(work.connection, _FIND, parameters)}


def check_inputs(work: Work, derivations: Sequence[Derivation], stored: dict[str, int]) -> str | None:
    """Why an input of a batch cannot be: unknown, or without the output that is wanted of it."""
    offered = {d.drv_path: {output.name for output in d.outputs} for d in derivations}
    elsewhere = {
        stored[wanted.drv_path]: wanted.drv_path
        for derivation in derivations
        for wanted in derivation.inputs
        if wanted.drv_path in stored and wanted.drv_path not in offered
    }
    parameters = {"derivations": sql.array(work.connection, list(elsewhere))}
    for derivation_id, name in sql.run(work.connection, _OUTPUT_NAMES, parameters) if elsewhere else ():
        offered.setdefault(elsewhere[derivation_id], set()).add(name)
    for derivation in derivations:
        for wanted in derivation.inputs:
            if wanted.drv_path not in offered:
                return f"{derivation.name!r}: its input {wanted.drv_path!r} is not known"
            lacking = sorted(set(wanted.outputs) - offered[wanted.drv_path])
            if lacking:
                return f"{derivation.name!r}: its input {wanted.drv_path!r} has no output {lacking[0]!r}"
    return None


def store_derivations(
    work: Work,
    derivations: Sequence[Derivation],
    stored: dict[str, int],
    *,
    members: Collection[str] = (),
) -> dict[str, int]:
    """Stores what is new of a checked batch; `stored` and the ids of all of it.

    `members` are derivations of the batch that a cluster of it names: they, and what needs them, are
    marked, for an evaluator must never leave them out (known.py).
    """
    fresh = sorted((d for d in derivations if d.drv_path not in stored), key=lambda d: d.drv_path)
    _store_preferences(work, [d for d in derivations if d.drv_path in stored], stored)
    if not fresh:
        return stored
    clustered = _clustered(work, derivations, stored, members)
    rows = [_derivation_row(derivation, work.now, clustered) for derivation in fresh]
    sql.run_many(work.connection, _INSERT, rows)
    ids = {**stored, **find_derivations(work, [derivation.drv_path for derivation in fresh])}
    outputs: list[dict[str, Any]] = []
    dependencies: list[dict[str, Any]] = []
    sources: list[dict[str, Any]] = []
    for derivation in fresh:
        own = ids[derivation.drv_path]
        outputs.extend(
            {"derivation": own, "name": output.name, "position": position, "path": output.path}
            for position, output in enumerate(derivation.outputs)
        )
        dependencies.extend(
            {
                "derivation": own,
                "dependency": ids[wanted.drv_path],
                "runtime_only": wanted.runtime_only,
                "outputs": sql.to_json(wanted.outputs),
                "input_name": wanted.name,
            }
            for wanted in derivation.inputs
        )
        sources.extend({"derivation": own, "path": path} for path in derivation.sources)
    sql.run_many(work.connection, _INSERT_OUTPUT, outputs)
    sql.run_many(work.connection, _INSERT_DEPENDENCY, dependencies)
    sql.run_many(work.connection, _INSERT_SOURCE, sources)
    return ids


def _clustered(
    work: Work, derivations: Sequence[Derivation], stored: dict[str, int], members: Collection[str]
) -> set[str]:
    """Which derivations of a batch are members, or need one, at any distance."""
    by_id = {"derivations": sql.array(work.connection, list(stored.values()))}
    marked = {row[0] for row in sql.run(work.connection, _MARKED, by_id)} | set(members)
    if not marked:
        return marked
    needed_by: dict[str, list[str]] = {}
    for derivation in derivations:
        for wanted in derivation.inputs:
            needed_by.setdefault(wanted.drv_path, []).append(derivation.drv_path)
    pending = list(marked)
    while pending:
        for dependent in needed_by.get(pending.pop(), ()):
            if dependent not in marked:
                marked.add(dependent)
                pending.append(dependent)
    return marked


def _derivation_row(derivation: Derivation, now: float, clustered: Collection[str]) -> dict[str, Any]:
    download = derivation.fixed_output
    return {
        "drv_path": derivation.drv_path,
        "name": derivation.name,
        "pname": derivation.pname,
        "history_name": derivation.pname or derivation.name,
        "system": derivation.system,
        "features": sql.to_json(derivation.features),
        "command": sql.to_json(derivation.command),
        "env": sql.to_json(derivation.env),
        "fixed_output": sql.to_json({"url": download.url, "sha256": download.sha256}) if download else None,
        "prefer_local": derivation.prefer_local,
        "clustered": derivation.drv_path in clustered,
        "timeout_secs": derivation.timeout_secs,
        "max_silent_secs": derivation.max_silent_secs,
        "now": now,
    }


def _store_preferences(work: Work, derivations: Sequence[Derivation], stored: dict[str, int]) -> None:
    if not derivations:
        return
    parameters = {"derivations": sql.array(work.connection, [stored[d.drv_path] for d in derivations])}
    present = {
        row[0]: (row[1], row[2], bool(row[3])) for row in sql.run(work.connection, _PREFERENCES, parameters)
    }
    changed = [
        {
            "id": stored[d.drv_path],
            "timeout_secs": d.timeout_secs,
            "max_silent_secs": d.max_silent_secs,
            "prefer_local": d.prefer_local,
        }
        for d in derivations
        if present[stored[d.drv_path]] != (d.timeout_secs, d.max_silent_secs, d.prefer_local)
    ]
    sql.run_many(work.connection, _SET_PREFERENCES, changed)
