"""The worker's id and its peers file."""

import uuid
from pathlib import Path

import pytest
from gradient_worker.identity import IdentityError, append_peer, load_or_make_worker_id, read_peers

MADE = str(uuid.UUID(int=7))


def peers(directory: Path, text: str, mode: int = 0o600) -> Path:
    file = directory / "peers"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_an_id_is_made_once(tmp_path: Path) -> None:
    base = tmp_path / "a" / "b"
    assert load_or_make_worker_id(base, lambda: MADE) == MADE
    assert load_or_make_worker_id(base, lambda: str(uuid.UUID(int=8))) == MADE
    assert (base / "worker_id").stat().st_mode & 0o077 == 0


def test_a_damaged_id_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "worker_id").write_text("oops\n")
    with pytest.raises(IdentityError, match="holds no UUID"):
        load_or_make_worker_id(tmp_path, lambda: MADE)


def test_lines_comments_and_the_star(tmp_path: Path) -> None:
    file = peers(tmp_path, "# mine\n\npeer:to:ken\n *:other \n")
    assert read_peers(file).tokens == {"peer": "to:ken", "*": "other"}


def test_a_peers_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    for mode in (0o640, 0o604, 0o622):
        file = peers(tmp_path, "peer:token\n", mode)
        with pytest.raises(IdentityError, match=f"run: chmod 600 {file}"):
            read_peers(file)


def test_no_file_is_no_peers(tmp_path: Path) -> None:
    assert read_peers(tmp_path / "peers").tokens == {}


@pytest.mark.parametrize("line", ["peer", ":token", "peer:", "   :  "])
def test_a_bad_line_is_named_without_its_secret(tmp_path: Path, line: str) -> None:
    with pytest.raises(IdentityError, match="line 2: a line is `peer_id:token`") as raised:
        read_peers(peers(tmp_path, f"good:secret\n{line}\n"))
    assert "secret" not in str(raised.value)


def test_a_token_is_in_no_repr(tmp_path: Path) -> None:
    assert "secret" not in repr(read_peers(peers(tmp_path, "peer:secret\n")))


def test_a_registration_replaces_the_line_of_its_peer(tmp_path: Path) -> None:
    file = tmp_path / "peers"
    append_peer(file, "a:one\n")
    append_peer(file, "b:two")
    append_peer(file, "a:three")
    assert read_peers(file).tokens == {"a": "three", "b": "two"}
    assert file.stat().st_mode & 0o777 == 0o600
