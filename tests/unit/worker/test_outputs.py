"""Outputs that are not there: the command's failure, or that of an agent which was storing them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages import shapes
from gradient_worker.executor.failure import Failure
from gradient_worker.executor.outputs import Outputs, register
from gradient_worker.stores.directory import DirectoryStore
from gradient_worker.threads import ThreadPool

PATH = "i1b887k8663rb1x9s5n9pcyap4l8rvzj-made-1.0"


def job() -> shapes.BuildJob:
    return shapes.BuildJob(
        project="p",
        drv_path="3hgapfbfpym67mny7gaq75qm4x4nw19x-made-1.0.drv",
        name="made-1.0",
        system="any",
        features=[],
        command=["x"],
        env={},
        inputs=[],
        outputs=[shapes.DerivationOutput(name="out", path=PATH)],
        timeout_secs=1.0,
        max_silent_secs=1.0,
    )


def killed_at(store: DirectoryStore, built: Path, step: str) -> None:
    """An agent is killed while it stores an output."""

    def die(*_: object) -> None:
        raise SystemExit

    with pytest.MonkeyPatch.context() as broken:
        if step == "row":
            broken.setattr("gradient_worker.stores.registry.Registry.put", die)
        else:
            # What an exception would remove stays where a process is killed.
            broken.setattr("gradient_worker.stores.directory.nar.remove_tree", lambda _path: None)
            broken.setattr(DirectoryStore, "_install", die)
        with pytest.raises(SystemExit):
            store.register_output(PATH, built, [])
    store.close()


@pytest.mark.parametrize("step", ["row", "rename"])
async def test_an_output_that_was_being_registered_outlives_its_agent(tmp_path: Path, step: str) -> None:
    place = tmp_path / "place"
    (place / PATH).mkdir(parents=True)
    (place / PATH / "file").write_text("made")
    killed_at(DirectoryStore.open(tmp_path / "worker"), place / PATH, step)
    assert not (place / PATH).exists()
    shop: Any = SimpleNamespace(store=DirectoryStore.open(tmp_path / "worker"), threads=ThreadPool(1))
    assert shop.store.paths() == []
    found = await register(shop, job(), place, taken_up=True)
    assert isinstance(found, Outputs)
    assert shop.store.paths() == [PATH]
    assert shop.store.take_unregistered(PATH) is None
    assert (shop.store.real_path(PATH) / "file").read_text() == "made"
    assert [entry.name for entry in shop.store.directory.iterdir()] == [PATH]
    shop.store.close()


@pytest.mark.parametrize("end", ["opening", "collection", "boot"])
def test_what_nobody_came_back_for_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    (tmp_path / PATH).mkdir()
    killed_at(DirectoryStore.open(tmp_path / "worker"), tmp_path / PATH, "rename")
    if end == "boot":
        (tmp_path / "boot_id").write_text("another boot\n")
        monkeypatch.setattr("gradient_worker.stores.directory._BOOT_ID", tmp_path / "boot_id")
    store = DirectoryStore.open(tmp_path / "worker")
    if end == "opening":
        assert any(store.directory.iterdir())
        store.close()
        store = DirectoryStore.open(tmp_path / "worker")
    elif end == "collection":
        store.collect_garbage(2**40)  # as the process starts
        assert any(store.directory.iterdir())
        store.collect_garbage(2**40)
    assert store.take_unregistered(PATH) is None
    assert list(store.directory.iterdir()) == []
    store.close()


@pytest.mark.parametrize(
    ("taken_up", "kind"), [(False, FailureKind.PERMANENT), (True, FailureKind.TRANSIENT)]
)
async def test_an_output_that_an_earlier_agent_may_have_lost_is_made_again(
    tmp_path: Path, taken_up: bool, kind: FailureKind
) -> None:
    store = DirectoryStore.open(tmp_path / "worker")
    shop: Any = SimpleNamespace(store=store, threads=ThreadPool(1))
    found = await register(shop, job(), tmp_path / "place", taken_up=taken_up)
    store.close()
    assert isinstance(found, Failure)
    assert found.kind is kind
    assert "$out" in found.error
