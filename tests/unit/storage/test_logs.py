"""Logs: compressed as they came, readable from any offset, whole after a crash, never in the way."""

import errno
import os
from pathlib import Path

import pytest
import zstandard
from gradient_protocol.limits import MAX_CHUNK_DATA
from gradient_server.storage import durable, logs
from gradient_server.storage.logs import LogError, LogGapError, LogStore
from hypothesis import given
from hypothesis import strategies as st

ID = "0190a1b2-0000-7000-8000-000000000001"


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    return LogStore(tmp_path)


def frame(plain: bytes) -> bytes:
    return zstandard.compress(plain)


def unsized(plain: bytes) -> bytes:
    """A frame that does not tell how long its contents are."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(plain)


def test_what_is_appended_is_read_from_any_offset(store: LogStore) -> None:
    plain = b"".join(f"line {number}\n".encode() for number in range(1000))
    for start in range(0, len(plain), 700):
        end = min(start + 700, len(plain))
        assert store.append(ID, start, frame(plain[start:end])) == end
    for offset in (0, 1, 699, 700, 701, len(plain) - 1, len(plain), len(plain) + 5):
        assert store.read(ID, offset, 10_000_000) == plain[offset:]
        assert store.read(ID, offset, 1234) == plain[offset : offset + 1234]
    assert store.read(ID, 0, 0) == b""


def test_a_log_outlives_the_store(store: LogStore, tmp_path: Path) -> None:
    store.append(ID, 0, frame(b"before\n"))
    store.close()
    later = LogStore(tmp_path)
    assert later.size(ID) == 7
    later.append(ID, 7, frame(b"after\n"))
    assert later.read(ID, 0, 100) == b"before\nafter\n"
    assert later.delete(ID)
    assert not later.delete(ID)
    assert later.read(ID, 0, 100) == b""


def test_a_repeated_chunk_is_ignored_an_overlap_cut_and_a_gap_refused(store: LogStore) -> None:
    store.append(ID, 0, frame(b"0123456789"))
    assert store.append(ID, 0, frame(b"0123456789")) == 10
    assert store.append(ID, 5, frame(b"56789abc")) == 13
    with pytest.raises(LogGapError) as raised:
        store.append(ID, 14, frame(b"x"))
    assert raised.value.expected == 13
    assert store.read(ID, 0, 100) == b"0123456789abc"


def test_plain_chunks_are_stored_compressed(store: LogStore, tmp_path: Path) -> None:
    store.append(ID, 0, bytes(100_000), compressed=False)
    assert store.read(ID, 0, 200_000) == bytes(100_000)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.log")) < 1000


@pytest.mark.parametrize("cut", [1, 5, 8, 12])
def test_a_record_that_a_crash_cut_short_is_dropped(store: LogStore, tmp_path: Path, cut: int) -> None:
    store.append(ID, 0, frame(b"kept\n"))
    [path] = tmp_path.rglob("*.log")
    kept = path.stat().st_size
    store.append(ID, 5, frame(b"cut short\n"))
    store.close()
    os.truncate(path, kept + cut)
    later = LogStore(tmp_path)
    assert later.size(ID) == 5
    assert later.append(ID, 5, frame(b"again\n")) == 11
    assert later.read(ID, 0, 100) == b"kept\nagain\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no frame",
        frame(b"some text " * 100)[:-9],
        zstandard.compress(bytes(MAX_CHUNK_DATA + 1)),
        zstandard.compress(bytes(1 << 28)),
        frame(b"one") + frame(b"two"),
        unsized(b"some text " * 100)[:-9],
        unsized(bytes(MAX_CHUNK_DATA + 1)),
        unsized(bytes(1 << 28)),
        unsized(b"one") + b"x",
    ],
    ids=[
        "empty",
        "not zstd",
        "truncated",
        "too long",
        "bomb",
        "two frames",
        "unsized, truncated",
        "unsized, too long",
        "unsized bomb",
        "unsized, more after it",
    ],
)
def test_an_unreadable_chunk_is_refused_and_changes_nothing(store: LogStore, data: bytes) -> None:
    store.append(ID, 0, frame(b"first"))
    with pytest.raises(LogError):
        store.append(ID, 5, data)
    assert store.size(ID) == 5


def test_a_frame_need_not_tell_its_size(store: LogStore) -> None:
    plain = os.urandom(MAX_CHUNK_DATA)
    store.append(ID, 0, unsized(plain))
    assert store.read(ID, 0, MAX_CHUNK_DATA) == plain


def test_ids_from_outside_are_no_paths(store: LogStore) -> None:
    for name in ("../x", "", "a/b", ".", "x" * 65):
        with pytest.raises(ValueError, match="no assignment's id"):
            store.append(name, 0, frame(b"x"))


def test_a_full_disk_truncates_the_log_and_blocks_nobody(
    store: LogStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(ID, 0, frame(b"stored\n"))

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(durable.os, "pwrite", refuse)
        assert store.append(ID, 7, frame(b"dropped\n")) == 15
    assert store.is_truncated(ID)
    assert store.append(ID, 15, frame(b"dropped too\n")) == 27
    assert store.read(ID, 0, 100) == b"stored\n"
    assert LogStore(tmp_path).size(ID) == 7


def test_a_log_has_a_largest_size(tmp_path: Path) -> None:
    store = LogStore(tmp_path, max_log_bytes=10)
    store.append(ID, 0, frame(b"0123456789"))
    assert not store.is_truncated(ID)
    assert store.append(ID, 10, frame(b"x")) == 11
    assert store.is_truncated(ID)
    assert store.read(ID, 0, 100) == b"0123456789"


def test_few_files_are_open_however_many_logs_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_OPEN_LOGS", 4)
    store = LogStore(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(50):
        store.append(f"log-{number}", 0, frame(b"x"))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4
    for number in range(50):
        assert store.append(f"log-{number}", 1, frame(b"y")) == 2
    assert store.read("log-0", 0, 10) == b"xy"


def test_truncated_logs_are_closed_like_others_and_stay_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_OPEN_LOGS", 4)
    store = LogStore(tmp_path, max_log_bytes=1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(50):
        assert store.append(f"log-{number}", 0, frame(b"xy")) == 2
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4
    for number in range(50):
        assert store.is_truncated(f"log-{number}")
        assert store.size(f"log-{number}") == 2
        assert store.append(f"log-{number}", 2, frame(b"z")) == 3
    assert store.delete("log-0")
    assert not store.is_truncated("log-0")


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=300), max_size=20),
    offset=st.integers(0, 3000),
    limit=st.integers(0, 3000),
)
def test_a_log_reads_like_the_bytes_it_was_given(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], offset: int, limit: int
) -> None:
    store = LogStore(tmp_path_factory.mktemp("logs"))
    plain = b""
    for chunk in chunks:
        plain += chunk
        assert store.append(ID, len(plain) - len(chunk), frame(chunk)) == len(plain)
    assert store.read(ID, offset, limit) == plain[offset : offset + limit]
    store.close()
