"""The wishes of evaluations (`build_job`): taking them back, and who is left."""

from collections.abc import Sequence

from gradient_server.domain.events import AbortWanted
from gradient_server.domain.status import AbortReason, BuildStatus
from gradient_server.graph import sql
from gradient_server.graph.progress import abort_builds, announce_queued
from gradient_server.graph.work import Work

__all__ = ["drop_wishes", "is_wanted", "request_aborts"]

_DROP = sql.statement(
    "UPDATE build_job SET outcome = 'Aborted', finished_at = :now WHERE evaluation = :evaluation"
    " AND outcome IS NULL RETURNING build"
)
_STATES = sql.statement(
    "SELECT b.id, b.status, EXISTS (SELECT 1 FROM build_job j WHERE j.build = b.id AND j.outcome IS NULL)"
    " FROM derivation_build b WHERE b.id IN [ids] AND b.finished_at IS NULL ORDER BY b.id"
)
_IS_WANTED = sql.statement("SELECT 1 FROM build_job WHERE build = :build AND outcome IS NULL LIMIT 1")
_OPEN_OF_BUILDS = sql.statement(
    "SELECT id FROM dispatched_job WHERE derivation_build IN [ids] AND finished_at IS NULL ORDER BY id"
)
_OPEN_ATTEMPTS = sql.statement(
    "SELECT a.id, a.cluster_attempt FROM dispatched_job a WHERE a.id IN [ids] AND a.finished_at IS NULL"
    " AND a.cluster_attempt IS NOT NULL ORDER BY a.id"
)
_UNWANTED = (AbortReason.USER, AbortReason.EVALUATION)
# A person's wish to end it is never weakened by what the server wants for its own reasons later.
_STORE_ABORT = sql.statement(
    "UPDATE dispatched_job SET abort_reason = :reason, abort_requested_at = :now WHERE id IN [ids]"
    " AND finished_at IS NULL AND held_report IS NULL"
    " AND (abort_reason IS NULL OR abort_reason NOT IN ('User', 'Evaluation')) RETURNING id, worker"
)


def is_wanted(work: Work, build: str) -> bool:
    """Whether an evaluation still waits for this build."""
    return bool(sql.run(work.connection, _IS_WANTED, {"build": build}))


def drop_wishes(work: Work, evaluation: str, error: str) -> None:
    """Takes back what an evaluation still waits for; what nobody else wants is aborted."""
    parameters = {"evaluation": evaluation, "now": work.now}
    dropped = sorted({row[0] for row in sql.run(work.connection, _DROP, parameters)})
    if not dropped:
        return
    rows = sql.run(work.connection, _STATES, {"ids": sql.array(work.connection, dropped)})
    unwanted = [build for build, _, wanted in rows if not wanted]
    moved = set(abort_builds(work, unwanted, error=error))
    running = [build for build in unwanted if build not in moved]
    if running:
        opened = sql.run(work.connection, _OPEN_OF_BUILDS, {"ids": sql.array(work.connection, running)})
        request_aborts(work, [row[0] for row in opened], AbortReason.EVALUATION, error)
    # Those who go on are wanted by fewer projects now.
    announce_queued(
        work, [build for build, status, wanted in rows if wanted and status == BuildStatus.QUEUED]
    )


def request_aborts(work: Work, assignments: Sequence[str], reason: AbortReason, text: str) -> None:
    """Stores the abort of open assignments, for the workers to be told after the commit.

    A member whose job nobody wants any more takes its whole attempt along, at the end of the
    transaction (aftermath.py); for the server's own reasons it is a member that fails.
    """
    if not assignments:
        return
    if reason in _UNWANTED:
        assignments = _set_attempts_aside(work, assignments, text)
    parameters = {
        "ids": sql.array(work.connection, assignments),
        "reason": reason.value,
        "now": work.now,
    }
    for assignment, worker in sorted(sql.run(work.connection, _STORE_ABORT, parameters)):
        work.events.append(AbortWanted(assignment, worker, reason, text))


def _set_attempts_aside(work: Work, assignments: Sequence[str], text: str) -> list[str]:
    members = dict(sql.run(work.connection, _OPEN_ATTEMPTS, {"ids": sql.array(work.connection, assignments)}))
    for attempt in members.values():
        work.attempts_to_abort.setdefault(attempt, text)
    return [assignment for assignment in assignments if assignment not in members]
