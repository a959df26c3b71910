"""The example of a cluster on three real agents: their processes talk, meet, and measure a real stream."""

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_worker.evaluator.recipe import parse

from examples.cluster import generate
from tests.fakes.agent import Rig, store_path
from tests.fakes.nars import stored_tree
from tests.fakes.server import FakeSession

ATTEMPT = "attempt"


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[list[Rig]]:
    made = [Rig(tmp_path / f"worker-{number}") for number in range(3)]
    yield made
    for rig in made:
        rig.end_runner()


async def forward(sessions: dict[tuple[str, int], FakeSession]) -> None:
    """What the server does: one order for all, nothing back to its sender."""
    n = 0
    while True:
        await trio.sleep(0.01)
        for (role, index), session in sessions.items():
            for message in [one for one in session.messages if isinstance(one, w.ClusterSignalReport)]:
                session.messages.remove(message)
                n += 1
                for (to_role, to_index), other in sessions.items():
                    wanted = message.to is None or (
                        message.to.role == to_role and message.to.index in {None, to_index}
                    )
                    if other is not session and wanted:
                        other.send(
                            server.ClusterSignal(
                                attempt=ATTEMPT,
                                n=n,
                                sender=shapes.MemberAddress(role=role, index=index),
                                topic=message.topic,
                                payload=message.payload,
                            )
                        )


async def test_the_example_measures(rigs: list[Rig], nursery: trio.Nursery, tmp_path: Path) -> None:
    generate.write(tmp_path / "source")
    recipe, problems = parse((tmp_path / "source" / "gradient.toml").read_text())
    assert not problems
    builds = {build.name: build for build in recipe.builds}
    (cluster,) = recipe.clusters
    assert [member.role for member in cluster.members if member.primary] == ["client"]
    source, tree = store_path("s", "source"), stored_tree(tmp_path / "source")
    seats = [("server", 0), ("client", 0), ("client", 1)]
    roster = [
        shapes.RosterEntry(role=role, index=index, worker=f"w{index}", primary=(role, index) == seats[1])
        for role, index in seats
    ]
    sessions: dict[tuple[str, int], FakeSession] = {}
    outputs: dict[tuple[str, int], str] = {}
    async with AsyncExitStack() as stack:
        for rig, member, where in zip(rigs, cluster.members, seats, strict=True):
            await stack.enter_async_context(rig.agent())
            sessions[where] = await rig.server.session(nursery)
            rig.server.paths[source] = tree
            build = builds[member.build]
            outputs[where] = store_path("abc"[seats.index(where)], build.name)
            job = shapes.BuildJob(
                project="p",
                drv_path=store_path("d", f"{build.name}.drv"),
                name=build.name,
                system="any",
                features=[],
                command=list(build.command),
                env={**build.env, "MEASURE_SECS": "0.2"},
                inputs=[
                    shapes.BuildInput(
                        name="source",
                        path=source,
                        nar_hash=tree.nar_hash,
                        nar_size=tree.nar_size,
                        references=[],
                    )
                ],
                outputs=[shapes.DerivationOutput(name="out", path=outputs[where])],
                timeout_secs=60,
                max_silent_secs=60,
            )
            seat = shapes.ClusterSeat(attempt=ATTEMPT, role=where[0], index=where[1], hold_secs=40)
            sessions[where].send(
                server.AssignJob(job_id=build.name, assignment_id=build.name[:6], job=job, cluster=seat)
            )
            assert (await sessions[where].expect(w.AssignJobResponse)).accepted
        nursery.start_soon(forward, sessions)
        for session in sessions.values():
            session.send(server.StartCluster(attempt=ATTEMPT, roster=roster))
        for session in sessions.values():
            ended = await session.expect_any(w.JobCompleted, w.JobFailed)
            assert isinstance(ended, w.JobCompleted), ended
        for where, rig in zip(seats, rigs, strict=True):
            stored = rig.server.paths[outputs[where]]
            if where[0] == "client":
                begin = stored.nar.index(b"{")
                measured = json.loads(stored.nar[begin : stored.nar.index(b"}") + 1])
                assert measured["bytes"] > 0
                assert measured["mbit_per_sec"] > 0
        nursery.cancel_scope.cancel()
