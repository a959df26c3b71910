"""Numbered reports: order, window, resume, refusal."""

import pytest
import trio
import trio.testing
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages.common import Message
from gradient_protocol.messages.shapes import EvalStats
from gradient_protocol.messages.worker import ClusterSignalReport, JobCompleted, JobFailed
from gradient_worker.executor.reporter import Reporter

STATS = EvalStats(derivations=0, known=0, wall_ms=0, cpu_ms=0)


class Journal:
    def __init__(self) -> None:
        self.kept: dict[int, Message] = {}
        self.acknowledged_seq = 0
        self.send_ids: dict[str, int] = {}

    def report(self, assignment_id: str, seq: int, message: Message, send_id: str | None = None) -> None:
        self.kept[seq] = message
        if send_id is not None:
            self.send_ids[send_id] = seq

    def acknowledged(self, assignment_id: str, seq: int) -> None:
        self.acknowledged_seq = seq


def reporter(journal: Journal | None = None) -> Reporter:
    return Reporter("a", journal or Journal(), lambda: None)


def completed(seq: int) -> JobCompleted:
    return JobCompleted(assignment_id="a", seq=seq, spans=[], spans_dropped=0)


def failed(seq: int) -> JobFailed:
    return JobFailed(
        assignment_id="a",
        seq=seq,
        kind=FailureKind.PERMANENT,
        error="refused",
        missing_paths=[],
        spans=[],
        spans_dropped=0,
    )


def sent(made: Reporter, *, log_first: bool = False) -> list[int]:
    numbers = []
    while (message := made.due(log_first=log_first)) is not None:
        numbers.append(message.seq)  # type: ignore[attr-defined]  # every report has one
    return numbers


async def test_reports_are_journalled_numbered_and_sent_once() -> None:
    journal = Journal()
    made = reporter(journal)
    await made.report(STATS)
    await made.report(STATS)
    made.finish(completed)
    assert list(journal.kept) == [1, 2, 3]
    assert sent(made) == [1, 2, 3]
    assert sent(made) == []
    assert made.final_sent
    made.acknowledge(3)
    assert made.final_acknowledged
    assert journal.acknowledged_seq == 0, "the whole assignment is forgotten instead"


async def test_a_final_report_waits_for_the_log() -> None:
    made = reporter()
    await made.report(STATS)
    made.finish(completed)
    assert sent(made, log_first=True) == [1]
    assert sent(made) == [2]


async def test_at_most_eight_are_on_their_way_and_the_maker_waits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    made = reporter()
    for _ in range(8):
        await made.report(STATS)
    with trio.move_on_after(1) as scope:
        await made.report(STATS)
    assert scope.cancelled_caught
    made.finish(completed)
    assert sent(made) == [1, 2, 3, 4, 5, 6, 7, 8]
    made.acknowledge(1)
    assert sent(made) == [9]


async def test_a_resume_sends_again_what_the_server_has_not() -> None:
    made = reporter()
    for _ in range(3):
        await made.report(STATS)
    assert sent(made) == [1, 2, 3]
    made.resume(1)
    assert sent(made) == [2, 3]
    assert made.acknowledged == 1


async def test_a_stale_acknowledgement_changes_nothing() -> None:
    journal = Journal()
    made = reporter(journal)
    await made.report(STATS)
    await made.report(STATS)
    sent(made)
    made.acknowledge(2)
    made.acknowledge(1)
    assert made.acknowledged == journal.acknowledged_seq == 2


async def test_a_refused_report_takes_what_follows_with_it() -> None:
    journal = Journal()
    made = reporter(journal)
    for _ in range(3):
        await made.report(STATS)
    made.finish(completed)
    sent(made)
    assert made.refuse(2, failed)
    assert [message.seq for message in made.pending] == [1, 2]  # type: ignore[attr-defined]  # reports
    assert isinstance(journal.kept[2], JobFailed)
    assert sent(made) == [2]
    made.acknowledge(2)
    assert made.final_acknowledged


async def test_a_refusal_of_what_does_not_wait_is_ignored() -> None:
    made = reporter()
    await made.report(STATS)
    assert not made.refuse(7, failed)
    assert not made.finished


async def test_there_is_one_final_report() -> None:
    made = reporter()
    made.finish(completed)
    with pytest.raises(RuntimeError):
        made.finish(completed)


async def test_what_an_earlier_agent_left_is_sent() -> None:
    made = Reporter("a", Journal(), lambda: None, acknowledged=4, pending=((5, failed(5)),))
    assert made.finished
    assert sent(made) == [5]


async def test_a_stopped_job_reports_nothing_more() -> None:
    made = reporter()
    with trio.CancelScope() as scope:
        scope.cancel()
        await made.report(STATS)
    assert made.pending == ()


def a_signal(seq: int) -> ClusterSignalReport:
    return ClusterSignalReport(assignment_id="a", seq=seq, attempt="x", topic="t", payload=b"")


async def test_all_who_wait_for_room_get_it(nursery: trio.Nursery) -> None:
    journal = Journal()
    reports = reporter(journal)

    async def send(name: str) -> None:
        await reports.room_for_signal()
        reports.signal(name, a_signal)

    for number in range(20):
        nursery.start_soon(send, str(number))
    for seq in (3, 11, 12):
        await trio.testing.wait_all_tasks_blocked()
        assert len(reports.pending) == 8
        reports.acknowledge(seq)
    await trio.testing.wait_all_tasks_blocked()
    assert sorted(journal.send_ids.values()) == list(range(1, 21))
    assert len(reports.pending) == 8


async def test_a_signal_never_follows_the_final_report() -> None:
    reports = reporter()
    for number in range(8):
        reports.signal(str(number), a_signal)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reports.room_for_signal)
        await trio.testing.wait_all_tasks_blocked()
        reports.finish(completed)
    assert reports.signal("late", a_signal) is None
    assert reports.pending[-1] == completed(9)
