"""What a transaction on the graph has still to do before it may commit.

Taking back an evaluation's wishes may reach members of open attempts; the end of an attempt may end
evaluations, whose wishes are then taken back. Neither calls the other: each leaves the other's work
in `Work`, and every entry point that may have left some ends by `carry_out`. It ends, because each
step closes an attempt or an evaluation for good.
"""

from gradient_server.domain.events import Event
from gradient_server.graph import sql
from gradient_server.graph.evaluation_endings import evaluation_ended, find_evaluation
from gradient_server.graph.lifting import lower_imported
from gradient_server.graph.states import EvaluationEvent
from gradient_server.graph.verdicts import abort_attempt
from gradient_server.graph.work import Work

__all__ = ["carry_out"]


def carry_out(work: Work) -> list[Event]:
    """Does what is left, and returns all events of the transaction. The caller holds the graph's lock."""
    if work.attempts_to_abort or work.evaluations_to_abort:
        # A completed build holds it shared only; it leaves nothing to do here.
        sql.lock_graph(work.connection)
    while work.attempts_to_abort or work.evaluations_to_abort:
        if work.attempts_to_abort:
            attempt, text = work.attempts_to_abort.popitem()
            abort_attempt(work, attempt, text)
        else:
            evaluation, text = work.evaluations_to_abort.popitem()
            evaluation_ended(work, find_evaluation(work, evaluation), EvaluationEvent.ABORTED, text)
    if work.imports_over:
        # Alone, or of two that end at once each would take the other for waiting.
        sql.lock_graph(work.connection)
        lower_imported(work)
        work.imports_over = False
    return work.events
