"""Unpacking to disk and removing again."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from gradient_protocol.nar import NarError, Unpacker, pack, remove_tree

from tests.unit.nar.archives import MAGIC, directory, regular, symlink
from tests.unit.nar.test_pack import make_tree, needs_nix


def unpack(archive: bytes, destination: Path, step: int = 1000) -> None:
    unpacker = Unpacker(destination)
    for at in range(0, len(archive), step):
        unpacker.feed(archive[at : at + step])
    unpacker.finish()


def test_a_tree_comes_back_as_it_was_with_the_modes_and_times_of_a_store(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    archive = b"".join(pack(tmp_path / "tree"))
    old_umask = os.umask(0o077)
    try:
        unpack(archive, tmp_path / "copy")
    finally:
        os.umask(old_umask)
    assert b"".join(pack(tmp_path / "copy")) == archive
    for path in [tmp_path / "copy", *(tmp_path / "copy").rglob("*")]:
        info = path.lstat()
        assert info.st_mtime == 1, path
        if not path.is_symlink():
            assert stat.S_IMODE(info.st_mode) == (0o555 if path.is_dir() or path.name == "tool" else 0o444), (
                path
            )


@needs_nix
def test_what_nix_store_dumped_is_unpacked_and_the_other_way_round(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    archive = subprocess.run(
        ["nix-store", "--dump", tmp_path / "tree"], check=True, capture_output=True
    ).stdout
    unpack(archive, tmp_path / "ours")
    subprocess.run(["nix-store", "--restore", tmp_path / "theirs"], check=True, input=archive)
    assert b"".join(pack(tmp_path / "ours")) == b"".join(pack(tmp_path / "theirs")) == archive


@pytest.mark.parametrize("node", [regular(b"x"), symlink(b"nowhere")])
def test_a_root_that_is_no_directory_is_unpacked(tmp_path: Path, node: bytes) -> None:
    unpack(MAGIC + node, tmp_path / "root")
    assert b"".join(pack(tmp_path / "root")) == MAGIC + node


def test_a_symlink_planted_by_the_archive_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    target = os.fsencode(tmp_path / "outside")
    evil = MAGIC + directory((b"a", symlink(target)), (b"a", directory((b"x", regular(b"evil")))))
    with pytest.raises(NarError, match="twice"):
        unpack(evil, tmp_path / "copy")
    assert list((tmp_path / "outside").iterdir()) == []


def test_an_existing_destination_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "copy").write_text("mine")
    unpacker = Unpacker(tmp_path / "copy")
    with pytest.raises(FileExistsError):
        unpacker.feed(MAGIC + regular(b"x"))
    unpacker.abort()
    assert (tmp_path / "copy").read_text() == "mine"


@pytest.mark.parametrize("end", [0, 100, 5000, 900_000])
def test_giving_up_half_way_leaves_neither_files_nor_descriptors(tmp_path: Path, end: int) -> None:
    make_tree(tmp_path / "tree")
    archive = b"".join(pack(tmp_path / "tree"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    unpacker = Unpacker(tmp_path / "copy")
    unpacker.feed(archive[:end])
    unpacker.abort()
    unpacker.abort()
    assert not (tmp_path / "copy").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_removing_follows_no_symlink_and_minds_no_missing_rights(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    make_tree(tmp_path / "tree")
    (tmp_path / "tree" / "out").symlink_to(tmp_path / "kept")
    (tmp_path / "tree" / "bin").chmod(0)
    (tmp_path / "tree").chmod(0o555)
    remove_tree(tmp_path / "tree")
    remove_tree(tmp_path / "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_can_remove_a_read_only_tree(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    subprocess.run(["chown", "-Rh", "65534:65534", tmp_path], check=True)
    subprocess.run(["chmod", "-R", "a-w", tmp_path / "tree"], check=True)
    # The directories above belong to root alone, so the child is in place before it changes its user.
    program = (
        "import os, pathlib; from gradient_protocol.nar import remove_tree; "
        "os.setgid(65534); os.setuid(65534); remove_tree(pathlib.Path('tree'))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert not (tmp_path / "tree").exists()
