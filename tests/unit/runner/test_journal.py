"""The journal says after a reopen what it said before, whatever was torn, full or large."""

import errno
import os
from pathlib import Path

import msgpack
import pytest
from gradient_protocol.kinds import ResumeState
from gradient_worker.runner.journal import Journal, JournaledAssignment, JournalFull


def fill(journal: Journal) -> None:
    journal.record_assignment("a", "job-a", b"assign a")
    journal.record_assignment("b", "job-b", b"assign b", held=True)
    journal.record_report("a", 1, b"one")
    journal.record_report("a", 2, b"two")
    journal.record_acknowledged("a", 1)
    journal.record_log_offset("a", 4096)
    journal.record_started("b")
    journal.record_signal_received("b", 5, b"five")
    journal.record_signal_received("b", 6, b"six")
    journal.record_signal_taken("b", 5, "take-1")
    journal.record_report("b", 1, b"signal", "local-1")
    journal.record_assignment("c", "job-c", b"assign c")
    journal.record_report("c", 1, b"final")
    journal.record_finished("c")
    journal.record_assignment("d", "job-d", b"assign d")
    journal.forget("d")


EXPECTED = {
    "a": JournaledAssignment(
        "a", "job-a", b"assign a", ResumeState.RUNNING, acknowledged_seq=1, last_seq=2, log_offset=4096,
        reports={2: b"two"},
    ),
    "b": JournaledAssignment(
        "b", "job-b", b"assign b", ResumeState.RUNNING, last_seq=1, signal_n=6, reports={1: b"signal"},
        signals={6: b"six"}, signals_taken=1, takes={5: "take-1"}, send_ids={"local-1": 1},
    ),
    "c": JournaledAssignment(
        "c", "job-c", b"assign c", ResumeState.DONE, last_seq=1, reports={1: b"final"}
    ),
}  # fmt: skip


def reopened(path: Path) -> dict[str, JournaledAssignment]:
    journal = Journal.open(path)
    try:
        return dict(journal.assignments)
    finally:
        journal.close()


def test_a_reopened_journal_says_the_same(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    fill(journal)
    assert dict(journal.assignments) == EXPECTED
    journal.close()
    assert reopened(tmp_path / "journal") == EXPECTED
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_compaction_changes_nothing_but_the_size(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    fill(journal)
    before = (tmp_path / "journal").stat().st_size
    journal.compact()
    assert (tmp_path / "journal").stat().st_size < before
    journal.record_acknowledged("c", 1)
    journal.close()
    after = reopened(tmp_path / "journal")
    assert after["c"].reports == {}
    assert (after["a"], after["b"]) == (EXPECTED["a"], EXPECTED["b"])


def test_a_torn_tail_is_cut_at_any_byte_and_what_follows_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal.open(path)
    fill(journal)
    journal.close()
    whole = path.read_bytes()
    unpacker = msgpack.Unpacker()
    unpacker.feed(whole)
    ends = [unpacker.tell() for _ in unpacker]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        journal = Journal.open(path)
        good = max((end for end in ends if end <= length), default=0)
        assert journal.cut_bytes == length - good
        journal.record_assignment("new", "job", b"assign")
        journal.close()
        assert "new" in reopened(path)
        assert path.read_bytes().startswith(whole[:good])


def test_what_is_no_record_ends_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal.open(path)
    journal.record_assignment("a", "job", b"assign")
    journal.close()
    for garbage in (b"\xc1", msgpack.packb(7), msgpack.packb([]), msgpack.packb(["assignment", "x"])):
        good = path.read_bytes()
        path.write_bytes(good + garbage + msgpack.packb(["forget", "a"]))
        assert list(reopened(path)) == ["a"]
        assert path.read_bytes() == good


def test_records_of_a_newer_agent_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = [["assignment", "a", "job", b"assign", False], ["novelty", "a", 1, 2, 3], ["log", "a", 7]]
    path.write_bytes(b"".join(msgpack.packb(record) for record in records))
    assert reopened(path)["a"].log_offset == 7


def test_a_large_journal_is_written_anew(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    journal.record_assignment("a", "job", b"assign")
    for seq in range(1, 201):
        journal.record_report("a", seq, bytes(100_000))
        journal.record_acknowledged("a", seq)
    assert (tmp_path / "journal").stat().st_size < 6_000_000
    journal.close()
    assert reopened(tmp_path / "journal")["a"].last_seq == 200


def test_a_full_disk_is_told_once_and_made_good_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal = Journal.open(path)
    journal.record_assignment("a", "job", b"assign")
    good = path.read_bytes()
    write = os.write

    def half_then_full(fd: int, data: bytes) -> int:
        if len(data) > 4:
            return write(fd, bytes(data)[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(JournalFull, match=r"No space left.*free some space"):
        journal.record_report("a", 1, b"one")
    assert path.read_bytes() == good
    journal.record_report("a", 2, b"two")
    assert journal.is_behind
    assert path.read_bytes() == good
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal"]
    monkeypatch.undo()
    journal.record_report("a", 3, b"three")
    assert not journal.is_behind
    journal.close()
    assert reopened(path)["a"].reports == {1: b"one", 2: b"two", 3: b"three"}


def test_agents_that_died_are_told_from_those_that_left(tmp_path: Path) -> None:
    def next_agent() -> Journal:
        journal.close()
        return Journal.open(tmp_path / "journal")

    journal = Journal.open(tmp_path / "journal")
    journal.record_assignment("a", "job", b"")
    for died in (1, 2):
        journal = next_agent()
        journal.record_taken_up("a")
        assert journal.assignments["a"].agents_died == died
    journal.record_left("a")
    journal = next_agent()
    journal.record_taken_up("a")
    assert journal.assignments["a"].agents_died == 2
    journal.close()
