"""The base directory: an identity that stays, and secrets that only the owner reads."""

import stat
from pathlib import Path

from gradient_protocol.ids import IdSource
from gradient_server.db.runner import Database
from gradient_server.first_start import ensure_registry, instance_id, prepare, write_secret


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


async def test_the_first_key_is_made_once(sqlite_database: Database, ids: IdSource) -> None:
    keys = [
        await sqlite_database.run(lambda connection: ensure_registry(connection, now=1.0, ids=ids))
        for _ in range(2)
    ]
    assert keys[0] is not None
    assert keys[1] is None
