"""The two tables: complete, and closed to everything else."""

import pytest
from gradient_server.domain.status import BuildStatus, EvaluationStatus
from gradient_server.graph.states import (
    BUILD_TRANSITIONS,
    EVALUATION_TRANSITIONS,
    BuildEvent,
    EvaluationEvent,
    IllegalTransitionError,
    next_build_status,
    next_evaluation_status,
)


def test_every_event_has_its_row() -> None:
    assert set(BUILD_TRANSITIONS) == set(BuildEvent)
    assert set(EVALUATION_TRANSITIONS) == set(EvaluationEvent)


def test_every_state_is_reached_and_final_ones_are_left_by_a_reset_alone() -> None:
    reached = {target for _, target in BUILD_TRANSITIONS.values()}
    assert reached == set(BuildStatus)
    leaving = {
        (event, status)
        for event, (sources, _) in BUILD_TRANSITIONS.items()
        for status in sources
        if status.is_final
    }
    assert leaving == {(BuildEvent.RESET, BuildStatus.COMPLETED)}
    for sources, _ in EVALUATION_TRANSITIONS.values():
        assert not any(status.is_final for status in sources)


@pytest.mark.parametrize("status", list(BuildStatus))
@pytest.mark.parametrize("event", list(BuildEvent))
def test_a_build_takes_what_the_table_allows_and_nothing_else(status: BuildStatus, event: BuildEvent) -> None:
    sources, target = BUILD_TRANSITIONS[event]
    if status in sources:
        assert next_build_status(status, event) is target
    else:
        with pytest.raises(IllegalTransitionError, match=event.name):
            next_build_status(status, event)


@pytest.mark.parametrize("status", list(EvaluationStatus))
def test_an_evaluation_that_ended_takes_nothing(status: EvaluationStatus) -> None:
    for event in EvaluationEvent:
        if status.is_final:
            with pytest.raises(IllegalTransitionError):
                next_evaluation_status(status, event)
    if not status.is_final:
        assert next_evaluation_status(status, EvaluationEvent.ABORTED) is EvaluationStatus.ABORTED
