"""The base directory: an identity that stays, and secrets that only the owner reads."""

import stat
from pathlib import Path

import pytest
from gradient_protocol.ids import IdSource
from gradient_server.db.queries.registry import find_api_key
from gradient_server.db.runner import Database
from gradient_server.first_start import instance_id, make_first_key, prepare, write_secret


def test_an_instance_keeps_its_id(tmp_path: Path, ids: IdSource) -> None:
    base_dir = tmp_path / "made" / "here"
    prepare(base_dir)
    first = instance_id(base_dir, ids)
    assert instance_id(base_dir, ids) == first
    assert stat.S_IMODE(base_dir.stat().st_mode) == 0o700


def test_a_secret_is_the_owners(tmp_path: Path) -> None:
    file = write_secret(tmp_path, "key")
    assert file.read_text() == "key\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["api-key"]


async def test_the_first_key_is_made_once_and_not_without_its_file(
    sqlite_database: Database, ids: IdSource, tmp_path: Path
) -> None:
    async def ensure(base_dir: Path) -> Path | None:
        return await sqlite_database.run(
            lambda connection: make_first_key(connection, base_dir, now=1.0, ids=ids)
        )

    with pytest.raises(FileNotFoundError):
        await ensure(tmp_path / "away")
    file = await ensure(tmp_path)
    assert file is not None
    text = file.read_text().strip()
    assert await sqlite_database.read(lambda connection: find_api_key(connection, text)) is not None
    assert await ensure(tmp_path) is None
