"""Ingest: a batch of the graph, as an evaluation streams it.

The derivations are stored (stored.py); then every one of the batch, and of what an evaluator left out
because the server knew it, becomes a wish of the evaluation (`build_job`) and is served by a shared
build: the derivation's current one, or a new one where the last ended otherwise than by success. A
build that succeeded stays done while the server holds its outputs, and is made again else.
"""

from collections.abc import Sequence

from gradient_protocol.kinds import NoteLevel
from gradient_protocol.messages.shapes import Derivation, EvalResult, Note

from gradient_server.domain.events import BuildChanged, NoteAdded
from gradient_server.domain.status import BuildStatus
from gradient_server.graph import sql
from gradient_server.graph.clusters import (
    ClusterRefusedError,
    finished_helpers,
    refuse_needed_helpers,
    run_failed_again,
    store_clusters,
)
from gradient_server.graph.content import check_batch
from gradient_server.graph.progress import advance, announce_queued, reset_builds
from gradient_server.graph.stored import check_inputs, find_derivations, store_derivations
from gradient_server.graph.work import Work

__all__ = ["ingest_batch"]

_MAX_NOTE_CHARACTERS = 64 * 1024

# Below a derivation that is a wish of this evaluation already, everything is.
_UNWISHED = sql.statement(
    "WITH RECURSIVE want(id) AS (SELECT d.id FROM derivation d WHERE d.id IN [derivations] AND NOT EXISTS"
    "  (SELECT 1 FROM build_job j WHERE j.evaluation = :evaluation AND j.derivation = d.id)"
    " UNION SELECT e.dependency FROM want JOIN derivation_dependency e ON e.derivation ="
    " want.id WHERE NOT EXISTS"
    "  (SELECT 1 FROM build_job j WHERE j.evaluation = :evaluation AND j.derivation = e.dependency))"
    " SELECT id FROM want ORDER BY id"
)
_CURRENT_BUILDS = sql.statement(
    "SELECT b.derivation, b.id, b.status, d.name FROM derivation_build b JOIN derivation d"
    " ON d.id = b.derivation"
    " WHERE b.derivation IN [derivations] AND b.status IN ('Created', 'Queued', 'Assigned', 'Completed')"
)
_LOST_OUTPUTS = sql.statement(
    "SELECT DISTINCT b.id FROM derivation_build b JOIN derivation_output o ON o.derivation = b.derivation"
    " WHERE b.id IN [ids] AND b.status = 'Completed'"
    " AND NOT EXISTS (SELECT 1 FROM cached_path p WHERE p.path = o.path) ORDER BY b.id"
)
_NEW_BUILD = sql.statement(
    "INSERT INTO derivation_build (id, derivation, status, prioritized, build_request, ifd,"
    " created_at, attempts,"
    " inputs_unavailable_loops, substitute_misses, oom_retries, substituted)"
    " VALUES (:id, :derivation, 'Created', FALSE, FALSE, FALSE, :now, 0, 0, 0, 0, FALSE)"
)
_WISH = sql.statement(
    "INSERT INTO build_job (evaluation, derivation, build, outcome, finished_at)"
    " VALUES (:evaluation, :derivation, :build, :outcome, :finished_at) ON CONFLICT DO NOTHING"
)
_MARK_ATTR = sql.statement(
    "UPDATE build_job SET attr = :attr WHERE evaluation = :evaluation AND derivation = :derivation"
)
_RAISE = sql.statement(
    "UPDATE derivation_build SET prioritized = prioritized OR :prioritized,"
    " build_request = build_request OR :build_request WHERE id IN [ids] AND finished_at IS NULL",
    "UPDATE derivation_build SET prioritized = prioritized OR CAST(:prioritized AS BOOLEAN),"
    " build_request = build_request OR CAST(:build_request AS BOOLEAN) WHERE id IN [ids] AND"
    " finished_at IS NULL",
)
_EVALUATION = sql.statement(
    "SELECT prioritized, build_request, project FROM evaluation WHERE id = :evaluation"
)
_NAMES = sql.statement("SELECT id, name FROM derivation WHERE id IN [derivations]")
_NOTE = sql.statement(
    "INSERT INTO evaluation_note (evaluation, level, source, message) VALUES (:evaluation,"
    " :level, :source, :message)"
)

# What refuses a cluster is asked of the rows that the batch has made.
_SAVE = sql.statement("SAVEPOINT batch")
_UNDO = sql.statement("ROLLBACK TO SAVEPOINT batch")
_RELEASE = sql.statement("RELEASE SAVEPOINT batch")


def ingest_batch(work: Work, evaluation: str, batch: EvalResult) -> str | None:
    """Stores one batch of `evaluation`. The reason if its content is refused; nothing is written then."""
    sql.lock_graph(work.connection)
    reason = check_batch(batch)
    if reason is not None:
        return reason
    paths = {derivation.drv_path for derivation in batch.derivations}
    paths.update(wanted.drv_path for derivation in batch.derivations for wanted in derivation.inputs)
    stored = find_derivations(work, sorted(paths))
    reason = check_inputs(work, batch.derivations, stored)
    if reason is not None:
        return reason
    sql.run(work.connection, _SAVE)
    published = len(work.events)
    ids = store_derivations(work, batch.derivations, stored, members=_members(batch))
    try:
        _wish(work, evaluation, batch, ids)
    except ClusterRefusedError as refused:
        sql.run(work.connection, _UNDO)
        sql.run(work.connection, _RELEASE)
        del work.events[published:]
        return str(refused)
    sql.run(work.connection, _RELEASE)
    _note(work, evaluation, NoteLevel.WARNING, batch.warnings)
    _note(work, evaluation, NoteLevel.ERROR, batch.errors)
    return None


def _members(batch: EvalResult) -> set[str]:
    return {member.drv_path for cluster in batch.clusters for member in cluster.members}


def _wish(work: Work, evaluation: str, batch: EvalResult, ids: dict[str, int]) -> None:
    parameters = {
        "evaluation": evaluation,
        "derivations": sql.array(work.connection, [ids[d.drv_path] for d in batch.derivations]),
    }
    wanted = [row[0] for row in sql.run(work.connection, _UNWISHED, parameters)]
    again = run_failed_again(work, wanted)
    current = _current_builds(work, wanted)
    ended = finished_helpers(work, [derivation for derivation in wanted if derivation not in current])
    current.update(ended)
    created = _new_builds(work, [derivation for derivation in wanted if derivation not in current])
    lost = _lost_outputs(
        work, [build for build, status in current.values() if status == BuildStatus.COMPLETED]
    )
    done = set(ended)
    done.update(
        derivation
        for derivation, (build, status) in current.items()
        if status == BuildStatus.COMPLETED and build not in lost
    )
    _store_wishes(work, evaluation, wanted, {**current, **created}, done)
    _mark_attrs(work, evaluation, batch.derivations, ids)
    prioritized, build_request, project = sql.run(work.connection, _EVALUATION, parameters)[0]
    builds = [build for build, _ in (*current.values(), *created.values())]
    raised = {
        "ids": sql.array(work.connection, builds),
        "prioritized": bool(prioritized),
        "build_request": bool(build_request),
    }
    sql.run(work.connection, _RAISE, raised)
    # Before any build is queued: a member must never be seen as a job of its own.
    again += store_clusters(work, project, batch.clusters, ids)
    refuse_needed_helpers(work, [ids[d.drv_path] for d in batch.derivations], batch.clusters, ids)
    again += reset_builds(work, [build for build in lost if build not in again])
    _announce(work, evaluation, {**current, **created})
    joined = [build for build, status in current.values() if status == BuildStatus.QUEUED]
    announce_queued(work, joined)
    waiting = [build for build, status in current.values() if status == BuildStatus.CREATED]
    advance(work, [*(build for build, _ in created.values()), *waiting, *again])


def _current_builds(work: Work, derivations: Sequence[int]) -> dict[int, tuple[str, str]]:
    if not derivations:
        return {}
    parameters = {"derivations": sql.array(work.connection, derivations)}
    rows = sql.run(work.connection, _CURRENT_BUILDS, parameters)
    return {row[0]: (row[1], row[2]) for row in rows}


def _new_builds(work: Work, derivations: Sequence[int]) -> dict[int, tuple[str, str]]:
    created = {derivation: (work.ids.new(), BuildStatus.CREATED.value) for derivation in derivations}
    rows = [{"id": build, "derivation": d, "now": work.now} for d, (build, _) in created.items()]
    sql.run_many(work.connection, _NEW_BUILD, rows)
    return created


def _lost_outputs(work: Work, builds: Sequence[str]) -> list[str]:
    if not builds:
        return []
    parameters = {"ids": sql.array(work.connection, builds)}
    return [row[0] for row in sql.run(work.connection, _LOST_OUTPUTS, parameters)]


def _store_wishes(
    work: Work,
    evaluation: str,
    wanted: Sequence[int],
    builds: dict[int, tuple[str, str]],
    done: set[int],
) -> None:
    rows = []
    for derivation in wanted:
        is_done = derivation in done
        rows.append(
            {
                "evaluation": evaluation,
                "derivation": derivation,
                "build": builds[derivation][0],
                "outcome": BuildStatus.COMPLETED.value if is_done else None,
                "finished_at": work.now if is_done else None,
            }
        )
    sql.run_many(work.connection, _WISH, rows)


def _mark_attrs(work: Work, evaluation: str, derivations: Sequence[Derivation], ids: dict[str, int]) -> None:
    marked = [
        {"evaluation": evaluation, "derivation": ids[d.drv_path], "attr": d.attr}
        for d in derivations
        if d.attr is not None
    ]
    sql.run_many(work.connection, _MARK_ATTR, marked)


def _announce(work: Work, evaluation: str, builds: dict[int, tuple[str, str]]) -> None:
    names = sql.run(work.connection, _NAMES, {"derivations": sql.array(work.connection, list(builds))})
    for derivation, name in names:
        build, status = builds[derivation]
        work.events.append(BuildChanged(build, (evaluation,), name, status))


def _note(work: Work, evaluation: str, level: NoteLevel, notes: Sequence[Note]) -> None:
    rows = [
        {
            "evaluation": evaluation,
            "level": level.value,
            "source": note.source,
            "message": note.message[:_MAX_NOTE_CHARACTERS],
        }
        for note in notes
    ]
    sql.run_many(work.connection, _NOTE, rows)
    for row in rows:
        work.events.append(NoteAdded(evaluation, level.value, str(row["message"]), row["source"]))
