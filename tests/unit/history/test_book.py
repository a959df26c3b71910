"""The book of histories: what it wants, when, and for whom."""

import pytest
from gradient_protocol.kinds import EvalStep
from gradient_server.history import book as module
from gradient_server.history.book import HistoryBook, history_key
from gradient_server.scoring.contexts import HistoryPrediction

from tests.fakes.scheduler import build, evaluation

SMALL = HistoryPrediction(peak_ram_mb=100.0, samples=3)
LARGE = HistoryPrediction(peak_ram_mb=900.0, samples=3)


def test_jobs_of_one_name_and_architecture_want_one_key() -> None:
    book = HistoryBook()
    jobs = [
        build("a", pname="tool"),
        build("b", pname="tool"),
        build("tool"),
        build("c", pname="tool", system="arm"),
    ]
    assert [book.look(job) for job in jobs] == [None] * 4
    assert [(key.name, key.architecture) for key in book.take_wanted(9)] == [("tool", "any"), ("tool", "arm")]
    assert book.take_wanted(9) == []
    changed = book.put({history_key(jobs[0]): SMALL})
    assert changed == [("build:a", SMALL), ("build:b", SMALL), ("build:tool", SMALL)]
    assert book.look(build("d", pname="tool")) is SMALL


def test_evaluations_of_a_task_are_apart_by_what_they_do() -> None:
    whole = evaluation("a", task="t")
    cached = evaluation("b", task="t", steps=(EvalStep.EVALUATE,))
    assert history_key(whole) != history_key(cached)


def test_the_end_of_a_run_refreshes_those_that_wait_and_marks_the_rest() -> None:
    book = HistoryBook()
    woken: list[None] = []
    book.wake = lambda: woken.append(None)
    first, second = build("a", pname="tool"), build("b", pname="tool")
    book.look(first)
    book.put(dict.fromkeys(book.take_wanted(9), SMALL))
    book.forget(first)
    book.ended(first)
    # Nobody waits: nothing is loaded for nobody.
    book.want_outdated()
    assert book.take_wanted(9) == []
    # Used at once, and looked at again.
    assert book.look(second) is SMALL
    [key] = book.take_wanted(9)
    assert book.put({key: LARGE}) == [("build:b", LARGE)]
    # What ends is gathered; of what stays the same nobody is told.
    book.ended(first)
    assert book.take_wanted(9) == []
    book.want_outdated()
    assert book.take_wanted(9) == [key]
    assert book.put({key: LARGE}) == []
    assert len(woken) == 3


def test_after_the_first_run_of_a_name_the_next_job_waits_for_what_it_measured() -> None:
    book = HistoryBook()
    first, waits = build("tool-1", pname="tool"), build("tool-2", pname="tool")
    unmeasured = HistoryPrediction()
    for job in (first, waits):
        book.look(job)
    [key] = book.take_wanted(9)
    book.put({key: unmeasured})
    book.forget(first)
    book.ended(first)
    # What waits already goes on as it is, and is told within a second; what comes is told first.
    assert book.look(build("tool-3", pname="tool")) is None
    assert book.take_wanted(9) == [key]
    assert book.put({key: SMALL}) == [("build:tool-2", SMALL), ("build:tool-3", SMALL)]
    # The first row may be of a build that measured nothing: nobody waits for ever.
    book.put({key: unmeasured})
    book.ended(first)
    assert book.look(build("tool-4", pname="tool")) is None
    assert ("build:tool-4", unmeasured) in book.put(dict.fromkeys(book.take_wanted(9), unmeasured))


def test_what_could_not_be_loaded_goes_on_without_and_is_tried_again_later() -> None:
    book = HistoryBook()
    job = build("a")
    book.look(job)
    [(job_id, prediction)] = book.missed(book.take_wanted(9))
    assert (job_id, prediction.samples) == ("build:a", 0)
    assert book.take_wanted(9) == []
    assert book.look(build("a")) is prediction
    assert len(book.take_wanted(9)) == 1


def test_a_failed_refresh_keeps_what_was_known() -> None:
    book = HistoryBook()
    job = build("a")
    book.look(job)
    book.put(dict.fromkeys(book.take_wanted(9), SMALL))
    book.ended(job)
    book.want_outdated()
    assert book.missed(book.take_wanted(9)) == []
    assert book.look(job) is SMALL


def test_batches_and_what_is_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 5)
    book = HistoryBook()
    for number in range(20):
        book.look(build(f"b{number}"))
    assert [key.name for key in book.take_wanted(3)] == ["b0", "b1", "b2"]
    book.put(dict.fromkeys(book.take_wanted(99), SMALL))
    assert len(book) == 5


def test_a_job_that_is_gone_is_not_told() -> None:
    book = HistoryBook()
    job = build("a")
    book.look(job)
    book.forget(job)
    book.forget(job)
    assert book.put(dict.fromkeys(book.take_wanted(9), SMALL)) == []


def test_new_durations_concern_evaluations_alone() -> None:
    book = HistoryBook()
    book.look(build("a"))
    book.look(evaluation("e", task="t"))
    book.put(dict.fromkeys(book.take_wanted(9), SMALL))
    book.outdate_evaluations()
    book.want_outdated()
    assert [key.name for key in book.take_wanted(9)] == ["t"]
