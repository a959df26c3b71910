"""Held paths, their closures, and when an object is used no more, on both databases."""

import dataclasses

from gradient_protocol.kinds import Compression
from gradient_server.db.queries import cached_paths, uploads
from gradient_server.db.queries.cached_paths import CachedPath
from gradient_server.db.runner import Database

NOW = 1_700_000_000.0


def entry(path: str, *references: str, held_as: str = "") -> CachedPath:
    return CachedPath(
        path=path,
        nar_hash=f"sha256:{path}",
        nar_size=5_000_000_000,
        file_size=50,
        compression=Compression.ZSTD,
        object=held_as or f"object-{path}",
        references=references,
        contains_store_dir=path == "flagged",
    )


async def put(database: Database, *entries: CachedPath) -> list[str | None]:
    return [await database.run(lambda c, e=one: cached_paths.put_path(c, e, now=NOW)) for one in entries]


async def test_what_is_put_is_what_is_got(database: Database) -> None:
    stored = entry("flagged", "a", "b", "flagged")
    assert await put(database, stored) == [None]
    got = await database.read(lambda c: cached_paths.get_paths(c, ["flagged", "missing"]))
    assert got == {"flagged": stored}
    assert await database.read(lambda c: cached_paths.held_paths(c, ["flagged", "b"])) == {"flagged"}
    assert await database.read(lambda c: cached_paths.get_paths(c, [])) == {}


async def test_a_closure_ends_at_what_is_missing_and_survives_cycles(database: Database) -> None:
    await put(database, entry("a", "b"), entry("b", "a", "c", "gone"), entry("c", "c"), entry("unrelated"))
    reached = await database.read(lambda c: cached_paths.closure(c, ["a", "unknown"]))
    assert [held.path for held in reached] == ["a", "b", "c"]
    assert reached[1].references == ("a", "c", "gone")
    missing = await database.read(lambda c: cached_paths.closure_missing(c, ["a", "unknown"]))
    assert missing == ["gone", "unknown"]


async def test_a_replaced_path_gives_up_its_object_and_references(database: Database) -> None:
    await put(database, entry("a", "old"))
    other = dataclasses.replace(entry("a", "new", held_as="second"), nar_hash="sha256:other")
    assert await put(database, other) == ["object-a"]
    assert (await database.read(lambda c: cached_paths.get_paths(c, ["a"])))["a"] == other


async def test_an_object_is_free_when_its_last_path_goes(database: Database) -> None:
    await put(database, entry("a", held_as="shared"), entry("b", "a", held_as="shared"))
    assert await database.run(lambda c: cached_paths.forget_path(c, "a")) is None
    assert await database.run(lambda c: cached_paths.forget_path(c, "a")) is None
    assert await database.run(lambda c: cached_paths.forget_path(c, "b")) == "shared"
    assert await database.read(lambda c: cached_paths.get_paths(c, ["a", "b"])) == {}


async def test_an_upload_that_waits_for_a_verdict_keeps_its_object(database: Database) -> None:
    await put(database, entry("a", held_as="shared"))
    await database.run(
        lambda c: uploads.start_upload(
            c, request="r", worker="w", assignment="as", path="p", lease_until=NOW + 300, now=NOW
        )
    )
    await database.run(
        lambda c: uploads.finish_upload(c, "r", nar_hash="sha256:x", nar_size=1, object_name="shared")
    )
    assert await database.run(lambda c: cached_paths.forget_path(c, "a")) is None
    assert await database.run(lambda c: uploads.expired_uploads(c, now=NOW + 1000)) == []
    assert await database.run(lambda c: uploads.commit_upload(c, "r"))
    assert not await database.read(lambda c: cached_paths.object_in_use(c, "shared"))


async def test_a_request_id_belongs_to_one_upload(database: Database) -> None:
    def start(worker: str, path: str, lease: float) -> object:
        return database.run(
            lambda c: uploads.start_upload(
                c, request="r", worker=worker, assignment="as", path=path, lease_until=lease, now=NOW
            )
        )

    first = await start("w", "p", NOW + 10)
    assert isinstance(first, uploads.Upload)
    again = await start("w", "p", NOW + 20)
    assert isinstance(again, uploads.Upload)
    assert (again.created_at, again.lease_until) == (NOW, NOW + 20)
    assert await start("other", "p", NOW + 30) is None
    assert await start("w", "other", NOW + 30) is None
    assert await database.run(lambda c: uploads.extend_lease(c, "r", lease_until=NOW + 40))
    assert await database.read(lambda c: uploads.expired_uploads(c, now=NOW + 39)) == []
    [expired] = await database.read(lambda c: uploads.expired_uploads(c, now=NOW + 40))
    assert expired.request == "r"
    assert [gone.request for gone in await database.run(lambda c: uploads.delete_uploads_of(c, "as"))] == [
        "r"
    ]
    assert await database.read(uploads.list_uploads) == []
