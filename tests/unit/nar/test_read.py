"""The reader: every way to be wrong is refused, at once and within bounded memory."""

import pytest
from gradient_protocol.nar import (
    BeginDirectory,
    BeginFile,
    EndDirectory,
    EndFile,
    FileData,
    NarError,
    NarEvent,
    NarReader,
    Symlink,
)

from tests.unit.nar.archives import MAGIC, directory, regular, string, strings, symlink

GOOD = MAGIC + directory(
    (b"a", regular(b"hello", executable=True)),
    (b"b", directory((b"link", symlink(b"../a")))),
)


def read(archive: bytes, step: int) -> list[NarEvent]:
    reader = NarReader()
    events: list[NarEvent] = []
    for at in range(0, len(archive), step):
        events += reader.feed(archive[at : at + step])
    reader.finish()
    return events


@pytest.mark.parametrize("step", [1, 3, 8, 17, 1000])
def test_events_are_the_same_however_the_bytes_arrive(step: int) -> None:
    events = read(GOOD, step)
    data = b"".join(bytes(event.data) for event in events if isinstance(event, FileData))
    assert data == b"hello"
    assert [event for event in events if not isinstance(event, FileData)] == [
        BeginDirectory(b""),
        BeginFile(b"a", executable=True, size=5),
        EndFile(),
        BeginDirectory(b"b"),
        Symlink(b"link", b"../a"),
        EndDirectory(),
        EndDirectory(),
    ]


def nested(depth: int) -> bytes:
    node = directory()
    for _ in range(depth):
        node = directory((b"d", node))
    return node


BAD = {
    "traversal": (directory((b"..", regular(b""))), "leads elsewhere"),
    "self": (directory((b".", regular(b""))), "leads elsewhere"),
    "absolute": (directory((b"/etc", regular(b""))), "leads elsewhere"),
    "inner slash": (directory((b"a/b", regular(b""))), "leads elsewhere"),
    "empty name": (directory((b"", regular(b""))), "name of 0 bytes"),
    "NUL in a name": (directory((b"a\0b", regular(b""))), "NUL"),
    "long name": (directory((b"a" * 256, regular(b""))), "name of 256 bytes"),
    "duplicate": (directory((b"a", regular(b"")), (b"a", regular(b""))), "twice"),
    "order": (directory((b"b", regular(b"")), (b"a", regular(b""))), "out of order"),
    "trailing data": (regular(b"") + b"x", "after the archive's end"),
    "long target": (symlink(b"a" * 4096), "target of 4096 bytes"),
    "empty target": (symlink(b""), "target of 0 bytes"),
    "NUL in a target": (symlink(b"a\0"), "NUL"),
    "padding": (
        strings(b"(", b"type", b"regular", b"contents") + b"\1" + bytes(7) + b"abbbbbbb" + string(b")"),
        "padding",
    ),
    "name padding": (
        strings(b"(", b"type", b"directory", b"entry", b"(", b"name") + b"\1" + bytes(7) + b"abbbbbbb",
        "padding",
    ),
    "depth": (nested(257), "deep"),
    "type": (strings(b"(", b"type", b"fifo", b")"), "neither a file"),
    "executable with a value": (
        strings(b"(", b"type", b"regular", b"executable", b"yes", b"contents", b"", b")"),
        "unexpected word",
    ),
    "size": (strings(b"(", b"type", b"regular", b"contents") + b"\xff" * 8, "a file of"),
    "endless word": (b"\xff" * 16, "unexpected word"),
    "names of a terabyte": (
        strings(b"(", b"type", b"directory", b"entry", b"(", b"name") + (1 << 40).to_bytes(8, "little"),
        "name of",
    ),
}


@pytest.mark.parametrize("step", [1, 100_000])
@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_refused_with_one_clear_line(case: str, step: int) -> None:
    node, words = BAD[case]
    with pytest.raises(NarError, match=words) as caught:
        read(MAGIC + node, step)
    assert "\n" not in str(caught.value)


def test_the_deepest_tree_that_is_allowed_is_read() -> None:
    assert len(read(MAGIC + nested(255), 4096)) == 512


def test_every_truncation_is_noticed() -> None:
    for end in range(len(GOOD)):
        with pytest.raises(NarError, match="ends in the middle"):
            read(GOOD[:end], 50)


def test_a_wrong_magic_is_noticed_at_its_first_wrong_byte() -> None:
    with pytest.raises(NarError, match="not an archive"):
        NarReader().feed(MAGIC[:9] + b"X")


def test_contents_are_passed_on_without_being_copied_or_kept() -> None:
    reader = NarReader()
    reader.feed(MAGIC + strings(b"(", b"type", b"regular", b"contents") + (1 << 40).to_bytes(8, "little"))
    piece = bytes(100_000)
    for _ in range(3):
        (event,) = reader.feed(piece)
        assert isinstance(event, FileData)
        assert event.data.obj is piece
