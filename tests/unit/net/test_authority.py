"""Tokens are judged one by one; who is connected already decides between 496 and a takeover."""

import hashlib

from gradient_server.net.authority import check_tokens


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def test_each_token_is_checked_on_its_own() -> None:
    hashes = {"project-a": digest("good"), "project-b": digest("other"), "server": digest("third")}
    result = check_tokens(hashes, {"project-a": "good", "project-b": "good", "project-x": "third"})
    assert result.authorized == ("project-a",)
    assert set(result.failed) == {"project-b", "server"}
    assert result.failed["server"] == "no token was sent"
    assert "good" not in result.failed["project-b"]


def test_a_hash_is_not_taken_for_its_token() -> None:
    assert check_tokens({"server": digest("x")}, {"server": digest("x").hex()}).authorized == ()
