"""A real agent with its real runner, on a server that a test scripts."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gradient_protocol.messages import server, shapes

from tests.fakes.agent import Rig, store_path

HASHES = "0123456789abcdfghijklmnpqrsvwxyz"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "worker")
    yield made
    made.end_runner()


@pytest.fixture
def assign() -> Callable[..., server.AssignJob]:
    numbers = iter(range(1, 1000))

    def make(script: str, **changes: object) -> server.AssignJob:
        number = next(numbers)
        name = str(changes.pop("name", f"thing-{number}"))
        fields: dict[str, object] = {
            "project": "p",
            "drv_path": store_path("d", name + ".drv"),
            "name": name,
            "system": "any",
            "features": [],
            "command": ["/bin/sh", "-c", script],
            "env": {},
            "inputs": [],
            "outputs": [shapes.DerivationOutput(name="out", path=store_path(HASHES[number], name))],
            "timeout_secs": 60.0,
            "max_silent_secs": 60.0,
        }
        cluster = changes.pop("cluster", None)
        build = shapes.BuildJob(**{**fields, **changes})  # type: ignore[arg-type]  # by name
        return server.AssignJob(
            job_id=f"job-{number}",
            assignment_id=f"assignment-{number}",
            job=build,
            cluster=cluster,  # type: ignore[arg-type]  # as above
        )

    return make
