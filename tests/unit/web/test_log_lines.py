import pytest
from gradient_server.web.log_lines import MAX_LINE_CHARACTERS, last_line
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("tail", "line"),
    [
        (b"", None),
        (b"not complete", None),
        (b"\n", None),
        (b"one\ntwo\nthr", "two"),
        (b"one\r\n", "one"),
        (b"one\n\n  \n", "one"),
        (b" 10%\r 50%\r100%\n", "100%"),
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07text\n", "red text"),
        (b"a\x00b\x07c\x7f\n", "abc"),
        (b"\xff\xfe\n", "\ufffd\ufffd"),
        ("é\n".encode(), "é"),
        (b"x" * 1000 + b"\n", "x" * MAX_LINE_CHARACTERS),
    ],
)
def test_the_last_line_that_says_something(tail: bytes, line: str | None) -> None:
    assert last_line(tail) == line


@given(st.binary(max_size=300))
def test_whatever_a_build_prints_is_one_short_line_that_moves_no_cursor(tail: bytes) -> None:
    line = last_line(tail)
    if line is None:
        return
    assert 0 < len(line) <= MAX_LINE_CHARACTERS
    assert not any((ord(letter) < 32 and letter != "\t") or 127 <= ord(letter) < 160 for letter in line)
