"""Projects, workers, tokens, drains and keys, on both databases."""

import hmac

import pytest
import sqlalchemy as sa
from gradient_protocol.ids import IdSource
from gradient_server.db import tables
from gradient_server.db.queries import registry
from gradient_server.db.runner import Database

from tests.fixtures.times import FakeClock

NOW = 1_700_000_000.0


async def test_a_project_has_one_name(database: Database, ids: IdSource) -> None:
    made = await database.run(lambda c: registry.create_project(c, "demo", now=NOW, ids=ids))
    with pytest.raises(registry.RegistryError, match="there is a project 'demo' already"):
        await database.run(lambda c: registry.create_project(c, "demo", now=NOW, ids=ids))
    for name in ("demo", made):
        found = await database.read(lambda c, n=name: registry.find_project(c, n))
        assert found == registry.Project(made, "demo", NOW)
    assert await database.read(lambda c: registry.find_project(c, "other")) is None


@pytest.mark.parametrize("name", ["", "a b", "../x", "server", "-x", "x" * 64, "a\nb"])
async def test_an_unusable_project_name_is_refused_in_one_line(
    sqlite_database: Database, ids: IdSource, name: str
) -> None:
    with pytest.raises(registry.RegistryError) as raised:
        await sqlite_database.run(lambda c: registry.create_project(c, name, now=NOW, ids=ids))
    assert "\n" not in str(raised.value)


async def test_a_task_is_made_once(database: Database, ids: IdSource) -> None:
    project = await database.run(lambda c: registry.create_project(c, "demo", now=NOW, ids=ids))
    first = await database.run(lambda c: registry.ensure_task(c, project, "main", now=NOW, ids=ids))
    assert await database.run(lambda c: registry.ensure_task(c, project, "main", now=NOW, ids=ids)) == first
    assert await database.run(lambda c: registry.ensure_task(c, project, "other", now=NOW, ids=ids)) != first


async def test_only_the_hash_of_a_token_is_stored(database: Database, ids: IdSource) -> None:
    made = await database.run(
        lambda c: registry.register_worker(c, "alpha", None, registry.SERVER_PEER, now=NOW, ids=ids)
    )
    assert len(made.token) == 43
    assert made.token not in repr(made)
    assert made.peers_line == f"server:{made.token}"
    known = await database.read(lambda c: registry.registrations(c, made.worker_id))
    assert hmac.compare_digest(known["server"], registry.hash_secret(made.token))


async def test_registering_again_replaces_the_token(database: Database, ids: IdSource) -> None:
    def register(connection: sa.Connection) -> registry.Registration:
        return registry.register_worker(connection, "alpha", None, "server", now=NOW, ids=ids)

    first = await database.run(register)
    await database.run(lambda c: registry.revoke_worker(c, "alpha", None, now=NOW))
    assert await database.read(lambda c: registry.registrations(c, first.worker_id)) == {}
    second = await database.run(register)
    assert second.worker_id == first.worker_id
    known = await database.read(lambda c: registry.registrations(c, first.worker_id))
    assert known == {"server": registry.hash_secret(second.token)}


async def test_a_worker_may_have_several_peers_and_lose_one(database: Database, ids: IdSource) -> None:
    project = await database.run(lambda c: registry.create_project(c, "demo", now=NOW, ids=ids))
    for peer in (project, "server"):
        await database.run(
            lambda c, p=peer: registry.register_worker(c, "alpha", "id-1", p, now=NOW, ids=ids)
        )
    revoked = await database.run(lambda c: registry.revoke_worker(c, "alpha", project, now=NOW))
    assert revoked == registry.Revocation("id-1", (project,))
    assert set(await database.read(lambda c: registry.registrations(c, "id-1"))) == {"server"}
    with pytest.raises(registry.RegistryError, match="no registration that could be revoked"):
        await database.run(lambda c: registry.revoke_worker(c, "alpha", project, now=NOW))
    [row] = await database.read(registry.list_workers)
    assert (row.id, row.name, row.peers) == ("id-1", "alpha", ("server",))


async def test_ids_and_names_of_workers_stay_together(database: Database, ids: IdSource) -> None:
    def register(name: str, worker_id: str, peer: str = "server") -> object:
        return database.run(lambda c: registry.register_worker(c, name, worker_id, peer, now=NOW, ids=ids))

    await register("alpha", "id-1")
    with pytest.raises(registry.RegistryError, match="belongs to the worker id-1"):
        await register("alpha", "id-2")
    with pytest.raises(registry.RegistryError, match="registered as 'alpha'"):
        await register("beta", "id-1")
    with pytest.raises(registry.RegistryError, match="there is no project"):
        await register("beta", "id-2", "nobody")
    assert [row.name for row in await database.read(registry.list_workers)] == ["alpha"]


async def test_a_drain_can_be_changed_and_undone(database: Database, ids: IdSource, clock: FakeClock) -> None:
    await database.run(lambda c: registry.register_worker(c, "alpha", None, "server", now=NOW, ids=ids))
    await database.run(lambda c: registry.set_drain(c, "alpha", "new disk", now=NOW))
    again = await database.run(
        lambda c: registry.set_drain(c, "alpha", "new kernel", now=NOW + 5, deadline=NOW + 60)
    )
    assert again.drain == registry.Drain(NOW, "new kernel", NOW + 60)
    assert (await database.run(lambda c: registry.clear_drain(c, "alpha"))).drain is None
    with pytest.raises(registry.RegistryError, match="there is no worker 'beta'"):
        await database.run(lambda c: registry.set_drain(c, "beta", "x", now=NOW))


async def test_a_key_is_found_by_its_text_until_it_is_revoked(database: Database, ids: IdSource) -> None:
    project = await database.run(lambda c: registry.create_project(c, "demo", now=NOW, ids=ids))
    text = await database.run(lambda c: registry.create_api_key(c, "ci", project, now=NOW, ids=ids))
    found = await database.read(lambda c: registry.find_api_key(c, text))
    assert found is not None
    assert (found.name, found.project) == ("ci", project)
    assert await database.read(lambda c: registry.find_api_key(c, text + "x")) is None
    stored = await database.read(lambda c: c.scalar(sa.select(tables.api_key.c.key_sha256)))
    assert stored == registry.hash_secret(text)
    assert await database.run(lambda c: registry.revoke_api_key(c, found.id, now=NOW))
    assert not await database.run(lambda c: registry.revoke_api_key(c, found.id, now=NOW))
    assert await database.read(lambda c: registry.find_api_key(c, text)) is None
