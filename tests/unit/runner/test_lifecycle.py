"""The table of a build's life: every road ends, and no event takes one back."""

import itertools

import pytest
from gradient_worker.runner.lifecycle import Act, Event, IllegalEvent, Phase, step

ORDER = list(Phase)


def test_an_ordinary_life() -> None:
    phase, acts = Phase.RUNNING, []
    for event in (Event.EXITED, Event.EMPTY, Event.HANDED_OVER):
        phase, act = step(phase, event)
        acts.append(act)
    assert phase is Phase.ENDED
    assert acts == [Act.SWEEP, Act.HAND_OVER, Act.FINISH]


def test_who_does_not_end_when_asked_is_killed_until_it_does() -> None:
    phase, acts = Phase.RUNNING, []
    for event in (Event.STOP, Event.STOP, Event.TIMER, Event.TIMER, Event.STOP, Event.EXITED, Event.TIMER):
        phase, act = step(phase, event)
        acts.append(act)
    assert phase is Phase.SWEEPING
    assert acts == [Act.TERMINATE, Act.NOTHING, Act.KILL, Act.KILL, Act.NOTHING, Act.SWEEP, Act.SWEEP]


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, Event)))
def test_no_event_leads_back_and_a_stop_is_always_allowed(phase: Phase, event: Event) -> None:
    try:
        after, _ = step(phase, event)
    except IllegalEvent:
        assert event is not Event.STOP
    else:
        assert ORDER.index(after) >= ORDER.index(phase)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
def test_every_phase_has_a_way_on(phase: Phase) -> None:
    reached = {phase}
    for _ in ORDER:
        for before, event in itertools.product(list(reached), Event):
            try:
                reached.add(step(before, event)[0])
            except IllegalEvent:
                continue
    assert Phase.ENDED in reached


def test_what_is_not_allowed_is_told_with_its_circumstances() -> None:
    with pytest.raises(IllegalEvent, match="a build that is ended cannot take exited"):
        step(Phase.ENDED, Event.EXITED)
