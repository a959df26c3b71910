"""What takes long in a transfer happens beside the event loop, on both sides."""

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
from gradient_protocol import nar
from gradient_protocol.nar import NarIntake, NarReader, Unpacker
from gradient_worker.stores.directory import DirectoryStore
from gradient_worker.transfer import Downloaded, Uploaded
from gradient_worker.transfer import upload as upload_module

from tests.integration.transfer.conftest import Scene

SIZE = 3 * 1024 * 1024


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """In which threads each kind of work was done."""
    seen: dict[str, set[int]] = {}

    def note(what: str) -> None:
        seen.setdefault(what, set()).add(threading.get_ident())

    def compress(pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in nar.compress(pieces):
            note("compress")
            yield piece

    pack = DirectoryStore.pack

    def packed(store: DirectoryStore, path: str) -> Iterator[bytes]:
        for piece in pack(store, path):
            note("pack")
            yield piece

    def noted(kind: type, method: str, what: str) -> None:
        original = getattr(kind, method)

        def call(self: object, *arguments: object) -> object:
            note(what)
            return original(self, *arguments)

        monkeypatch.setattr(kind, method, call)

    monkeypatch.setattr(upload_module, "compress", compress)
    monkeypatch.setattr(DirectoryStore, "pack", packed)
    noted(NarIntake, "feed", "decompress and hash")
    noted(NarReader, "feed", "parse at the server")
    noted(Unpacker, "feed", "unpack")
    return seen


async def test_no_archive_is_worked_on_in_the_event_loop(
    scene: Scene, noise: Callable[[int], bytes], threads: dict[str, set[int]]
) -> None:
    maker, taker = await scene.mover("a"), await scene.mover("b")
    info = maker.make_file(scene.base_dir, 1, noise(SIZE))
    async with scene.session("a") as (_, assignment_id):
        assert isinstance(await maker.transfers.upload(assignment_id, info, maker.spans), Uploaded)
    async with scene.session("b") as (_, assignment_id):
        outcome = await taker.transfers.download(assignment_id, info.path, info.nar_hash, taker.spans)
    assert isinstance(outcome, Downloaded)
    assert set(threads) == {"compress", "pack", "decompress and hash", "parse at the server", "unpack"}
    assert threading.get_ident() not in set().union(*threads.values())
