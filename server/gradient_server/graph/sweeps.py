"""What no event will come for, found by looking: backstops of rules that transactions hold by themselves.

`abandoned-dispatch-sweep`: open assignments that nobody attends to. The evaluation watchdog: evaluations
that a worker has and does not go on with, and whatever of an open evaluation waits for something that
has come. Members of an open attempt are skipped by both: their attempt's owner decides (cluster-jobs.md,
Recovery). Each `find_*` looks, for a reader; each of the others decides once more and acts.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from gradient_server.domain.status import AbortReason
from gradient_server.graph import sql
from gradient_server.graph.aftermath import carry_out
from gradient_server.graph.assignments import find_open
from gradient_server.graph.endings import lose
from gradient_server.graph.evaluation_endings import evaluation_again, find_evaluation
from gradient_server.graph.evaluations import end_evaluation, settle_evaluations
from gradient_server.graph.progress import advance, movable, release_builds, settle_ended
from gradient_server.graph.states import EvaluationEvent
from gradient_server.graph.wishes import drop_wishes, request_aborts
from gradient_server.graph.work import Work

__all__ = [
    "AbandonedDispatch",
    "StuckJobs",
    "close_abandoned_dispatches",
    "end_stalled_evaluations",
    "find_abandoned_dispatches",
    "find_stalled_evaluations",
    "find_stuck",
    "queued_builds",
    "repair",
]

# A pass takes at most so many of each, the oldest first; the next one takes the others.
_MAX_AT_ONCE = 500
_WINDOW = 2_000

_ALONE = "a.finished_at IS NULL AND a.held_report IS NULL AND a.cluster_attempt IS NULL"
_OWNERLESS = "NOT EXISTS (SELECT 1 FROM instance i WHERE i.id = a.instance AND i.succeeded_by IS NULL)"
_OPEN_DISPATCHES = sql.statement(
    f"SELECT a.id, a.worker, {_OWNERLESS} FROM dispatched_job a"  # noqa: S608 - own words only
    f" WHERE {_ALONE} AND a.assigned_at < :before AND (a.instance = :instance OR {_OWNERLESS})"
    " ORDER BY a.id"
)
_IS_OWNERLESS = sql.statement(
    f"SELECT a.id FROM dispatched_job a WHERE a.id IN [ids] AND {_ALONE} AND {_OWNERLESS}"  # noqa: S608 - own words only
)

_STALLED = sql.statement(
    "SELECT v.id, a.id FROM evaluation v JOIN task t ON t.id = v.task"  # noqa: S608 - own words only
    f" JOIN dispatched_job a ON a.evaluation = v.id AND {_ALONE}"
    " WHERE v.finished_at IS NULL AND v.status = 'Assigned' AND a.accepted_at IS NOT NULL"
    " AND a.abort_requested_at IS NULL"
    " AND COALESCE(v.last_progress_at, v.queued_at) < :now - :margin_secs"
    "  - COALESCE(t.evaluation_timeout_secs, :timeout_secs)"
    " AND a.accepted_at < :now - :margin_secs - COALESCE(t.evaluation_timeout_secs, :timeout_secs)"
    " AND NOT EXISTS (SELECT 1 FROM import_request r WHERE r.assignment = a.id AND r.result IS NULL)"
    " ORDER BY v.id LIMIT :many"
)
# A job that counts as a worker's without an assignment that says so.
_LOOSE_EVALUATIONS = sql.statement(
    "SELECT v.id FROM evaluation v WHERE v.finished_at IS NULL AND v.status = 'Assigned' AND NOT EXISTS"
    " (SELECT 1 FROM dispatched_job a WHERE a.evaluation = v.id AND a.finished_at IS NULL)"
    " ORDER BY v.id LIMIT :many"
)
_LOOSE_BUILDS = sql.statement(
    "SELECT b.id FROM derivation_build b WHERE b.finished_at IS NULL AND b.status = 'Assigned' AND NOT EXISTS"
    " (SELECT 1 FROM dispatched_job a WHERE a.derivation_build = b.id AND a.finished_at IS NULL)"
    " ORDER BY b.id LIMIT :many"
)
# A wish that stayed open although its build has ended. CROSS JOIN: SQLite keeps to this order, and begins
# with the few evaluations that are open; by itself it reads every wish there ever was.
_DEAF_WISHES = sql.statement(
    "SELECT DISTINCT j.build FROM evaluation v CROSS JOIN build_job j CROSS JOIN derivation_build b"
    " WHERE v.finished_at IS NULL AND j.evaluation = v.id AND j.outcome IS NULL"
    " AND b.id = j.build AND b.finished_at IS NOT NULL ORDER BY j.build LIMIT :many"
)
_ALL_BUILT = sql.statement(
    "SELECT v.id FROM evaluation v WHERE v.finished_at IS NULL AND v.status = 'Building' AND NOT EXISTS"
    " (SELECT 1 FROM build_job j WHERE j.evaluation = v.id AND j.outcome IS NULL) ORDER BY v.id LIMIT :many"
)
_CREATED = sql.statement(
    "SELECT b.id FROM derivation_build b WHERE b.finished_at IS NULL AND b.status = 'Created'"
    " AND b.id > :above ORDER BY b.id LIMIT :many"
)
_QUEUED = sql.statement(
    "SELECT b.id FROM derivation_build b WHERE b.finished_at IS NULL AND b.status = 'Queued'"
    " AND b.id > :above ORDER BY b.id LIMIT :many"
)


@dataclass(frozen=True, slots=True)
class AbandonedDispatch:
    """An open assignment that may have nobody. `ownerless`: its instance was succeeded, or never was."""

    assignment_id: str
    worker_id: str
    ownerless: bool


@dataclass(slots=True)
class StuckJobs:
    """What waits for something that has come, by what has to be done about it. Ids."""

    evaluations_to_queue: list[str] = field(default_factory=list)
    builds_to_queue: list[str] = field(default_factory=list)
    builds_to_settle: list[str] = field(default_factory=list)
    builds_to_advance: list[str] = field(default_factory=list)
    evaluations_to_end: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(found) for found in self._lists())

    def _lists(self) -> tuple[list[str], ...]:
        return (
            self.evaluations_to_queue,
            self.builds_to_queue,
            self.builds_to_settle,
            self.builds_to_advance,
            self.evaluations_to_end,
        )


def find_abandoned_dispatches(
    connection: sa.Connection, *, instance_id: str, attended: Collection[str], before: float
) -> list[AbandonedDispatch]:
    """Assignments made before `before` (wall time) that no living instance owns, and this instance's whose
    worker is not `attended`: it has neither a session nor a grace.
    """
    rows = sql.run(connection, _OPEN_DISPATCHES, {"instance": instance_id, "before": before})
    found = [AbandonedDispatch(row[0], row[1], bool(row[2])) for row in rows]
    return [one for one in found if one.ownerless or one.worker_id not in attended][:_MAX_AT_ONCE]


def close_abandoned_dispatches(
    work: Work, assignment_ids: Sequence[str], *, instance_id: str, is_attended: Callable[[str], bool]
) -> int:
    """Closes those for which it is still so, as losses; how many."""
    sql.lock_graph(work.connection)
    parameters = {"ids": sql.array(work.connection, assignment_ids)}
    ownerless = {row[0] for row in sql.run(work.connection, _IS_OWNERLESS, parameters)}
    closed = 0
    for assignment in find_open(work, assignment_ids):
        mine = assignment.instance_id == instance_id and not is_attended(assignment.worker_id)
        if assignment.report_held or assignment.cluster_attempt is not None:
            continue
        if mine or assignment.id in ownerless:
            lose(work, assignment, "nobody attended to it any more")
            closed += 1
    carry_out(work)
    return closed


def find_stalled_evaluations(
    connection: sa.Connection, *, now: float, timeout_secs: float, margin_secs: float
) -> dict[str, str]:
    """Evaluations, with their assignments, of which nothing was heard for `margin_secs` longer than they
    may take at all: their worker should have ended them. `timeout_secs` where the task sets none.
    """
    parameters = {
        "now": now,
        "timeout_secs": timeout_secs,
        "margin_secs": margin_secs,
        "many": _MAX_AT_ONCE,
    }
    return dict(sql.run(connection, _STALLED, parameters))


def end_stalled_evaluations(work: Work, *, timeout_secs: float, margin_secs: float) -> int:
    """Fails them, as their timeout would have, and has their workers told; how many."""
    sql.lock_graph(work.connection)
    stalled = find_stalled_evaluations(
        work.connection, now=work.now, timeout_secs=timeout_secs, margin_secs=margin_secs
    )
    error = "nothing was heard of it for longer than it may take: its worker hangs"
    for evaluation, assignment in stalled.items():
        end_evaluation(work, evaluation, EvaluationEvent.FAILED, error=error)
        request_aborts(work, [assignment], AbortReason.EVALUATION, error)
        drop_wishes(work, evaluation, error)
    carry_out(work)
    return len(stalled)


def find_stuck(connection: sa.Connection) -> StuckJobs:
    """All of it, as of one snapshot."""
    many = {"many": _MAX_AT_ONCE}
    stuck = StuckJobs(
        evaluations_to_queue=[row[0] for row in sql.run(connection, _LOOSE_EVALUATIONS, many)],
        builds_to_queue=[row[0] for row in sql.run(connection, _LOOSE_BUILDS, many)],
        builds_to_settle=[row[0] for row in sql.run(connection, _DEAF_WISHES, many)],
        evaluations_to_end=[row[0] for row in sql.run(connection, _ALL_BUILT, many)],
    )
    above = ""
    while len(stuck.builds_to_advance) < _MAX_AT_ONCE:
        rows = sql.run(connection, _CREATED, {"above": above, "many": _WINDOW})
        if not rows:
            break
        above = rows[-1][0]
        stuck.builds_to_advance += movable(connection, [row[0] for row in rows])
    return stuck


def repair(work: Work) -> StuckJobs:
    """Moves on whatever is stuck; what it was."""
    sql.lock_graph(work.connection)
    stuck = find_stuck(work.connection)
    for evaluation in stuck.evaluations_to_queue:
        evaluation_again(work, find_evaluation(work, evaluation), source_lost=False)
    release_builds(work, stuck.builds_to_queue)
    settle_ended(work, stuck.builds_to_settle)
    advance(work, stuck.builds_to_advance)
    settle_evaluations(work, stuck.evaluations_to_end)
    carry_out(work)
    return stuck


def queued_builds(connection: sa.Connection, *, above: str, many: int) -> list[str]:
    """Builds that wait for a worker, by id; the scheduler should know each of them."""
    return [row[0] for row in sql.run(connection, _QUEUED, {"above": above, "many": many})]
