import pytest
from gradient_server.domain.events import BuildChanged, EvaluationChanged, JobUnqueued, LogGrew, NoteAdded
from gradient_server.web.hub import MAX_QUEUED, MAX_WATCHERS, Hub, TooManyWatchersError


def changed(build: str = "b", *evaluations: str) -> BuildChanged:
    return BuildChanged(build, evaluations or ("e",), build, "Queued")


def test_a_watcher_gets_what_concerns_its_evaluation_in_order() -> None:
    hub = Hub()
    with hub.watch("e") as watcher, hub.watch("other") as other:
        shared = changed("b", "e", "other")
        mine = [NoteAdded("e", "warning", "text"), shared, EvaluationChanged("e", "Completed")]
        for event in [*mine, NoteAdded("third", "warning", "text"), JobUnqueued("build:b", "gone")]:
            hub.on_event(event)
        assert watcher.take() == mine
        assert other.take() == [shared]
        assert watcher.take() == []


def test_a_reader_that_lags_behind_loses_the_queue_and_is_told_so() -> None:
    hub = Hub()
    with hub.watch("e") as watcher:
        for _ in range(MAX_QUEUED + 1):
            hub.on_event(changed())
        assert watcher.lost
        assert watcher.take() == []
        hub.on_event(changed())
        assert watcher.take() == [], "nothing is queued before the fresh snapshot"
        watcher.found()
        hub.on_event(changed())
        assert len(watcher.take()) == 1


def test_logs_are_noted_once_for_each_job_that_has_not_ended() -> None:
    hub = Hub()
    with hub.watch("e") as watcher:
        watcher.note_job("build:b", "b-1", ended=False)
        for size in (1, 2, 3):
            hub.on_event(LogGrew("a", "build:b", size))
            hub.on_event(LogGrew("z", "build:of-others", size))
        assert watcher.grown == {"build:b": LogGrew("a", "build:b", 3)}
        watcher.note_job("build:b", "b-1", ended=True)
        assert not watcher.grown


def test_watchers_are_bounded_and_leave_nothing_behind() -> None:
    hub = Hub()
    blocks = [hub.watch(f"e{number}") for number in range(MAX_WATCHERS)]
    for block in blocks:
        block.__enter__()
    with pytest.raises(TooManyWatchersError), hub.watch("one more"):
        pass
    for block in blocks:
        block.__exit__(None, None, None)
    assert hub.count == 0
    assert not hub._watchers


async def test_a_waiting_reader_wakes_up_for_an_event() -> None:
    hub = Hub()
    with hub.watch("e") as watcher:
        hub.on_event(changed())
        await watcher.wait(60.0)  # the test's own limit would end it
        assert len(watcher.take()) == 1
