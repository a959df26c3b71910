"""Database URLs: what they name, and what is shown of them."""

from pathlib import Path

import pytest
from gradient_server.db.engine import dialect_of, parse_url, shown_url, sqlite_file
from gradient_server.db.errors import DatabaseUnusableError


@pytest.mark.parametrize(
    ("url", "dialect", "file"),
    [
        ("sqlite:////var/lib/gradient/gradient.db", "sqlite", Path("/var/lib/gradient/gradient.db")),
        ("sqlite:///here.db", "sqlite", Path("here.db")),
        ("sqlite://", "sqlite", None),
        ("postgresql://u@h/d", "postgresql", None),
        ("postgres://u@h/d", "postgresql", None),
        ("postgresql+psycopg://u@h/d", "postgresql", None),
    ],
)
def test_a_url_names_one_of_two_databases(url: str, dialect: str, file: Path | None) -> None:
    parsed = parse_url(url)
    assert dialect_of(parsed) == dialect
    assert sqlite_file(parsed) == file


def test_a_password_is_never_shown() -> None:
    parsed = parse_url("postgresql://user:secret@host/name")
    assert "secret" not in shown_url(parsed)
    assert "secret" not in repr(parsed)
    assert parsed.password == "secret"


@pytest.mark.parametrize("url", ["mysql://u:secret@h/d", "not a url", ""])
def test_anything_else_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(DatabaseUnusableError) as raised:
        parse_url(url)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)
