"""Directories of ended builds that are used again: only where nothing of the last build is left in them."""

import os
from pathlib import Path

import pytest
from gradient_worker.runner import layout
from gradient_worker.runner.files import Skeletons


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A build's directory as its end leaves it, but for the log."""
    path = tmp_path / "first"
    Skeletons(str(tmp_path)).make(str(path), os.getuid(), os.getgid())
    for name in (layout.PROCESS, layout.RESULT):
        (path / name).write_bytes(b"record")
    return path


def again(tmp_path: Path, skeletons: Skeletons) -> Path:
    path = tmp_path / "second"
    skeletons.make(str(path), os.getuid(), os.getgid())
    return path


@pytest.mark.parametrize("log", [None, b"", b"something"])
def test_the_next_build_finds_nothing_of_the_last(tmp_path: Path, root: Path, log: bytes | None) -> None:
    if log is not None:
        (root / layout.LOG).write_bytes(log)
    inode = root.stat().st_ino
    skeletons = Skeletons(str(tmp_path))
    assert skeletons.remove(str(root))
    second = again(tmp_path, skeletons)
    assert second.stat().st_ino == inode, "used again"
    assert not root.exists()
    assert [path.read_bytes() for path in sorted(second.iterdir()) if path.is_file()] == [b""] * (
        3 if log == b"" else 2
    )


def test_a_log_that_somebody_reads_is_not_written_by_the_next_build(tmp_path: Path, root: Path) -> None:
    log = root / layout.LOG
    log.write_bytes(b"of the first")
    with log.open("rb") as reader:
        skeletons = Skeletons(str(tmp_path))
        assert skeletons.remove(str(root))
        (again(tmp_path, skeletons) / layout.LOG).write_bytes(b"of the second")
        assert reader.read() == b"of the first"


@pytest.mark.parametrize("left", ["outputs/file", "home/.cache", "beside"])
def test_a_directory_with_something_in_it_is_not_used_again(tmp_path: Path, root: Path, left: str) -> None:
    (root / layout.LOG).touch()
    (root / left).write_text("left")
    skeletons = Skeletons(str(tmp_path))
    assert not skeletons.remove(str(root))
    assert sorted(again(tmp_path, skeletons).iterdir()) == sorted(
        tmp_path / "second" / part for part in ("build", "home", "outputs", "tmp")
    )


def test_an_empty_log_with_a_second_name_is_not_used_again(tmp_path: Path, root: Path) -> None:
    (root / layout.LOG).touch()
    (tmp_path / "other name").hardlink_to(root / layout.LOG)
    skeletons = Skeletons(str(tmp_path))
    assert skeletons.remove(str(root))
    assert not (again(tmp_path, skeletons) / layout.LOG).exists()


def test_what_is_kept_can_be_cleared(tmp_path: Path, root: Path) -> None:
    (root / layout.LOG).touch()
    skeletons = Skeletons(str(tmp_path))
    assert skeletons.remove(str(root))
    skeletons.clear()
    assert list(tmp_path.iterdir()) == []
