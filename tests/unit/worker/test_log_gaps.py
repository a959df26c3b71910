"""The file that tells the next agent which parts of a log are left out, when it was cut in the middle."""

import resource
import signal
from pathlib import Path

import msgpack
import pytest
from gradient_worker import logs
from gradient_worker.log_plan import Gap

GAPS = [Gap(n * 10, 3, b"left out") for n in range(3)]


def read(file: Path) -> list[tuple[int, int, bytes]]:
    return [(gap.at, gap.skipped, gap.text) for gap in logs._read_gaps(file)]


def append(file: Path, gap: Gap) -> None:
    logs._append_gap(file, gap)


ALL = [(gap.at, gap.skipped, gap.text) for gap in GAPS]


def test_whatever_is_cut_off_the_whole_records_are_read_and_the_next_one_stands_behind_them(
    tmp_path: Path,
) -> None:
    whole = b"".join(msgpack.packb(record) for record in ALL)
    one = len(msgpack.packb(ALL[0]))
    for size in range(len(whole) + 1):
        file = tmp_path / str(size)
        file.write_bytes(whole[:size])
        assert read(file) == ALL[: size // one]
        append(file, GAPS[0])
        assert read(file) == [*ALL[: size // one], ALL[0]]


@pytest.mark.parametrize(
    "garbage", [b"\x05", b"\xc1", b"\x93\x01\x02\x03", b"\x93\x05\x07\xc4\x20abc", b"\x90"]
)
def test_garbage_costs_what_is_behind_it_and_no_more(tmp_path: Path, garbage: bytes) -> None:
    file = tmp_path / "gaps"
    file.write_bytes(msgpack.packb(ALL[0]) + garbage)
    assert read(file) == ALL[:1]


def test_half_a_record_is_taken_back_when_the_disk_is_full(tmp_path: Path) -> None:
    """`RLIMIT_FSIZE` is a full disk for one process: the write is cut, the next one refused."""
    file = tmp_path / "gaps"
    append(file, GAPS[0])
    size = file.stat().st_size
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            append(file, GAPS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.stat().st_size == size
    append(file, GAPS[2])
    assert read(file) == [ALL[0], ALL[2]]
