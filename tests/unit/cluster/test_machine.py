"""One attempt, event by event: what the tables allow, and nothing else."""

from pathlib import Path

import pytest
from gradient_server.cluster import events as e
from gradient_server.cluster import instructions as i
from gradient_server.cluster.machine import AttemptMachine, IllegalEventError
from gradient_server.cluster.states import AttemptState, Seat, attempt_diagram, member_diagram
from gradient_server.cluster.verdict import Verdict

DOCS = Path(__file__).parents[3] / "docs" / "clusters.md"


def prepared() -> AttemptMachine:
    machine = AttemptMachine("t", ["a", "b"])
    assert machine.begin() == [i.PersistClaim()]
    machine.handle(e.Claimed())
    return machine


def running() -> AttemptMachine:
    machine = prepared()
    machine.handle(e.Accepted("a"))
    machine.handle(e.Accepted("b"))
    machine.handle(e.StartCommitted())
    return machine


def test_a_claim_that_is_won_sends_every_member_and_starts_the_timer() -> None:
    machine = AttemptMachine("t", ["a", "b"])
    assert machine.handle(e.Claimed()) == [
        i.SendAssign("a"),
        i.SendAssign("b"),
        i.StartTimer(i.Timer.PREPARE),
    ]


def test_a_claim_that_is_lost_frees_every_seat_as_if_nothing_had_been() -> None:
    machine = AttemptMachine("t", ["a", "b"])
    assert machine.handle(e.ClaimLost()) == [
        i.Release("a", unsent=True),
        i.Release("b", unsent=True),
        i.Finish(i.Ending.CLAIM_LOST, "the claim was lost"),
    ]
    assert machine.state is AttemptState.OVER


def test_the_last_acceptance_stores_the_start_and_only_its_commit_tells_the_members() -> None:
    machine = prepared()
    assert machine.handle(e.Accepted("a")) == []
    assert machine.handle(e.Accepted("b")) == [i.StopTimer(), i.PersistStart()]
    assert machine.handle(e.StartCommitted()) == [i.SendStart("a"), i.SendStart("b")]


@pytest.mark.parametrize(
    "event",
    [
        e.Rejected("b", "no"),
        e.ReportStored("b"),
        e.Disconnected("b"),
        e.MemberLost("b", "gone"),
        e.PrepareTimedOut(),
    ],
)
def test_whatever_spoils_a_prepare_closes_it_first_and_then_tells_every_member(event: e.Event) -> None:
    machine = prepared()
    machine.handle(e.Accepted("a"))
    first = machine.handle(event)
    assert first[0] == i.StopTimer()
    assert [type(one) for one in first] == [i.StopTimer, i.PersistPrepareFailed]
    assert machine.handle(e.PrepareClosed()) == [
        i.SendAbort("a", machine.reason),
        i.SendAbort("b", machine.reason),
        i.Release("a", unsent=False),
        i.Release("b", unsent=False),
        i.StopTimer(),
        i.Finish(i.Ending.PREPARE_FAILED, machine.reason),
    ]


def test_a_member_that_fell_out_while_the_claim_was_written_is_told_to_nobody() -> None:
    machine = AttemptMachine("t", ["a", "b"])
    machine.handle(e.Disconnected("a"))
    assert machine.handle(e.Claimed()) == [
        i.StopTimer(),
        i.PersistPrepareFailed("a member's worker lost its connection"),
    ]
    closed = machine.handle(e.PrepareClosed())
    assert not [one for one in closed if isinstance(one, i.SendAbort)]
    assert i.Release("b", unsent=True) in closed


def test_an_abort_while_the_claim_is_written_ends_it_without_a_word() -> None:
    for result in (e.Claimed(), e.ClaimLost()):
        machine = AttemptMachine("t", ["a", "b"])
        assert machine.handle(e.ClosedElsewhere("aborted")) == []
        assert machine.handle(result)[-1] == i.Finish(i.Ending.FINAL, "aborted")


def test_a_cancel_in_the_middle_of_a_prepare_frees_every_known_hold_at_once() -> None:
    machine = prepared()
    machine.handle(e.Accepted("a"))
    out = machine.handle(e.ClosedElsewhere("aborted"))
    assert {one for one in out if isinstance(one, i.SendAbort)} == {
        i.SendAbort("a", "aborted"),
        i.SendAbort("b", "aborted"),
    }
    assert out[-1] == i.Finish(i.Ending.FINAL, "aborted")


def test_a_broken_connection_while_the_start_is_written_ends_nothing() -> None:
    machine = prepared()
    machine.handle(e.Accepted("a"))
    machine.handle(e.Accepted("b"))
    assert machine.handle(e.Disconnected("a")) == []
    assert machine.handle(e.StartCommitted()) == [i.SendStart("a"), i.SendStart("b")]


def test_a_hold_that_expired_after_the_start_was_stored_is_weighed_like_any_failure() -> None:
    machine = prepared()
    machine.handle(e.Accepted("a"))
    machine.handle(e.Accepted("b"))
    assert machine.handle(e.ReportStored("b")) == []
    assert machine.handle(e.StartCommitted()) == [i.SendStart("a"), i.PersistVerdict(())]


def test_a_start_that_was_not_committed_fails_the_prepare() -> None:
    machine = prepared()
    machine.handle(e.Accepted("a"))
    machine.handle(e.Accepted("b"))
    assert machine.handle(e.StartLost()) == [i.PersistPrepareFailed("the start was not committed")]


def test_reports_that_arrive_while_one_is_weighed_are_weighed_after_it() -> None:
    machine = running()
    assert machine.handle(e.ReportStored("a")) == [i.PersistVerdict(())]
    assert machine.handle(e.MemberLost("b", "gone")) == []
    assert machine.handle(e.Undecided()) == [i.PersistVerdict((("b", "gone"),))]


def test_a_member_whose_report_is_stored_can_no_longer_be_lost() -> None:
    machine = running()
    machine.handle(e.ReportStored("a"))
    assert machine.handle(e.MemberLost("a", "gone")) == []
    assert machine.seats["a"] is Seat.REPORTED


def test_a_retry_waits_for_every_survivor() -> None:
    machine = running()
    machine.handle(e.ReportStored("a"))
    assert machine.handle(e.Settled(Verdict.RETRY)) == [
        i.SendAbort("b", machine.reason),
        i.Release("a", unsent=False),
        i.Release("b", unsent=False),
        i.StartTimer(i.Timer.SURVIVORS),
    ]
    assert machine.handle(e.ReportStored("b")) == [
        i.StopTimer(),
        i.PersistSurvivorsEnded(),
        i.Finish(i.Ending.RETRY, machine.reason),
    ]


def test_survivors_of_an_attempt_that_was_closed_before_are_waited_for() -> None:
    machine, first = AttemptMachine.stopping("attempt", {"a": Seat.ENDED, "b": Seat.STOPPING})
    assert first == [i.StartTimer(i.Timer.SURVIVORS)]
    assert machine.handle(e.ReportStored("a")) == []
    assert machine.handle(e.MemberLost("b", "dropped at the resume")) == [
        i.StopTimer(),
        i.PersistSurvivorsEnded(),
        i.Finish(i.Ending.RETRY, machine.reason),
    ]
    assert machine.state is AttemptState.OVER


def test_a_retry_without_survivors_tells_nobody_of_them() -> None:
    machine = running()
    machine.handle(e.ReportStored("a"))
    machine.handle(e.ReportStored("b"))
    assert not any(
        isinstance(one, i.PersistSurvivorsEnded) for one in machine.handle(e.Settled(Verdict.RETRY))
    )


def test_a_survivor_that_says_nothing_is_given_up() -> None:
    machine = running()
    machine.handle(e.ReportStored("a"))
    machine.handle(e.Settled(Verdict.RETRY))
    assert machine.handle(e.SurvivorsTimedOut())[-1] == i.Finish(i.Ending.RETRY, machine.reason)


def test_results_of_what_was_under_way_when_another_closed_it_change_nothing() -> None:
    machine = prepared()
    machine.handle(e.Accepted("a"))
    machine.handle(e.Accepted("b"))
    machine.handle(e.ClosedElsewhere("aborted"))
    assert machine.handle(e.StartCommitted()) == []
    assert machine.handle(e.ClosedElsewhere("again")) == []
    assert machine.reason == "aborted"


def test_an_event_that_the_tables_do_not_allow_raises_with_the_story_and_changes_nothing() -> None:
    machine = prepared()
    machine.handle(e.Accepted("a"))
    before = (machine.state, dict(machine.seats))
    with pytest.raises(IllegalEventError, match="Accepted"):
        machine.handle(e.StartCommitted())
    with pytest.raises(IllegalEventError):
        machine.handle(e.Accepted("nobody"))
    assert (machine.state, machine.seats) == before


def test_an_attempt_that_is_taken_up_again_weighs_what_is_stored() -> None:
    machine, out = AttemptMachine.recovered("t", {"a": Seat.REPORTED, "b": Seat.RUNNING})
    assert out == [i.PersistVerdict(())]
    assert machine.started
    _, out = AttemptMachine.recovered("t", {"a": Seat.RUNNING, "b": Seat.RUNNING})
    assert out == []


@pytest.mark.parametrize("diagram", [attempt_diagram, member_diagram])
def test_the_diagrams_of_the_documentation_are_those_of_the_tables(diagram: object) -> None:
    assert callable(diagram)
    assert diagram() in DOCS.read_text()
