"""The spool keeps a prefix of the output, whatever the sizes, and never lets the writer wait."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gradient_worker.runner.spool import Spool
from hypothesis import given, settings
from hypothesis import strategies as st


def test_the_last_output_is_when_something_came(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "log"), None, 1.0)
    assert spool.drain(2.0)
    assert spool.last_output == 1.0
    os.write(spool.write_fd, b"x")
    assert spool.drain(3.0)
    assert spool.last_output == 3.0
    spool.close_write_end()
    assert not spool.drain(4.0)
    assert spool.last_output == 3.0
    spool.finish(5.0)


def test_output_beyond_the_limit_is_no_silence(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "log"), 0, 1.0)
    os.write(spool.write_fd, b"x")
    spool.drain(3.0)
    assert spool.last_output == 3.0
    spool.finish(4.0)
    assert (spool.kept, spool.discarded) == (0, 1)


def test_who_still_holds_the_pipe_is_not_waited_for(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "log"), None, 1.0)
    held = os.dup(spool.write_fd)
    os.write(held, b"last words")
    spool.finish(2.0)
    os.close(held)
    assert (tmp_path / "log").read_bytes() == b"last words"


def test_a_full_disk_without_splice_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(str(tmp_path / "log"), None, 1.0)
    os.write(spool.write_fd, b"0123456789")

    def refuse(number: int) -> Callable[..., int]:
        def fail(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        return fail

    with monkeypatch.context() as broken:
        broken.setattr(os, "splice", refuse(errno.EINVAL))
        broken.setattr(os, "write", refuse(errno.ENOSPC))
        assert spool.drain(2.0)
    os.write(spool.write_fd, b"more")
    assert spool.drain(3.0)
    spool.finish(4.0)
    assert (spool.kept, spool.discarded) == (0, 14)


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=3000), max_size=8),
    limit=st.one_of(st.none(), st.integers(0, 6000)),
    drained_between=st.booleans(),
)
def test_what_is_kept_is_a_prefix(
    tmp_path_factory: object, pieces: list[bytes], limit: int | None, drained_between: bool
) -> None:
    path = Path(str(tmp_path_factory.mktemp("spool"))) / "log"  # type: ignore[attr-defined]  # pytest's own
    spool = Spool(str(path), limit, 0.0)
    for piece in pieces:
        os.write(spool.write_fd, piece)
        if drained_between:
            spool.drain(1.0)
    spool.finish(2.0)
    whole = b"".join(pieces)
    kept = path.read_bytes()
    assert kept == (whole if limit is None else whole[:limit])
    assert (spool.kept, spool.discarded) == (len(kept), len(whole) - len(kept))
    assert spool.truncated == (kept != whole)
