"""Logs within the limits are the output; beyond them, gaps say what is missing."""

from gradient_worker.log_plan import RESUME_BYTES, TAIL_BYTES, Gap, LogBudget, LogLayout, LogPlan, SpoolPart
from hypothesis import given
from hypothesis import strategies as st

MIB = 1024 * 1024


def plan(burst: int = MIB, sustained: int = 10 * MIB) -> LogPlan:
    return LogPlan(LogBudget(burst, sustained, now=0))


def read(layout: LogLayout, length: int, spool: bytes, limit: int = 1000) -> bytes:
    log = b""
    while len(log) < length:
        part = layout.part(len(log), min(limit, length - len(log)))
        piece = spool[part.start : part.start + part.length] if isinstance(part, SpoolPart) else part.data
        assert piece
        log += piece
    return log


def test_output_within_the_limits_is_the_log() -> None:
    made = plan()
    assert made.advance(1000, 1, ended=False) is None
    assert made.length == 1000
    assert made.advance(5000, 2, ended=True) is None
    assert made.length == 5000
    assert not made.layout.gaps


def test_a_burst_leaves_a_gap_and_keeps_the_end() -> None:
    made = plan()
    assert made.advance(100 * MIB, 1, ended=False) is None
    assert made.length == MIB
    gap = made.advance(100 * MIB, 2, ended=True)
    assert gap is not None
    assert (gap.at, gap.skipped) == (MIB, 99 * MIB - TAIL_BYTES)
    assert str(gap.skipped).encode() in gap.text
    assert made.length == MIB + len(gap.text) + TAIL_BYTES


def test_a_gap_closes_when_the_limits_have_room_again() -> None:
    made = plan()
    made.advance(2 * MIB, 0, ended=False)
    assert made.advance(2 * MIB, 5, ended=False) is None
    gap = made.advance(3 * MIB, 60 * RESUME_BYTES / MIB + 1, ended=False)
    assert gap is not None
    assert gap.skipped == 2 * MIB
    assert made.advance(3 * MIB + 100, 61, ended=False) is None
    assert made.length == MIB + len(gap.text) + 100


def test_a_slow_stream_is_held_to_the_hour() -> None:
    made = plan(burst=MIB, sustained=2 * MIB)
    for minute in range(60):
        made.advance((minute + 1) * MIB, minute * 60.0, ended=False)
    assert made.length < 5 * MIB


def test_what_the_runner_threw_away_is_named_once() -> None:
    made = plan()
    made.advance(10, 0, ended=True)
    assert made.close(0) is None
    gap = made.close(77)
    assert gap is not None
    assert b"77 bytes" in gap.text
    again = LogPlan(LogBudget(MIB, MIB, now=0), LogLayout([gap]))
    again.advance(10, 0, ended=True)
    assert again.close(77) is None


@given(
    gaps=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.binary(min_size=1, max_size=20)), max_size=6
    ),
    tail=st.integers(0, 100),
    limit=st.integers(1, 30),
)
def test_a_layout_reads_as_the_spool_with_its_gaps_replaced(
    gaps: list[tuple[int, int, bytes]], tail: int, limit: int
) -> None:
    layout, expected, position = LogLayout(), b"", 0
    total = sum(before + skipped for before, skipped, _ in gaps) + tail
    spool = bytes(index % 251 for index in range(total))
    for before, skipped, text in gaps:
        expected += spool[position : position + before] + text
        layout.add(Gap(position + before, skipped, text))
        position += before + skipped
    expected += spool[position:]
    assert layout.log_offset(total) == len(expected)
    assert read(layout, len(expected), spool, limit) == expected


@given(st.lists(st.tuples(st.integers(0, 3 * MIB), st.floats(0, 100)), max_size=30))
def test_a_resumed_plan_goes_on_where_its_gaps_say(writes: list[tuple[int, float]]) -> None:
    made, size, now = plan(), 0, 0.0
    for written, secs in writes:
        size, now = size + written, now + secs
        made.advance(size, now, ended=False)
        assert made.length <= size + sum(len(gap.text) for gap in made.layout.gaps)
    again = LogPlan(LogBudget(100 * size + MIB, 100 * size + MIB, now=0), LogLayout(made.layout.gaps))
    again.advance(size, 0, ended=True)
    assert again.length >= made.length
