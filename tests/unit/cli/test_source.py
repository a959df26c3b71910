import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gradient_cli.errors import CommandError, ExitCode
from gradient_cli.source import SourceTree

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(root: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments],
        check=True,
        capture_output=True,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "gradient.toml").write_text("")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.c").write_text("int a;")
    (tmp_path / "junk.o").write_text("o")
    return tmp_path


def test_without_git_everything_counts(tree: Path) -> None:
    (tree / "link").symlink_to("lib/a.c")
    assert SourceTree.at(tree).files == ("gradient.toml", "junk.o", "lib/a.c", "link")


@needs_git
def test_with_git_what_it_would_track(tree: Path) -> None:
    git(tree, "init", "-q")
    (tree / ".gitignore").write_text("*.o\n")
    git(tree, "add", "lib")
    assert SourceTree.at(tree).files == (".gitignore", "gradient.toml", "lib/a.c")


@needs_git
def test_a_deleted_file_that_git_still_tracks_is_left_out(tree: Path) -> None:
    git(tree, "init", "-q")
    git(tree, "add", ".")
    (tree / "lib" / "a.c").unlink()
    assert "lib/a.c" not in SourceTree.at(tree).files


@needs_git
def test_a_directory_below_the_repository(tree: Path) -> None:
    git(tree, "init", "-q")
    (tree / "lib" / "gradient.toml").write_text("")
    assert SourceTree.at(tree / "lib").files == ("a.c", "gradient.toml")


@needs_git
def test_a_submodule_brings_its_files(tree: Path) -> None:
    inner = tree / "vendored"
    inner.mkdir()
    (inner / "b.c").write_text("int b;")
    git(inner, "init", "-q")
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "b")
    git(tree, "init", "-q")
    git(tree, "add", ".")
    assert "vendored/b.c" in SourceTree.at(tree).files


def test_no_recipe_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"has no gradient\.toml to build: there is none") as caught:
        SourceTree.at(tmp_path)
    assert caught.value.code == ExitCode.USAGE


def test_the_tree_packs_to_the_same_archive_wherever_it_lies(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("other") / "tree"
    shutil.copytree(tree, copy)
    os.utime(copy / "gradient.toml", (0, 0))
    assert b"".join(SourceTree.at(tree).pack()) == b"".join(SourceTree.at(copy).pack())
