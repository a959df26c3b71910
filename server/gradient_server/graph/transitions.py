"""The transitions of states.py as statements: every change of a stored state in the graph is one of these.

A claim's and its answer's are db/queries/claims.py's, in the same words.
"""

from collections.abc import Sequence

from gradient_server.graph import sql
from gradient_server.graph.states import (
    BuildEvent,
    EvaluationEvent,
    IllegalTransitionError,
    build_sources,
    build_target,
    evaluation_sources,
    evaluation_target,
)
from gradient_server.graph.work import Work

__all__ = ["move_builds", "move_evaluation"]

# What changes with the state itself. Counters, errors and backoff are their callers'.
_BUILD_CHANGES = {
    BuildEvent.READY: "queued_at = COALESCE(queued_at, :now), ready_at = COALESCE(ready_at, :now)",
    BuildEvent.OUTPUTS_HELD: "finished_at = :now, not_before = NULL",
    BuildEvent.SUCCEEDED: "finished_at = :now, not_before = NULL, error = NULL, failure_kind = NULL",
    BuildEvent.FAILED: "finished_at = :now, not_before = NULL",
    BuildEvent.DEPENDENCY_FAILED: "finished_at = :now, not_before = NULL",
    BuildEvent.ABORTED: "finished_at = :now, not_before = NULL",
    BuildEvent.WITHDRAWN: "finished_at = :now, not_before = NULL",
    BuildEvent.RESET: "finished_at = NULL, ready_at = NULL, queued_at = NULL, substituted = FALSE",
    BuildEvent.RELEASED: "not_before = NULL",
    BuildEvent.WAITS_AGAIN: "not_before = NULL",
    BuildEvent.CLAIMED: "not_before = NULL",
}
_EVALUATION_CHANGES = {
    EvaluationEvent.CLAIMED: "not_before = NULL",
    EvaluationEvent.RELEASED: "queued_at = :now",
    EvaluationEvent.FETCHED: "queued_at = :now, ready_at = :now, not_before = NULL",
    EvaluationEvent.WALKED: "walked_at = :now",
    EvaluationEvent.ALL_BUILT: "finished_at = :now",
    EvaluationEvent.FAILED: "finished_at = :now",
    EvaluationEvent.ABORTED: "finished_at = :now",
}


def _words(states: Sequence[str]) -> str:
    return ", ".join(f"'{state}'" for state in states)


_MOVE_BUILDS = {
    event: sql.statement(
        f"UPDATE derivation_build SET status = '{build_target(event)}', {changes}"  # noqa: S608 - own words only
        f" WHERE id IN [ids] AND status IN ({_words(build_sources(event))}) RETURNING id"
    )
    for event, changes in _BUILD_CHANGES.items()
}
_MOVE_EVALUATION = {
    event: sql.statement(
        f"UPDATE evaluation SET status = '{evaluation_target(event)}', last_progress_at = :now, {changes}"  # noqa: S608 - own words only
        f" WHERE id = :id AND status IN ({_words(evaluation_sources(event))}) RETURNING id"
    )
    for event, changes in _EVALUATION_CHANGES.items()
}


def move_builds(work: Work, ids: Sequence[str], event: BuildEvent, *, racing: bool = False) -> list[str]:
    """Moves every build of `ids`; those that moved.

    Raises IllegalTransitionError, and the transaction undoes everything, if one is in another state than
    the table allows; `racing` leaves such a one alone, for where a claim may have been faster.
    """
    if not ids:
        return []
    parameters = {"ids": sql.array(work.connection, ids), "now": work.now}
    moved = [row[0] for row in sql.run(work.connection, _MOVE_BUILDS[event], parameters)]
    if len(moved) < len(ids) and not racing:
        left = sorted(set(ids) - set(moved))
        raise IllegalTransitionError(f"{event.name} is not allowed for the builds {', '.join(left[:10])}")
    return moved


def move_evaluation(work: Work, evaluation: str, event: EvaluationEvent, *, racing: bool = False) -> bool:
    """Moves one evaluation. IllegalTransitionError as `move_builds`; with `racing`, False instead."""
    parameters = {"id": evaluation, "now": work.now}
    if sql.run(work.connection, _MOVE_EVALUATION[event], parameters):
        return True
    if racing:
        return False
    raise IllegalTransitionError(f"{event.name} is not allowed for the evaluation {evaluation}")
