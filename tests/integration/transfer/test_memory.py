"""A NAR of any size passes through both sides in little memory."""

import random
from pathlib import Path

from gradient_worker.transfer import Downloaded, Uploaded

from tests.integration.transfer.conftest import Scene

SIZE_MIB = 128
ROOM_MIB = 64
MIB = 1024 * 1024


def resident_mib(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) // 1024


async def test_a_large_nar_goes_up_and_down_in_little_memory(scene: Scene) -> None:
    """Both sides are this process; `bench.transfer` measures each at 1 GiB."""
    maker, taker = await scene.mover("a"), await scene.mover("b")
    made = scene.base_dir / "made"
    rng = random.Random(1)
    with made.open("wb") as file:
        for _ in range(SIZE_MIB):
            file.write(rng.randbytes(MIB))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mib("VmRSS")
    info = maker.make(made, 1)
    async with scene.session("a") as (_, assignment_id):
        assert isinstance(await maker.transfers.upload(assignment_id, info, maker.spans), Uploaded)
    async with scene.session("b") as (_, assignment_id):
        outcome = await taker.transfers.download(assignment_id, info.path, info.nar_hash, taker.spans)
    assert isinstance(outcome, Downloaded)
    assert resident_mib("VmHWM") - before < ROOM_MIB
