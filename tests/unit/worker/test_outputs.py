"""Outputs that are not there: the command's failure, or that of an agent which was storing them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gradient_protocol.kinds import FailureKind
from gradient_protocol.messages import shapes
from gradient_worker.executor.failure import Failure
from gradient_worker.executor.outputs import register
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


@pytest.mark.parametrize(
    ("taken_up", "kind"), [(False, FailureKind.PERMANENT), (True, FailureKind.TRANSIENT)]
)
async def test_an_output_that_an_earlier_agent_may_have_lost_is_made_again(
    tmp_path: Path, taken_up: bool, kind: FailureKind
) -> None:
    """Killed between the move and the row, an agent leaves what the next opening of the store removes."""
    place = tmp_path / "place"
    (place / PATH).mkdir(parents=True)
    store = DirectoryStore.open(tmp_path / "worker")

    def die(_registration: object) -> None:
        raise SystemExit

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr("gradient_worker.stores.registry.Registry.put", lambda _self, row: die(row))
        with pytest.raises(SystemExit):
            store.register_output(PATH, place / PATH, [])
    store.close()
    shop: Any = SimpleNamespace(store=DirectoryStore.open(tmp_path / "worker"), threads=ThreadPool(1))
    found = await register(shop, job(), place, taken_up=taken_up)
    shop.store.close()
    assert isinstance(found, Failure)
    assert found.kind is kind
    assert "$out" in found.error
