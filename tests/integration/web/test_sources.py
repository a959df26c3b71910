from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx2
import pytest
import trio
from gradient_protocol.nar import NarHasher, compress, pack_tree
from gradient_protocol.store_paths import source_path

from tests.integration.web.conftest import Site


class Tree:
    """A source tree, as `gradient build` packs it."""

    def __init__(self, root: Path, content: bytes) -> None:
        root.mkdir()
        (root / "gradient.toml").write_bytes(content)
        self.nar = b"".join(pack_tree(root, ("gradient.toml",)))
        hasher = NarHasher()
        hasher.feed(self.nar)
        self.hash = hasher.hash
        self.body = b"".join(compress([self.nar]))

    def query(self, **changed: str | int) -> dict[str, str | int]:
        return {"project": "default", "nar_hash": self.hash, "nar_size": len(self.nar), **changed}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree", bytes(range(256)) * 5_000)


def partials(site: Site) -> list[Path]:
    return list((site.services.settings.base_dir / "nar" / "partial").iterdir())


async def in_pieces(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_a_tree_is_held_after_its_upload(site: Site, tree: Tree) -> None:
    asked = await site.reader.get("/sources", params={"nar_hash": tree.hash})
    assert asked.status_code == 404
    body = in_pieces(tree.body[at : at + 1000] for at in range(0, len(tree.body), 1000))
    answer = await site.client.put("/sources", params=tree.query(), content=body)
    assert answer.json() == {"path": source_path(tree.hash)}
    found = await site.reader.get("/sources", params={"nar_hash": tree.hash})
    assert found.json() == answer.json()
    again = await site.client.put("/sources", params=tree.query(), content=tree.body)
    assert again.json() == answer.json()
    assert partials(site) == []


async def test_an_object_that_was_lost_can_be_uploaded_again(site: Site, tree: Tree) -> None:
    await site.client.put("/sources", params=tree.query(), content=tree.body)
    (held,) = (site.services.settings.base_dir / "nar" / "objects").glob("*/*")
    held.unlink()
    assert (await site.reader.get("/sources", params={"nar_hash": tree.hash})).status_code == 404
    assert (await site.client.put("/sources", params=tree.query(), content=tree.body)).status_code == 200
    assert held.exists()


@pytest.mark.parametrize(
    "fault", ["other contents", "too short", "trailing", "not zstd", "wrong size", "much more"]
)
async def test_what_is_not_the_named_nar_is_refused_and_not_kept(site: Site, tree: Tree, fault: str) -> None:
    body, query = tree.body, tree.query()
    if fault == "other contents":
        query = tree.query(nar_hash="sha256:" + "0" * 64)
    elif fault == "too short":
        body = body[:-10]
    elif fault == "trailing":
        body += b"x"
    elif fault == "not zstd":
        body = tree.nar
    elif fault == "wrong size":
        query = tree.query(nar_size=len(tree.nar) - 8)
    else:
        body += bytes(len(tree.nar) + 2 * 1024 * 1024)
    answer = await site.client.put("/sources", params=query, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("this is not the NAR that was named: ")
    assert "\n" not in answer.json()["error"]
    assert (await site.reader.get("/sources", params={"nar_hash": query["nar_hash"]})).status_code == 404
    assert partials(site) == []


async def test_an_upload_that_breaks_off_leaves_nothing(site: Site, tree: Tree) -> None:
    started = trio.Event()

    async def broken() -> AsyncIterator[bytes]:
        yield tree.body[:1000]
        started.set()
        await trio.sleep_forever()

    async def upload() -> None:
        await site.client.put("/sources", params=tree.query(), content=broken())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(upload)
        await started.wait()
        with trio.fail_after(5):
            while not partials(site):
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    with trio.fail_after(5):
        while partials(site):
            await trio.sleep(0.01)


@pytest.mark.parametrize(
    "changed", [{"nar_hash": "md5:0"}, {"nar_size": -1}, {"nar_size": 10**15}, {"project": "nobody"}]
)
async def test_what_cannot_be_is_refused_before_the_body(
    site: Site, tree: Tree, changed: dict[str, str | int]
) -> None:
    answer: httpx2.Response = await site.client.put("/sources", params=tree.query(**changed), content=b"x")
    assert answer.status_code in (404, 422)
    assert set(answer.json()) == {"error"}
