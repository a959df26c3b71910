"""The writer against the real `nix-store --dump`, and what it refuses."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gradient_protocol.nar import NarError, pack, pack_tree

needs_nix = pytest.mark.skipif(shutil.which("nix-store") is None, reason="nix-store is not installed")


def make_tree(root: Path) -> None:
    root.mkdir()
    (root / "empty").write_bytes(b"")
    (root / "eight").write_bytes(b"12345678")
    (root / "seven").write_bytes(b"1234567")
    (root / "large").write_bytes(os.urandom(1_000_003))
    (root / "tool").write_text("#!/bin/sh\n")
    (root / "tool").chmod(0o700)
    (root / "group-only").write_text("x")
    (root / "group-only").chmod(0o654)
    (root / "link").symlink_to("no/such/target")
    (root / "up").symlink_to("..")
    (root / "bin").mkdir()
    (root / "bin-utils").mkdir()
    (root / "bin" / "Zed").write_text("Z")
    (root / "bin" / "a").write_text("a")
    (root / "bin" / "ä ö").write_text("umlaut")
    Path(os.fsdecode(os.fsencode(root) + b"/bin/\xff\xfe")).write_text("not UTF-8")
    deep = root / "deep"
    for _ in range(60):
        deep.mkdir()
        deep /= "d"
    deep.write_text("bottom")


def dump(path: Path) -> bytes:
    return subprocess.run(["nix-store", "--dump", path], check=True, capture_output=True).stdout


@needs_nix
@pytest.mark.parametrize("chunk_size", [64, 4096, 256 * 1024])
def test_a_tree_is_packed_as_nix_store_packs_it(tmp_path: Path, chunk_size: int) -> None:
    make_tree(tmp_path / "tree")
    assert b"".join(pack(tmp_path / "tree", chunk_size=chunk_size)) == dump(tmp_path / "tree")


@needs_nix
@pytest.mark.parametrize("name", ["empty", "tool", "link", "large"])
def test_a_root_that_is_no_directory_is_packed_as_nix_store_packs_it(tmp_path: Path, name: str) -> None:
    make_tree(tmp_path / "tree")
    assert b"".join(pack(tmp_path / "tree" / name)) == dump(tmp_path / "tree" / name)


def test_pieces_stay_near_the_chunk_size(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    sizes = [len(piece) for piece in pack(tmp_path / "tree", chunk_size=4096)]
    assert max(sizes) <= 3 * 4096


def test_a_listed_tree_equals_a_directory_with_only_those_files(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    (tmp_path / "tree" / "ignored").write_text("not tracked")
    wanted = ["tool", "bin/a", "bin/Zed", "link", "seven", "bin-utils/", "bin/deleted", "gone/too"]
    expected = tmp_path / "expected"
    (expected / "bin").mkdir(parents=True)
    (expected / "bin-utils").mkdir()
    for name in ["tool", "bin/a", "bin/Zed", "link", "seven"]:
        shutil.copy2(tmp_path / "tree" / name, expected / name, follow_symlinks=False)
    assert b"".join(pack_tree(tmp_path / "tree", wanted)) == b"".join(pack(expected))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a//b", ".", "a/../b", ""])
def test_a_listed_name_outside_the_tree_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(NarError, match="not a path within the tree"):
        list(pack_tree(tmp_path, [name]))


def test_a_listed_file_below_a_symlink_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(NarError, match="no directory"):
        list(pack_tree(tmp_path / "tree", ["link/secret"]))


def test_a_special_file_is_refused_by_name_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NarError, match=r"'pipe' is neither a file"):
        list(pack(tmp_path))


def test_a_file_that_grows_or_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    for change, words in ((b"", "shorter"), (b"x" * 300_000, "longer")):
        (tmp_path / "file").write_bytes(b"a" * 200_000)
        pieces = pack(tmp_path / "file", chunk_size=1000)
        next(pieces)
        (tmp_path / "file").write_bytes(change)
        with pytest.raises(NarError, match=words):
            list(pieces)


def test_descriptors_are_closed_when_packing_is_given_up(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    before = len(list(Path("/proc/self/fd").iterdir()))
    pieces = pack(tmp_path / "tree", chunk_size=16)
    for _ in range(50):
        next(pieces)
    pieces.close()  # type: ignore[attr-defined]  # an Iterator that is a generator
    assert len(list(Path("/proc/self/fd").iterdir())) == before
