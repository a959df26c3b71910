"""A real agent fetches what its builds lack: side by side, shared, verified, and told of."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from gradient_protocol.kinds import FailureKind, JobStage, SpanKind
from gradient_protocol.messages import server, shapes
from gradient_protocol.messages import worker as w
from gradient_worker import session as session_module
from gradient_worker.executor.inputs import MAX_SIDE_BY_SIDE

from tests.fakes.agent import Rig, store_path
from tests.fakes.nars import stored_file
from tests.fakes.server import FakeSession, Stored

Assign = Callable[..., server.AssignJob]


class DamagedStored(Stored):
    """Says of itself what the good one would."""

    def __init__(self, nar: bytes, references: tuple[str, ...], good: Stored) -> None:
        super().__init__(nar, references)
        object.__setattr__(self, "_good", good)

    __slots__ = ("_good",)

    @property
    def nar_hash(self) -> str:
        return self._good.nar_hash

    @property
    def nar_size(self) -> int:
        return self._good.nar_size


def build_input(
    rig: Rig, path: str, *, name: str | None = None, output: str | None = None
) -> shapes.BuildInput:
    stored = rig.server.paths[path]
    return shapes.BuildInput(
        path=path,
        nar_hash=stored.nar_hash,
        nar_size=stored.nar_size,
        references=list(stored.references),
        name=name,
        output=output,
    )


async def test_missing_inputs_are_fetched_and_named_in_the_environment(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    lib, extra = store_path("a", "lib-a-1.0"), store_path("b", "extra-2")
    rig.server.paths[lib] = stored_file(tmp_path, b"contents of lib\n", extra)
    rig.server.paths[extra] = stored_file(tmp_path, b"extra\n")
    inputs = [
        build_input(rig, lib, name="lib-a-1.0", output="out"),
        build_input(rig, extra),
    ]
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        job = assign(
            'cat $LIB_A > $out; echo $LIB_A >> $out; env > $out-not; test -z "$EXTRA"', inputs=inputs
        )
        session.send(job)
        output = (await session.expect(w.JobUpdate, lambda m: m.seq == 1)).update
        completed = await session.expect(w.JobCompleted)
        assert output.outputs[0].references == [lib]
        assert output.outputs[0].contains_store_dir
        assert agent.shop.store.info(lib).references == (extra,)
        kinds = [span.kind for span in completed.spans]
        assert kinds.count(SpanKind.NAR_FETCH) == 2
        push = next(span for span in completed.spans if span.kind is SpanKind.NAR_PUSH)
        assert completed.spans[push.parent].kind is SpanKind.COMPRESS


async def test_the_server_is_told_how_many_inputs_are_there_and_how_many_outputs_are_uploaded(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PROGRESS_SECS", 0.02)
    lib, extra = store_path("a", "lib"), store_path("b", "extra")
    rig.server.paths[lib], rig.server.paths[extra] = (stored_file(tmp_path, name) for name in (b"1", b"2"))
    job = assign("cat $LIB > $out", inputs=[build_input(rig, lib, name="lib"), build_input(rig, extra)])

    async def expect(session: FakeSession, done: int, total: int) -> None:
        told = await session.expect(w.BuildProgress)
        assert told == w.BuildProgress(assignment_id=job.assignment_id, done=done, total=total)

    async with rig.agent():
        first = await rig.server.session(nursery)
        first.automatic.discard("downloads")
        first.send(job)
        await expect(first, 0, 2)
        await first.serve(await first.expect(w.NarRequest))
        await expect(first, 1, 2)
        await first.expect_none(w.BuildProgress)  # nothing has changed
        first.scope.cancel()
        second = await rig.server.session(nursery, resume=False)
        second.automatic -= {"downloads", "uploads"}
        await second.resume()
        await expect(second, 1, 2)  # live state, told anew
        await second.serve(await second.expect(w.NarRequest))
        await second.expect(w.JobUpdate, lambda m: m.update == shapes.Stage(stage=JobStage.UPLOAD))
        await second.expect(w.BuildProgress, lambda m: (m.done, m.total) == (0, 1))


async def test_inputs_of_one_build_are_fetched_side_by_side_as_many_as_have_a_place(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    paths = [store_path("a", f"lib-{number}") for number in range(MAX_SIDE_BY_SIDE + 2)]
    for path in paths:
        rig.server.paths[path] = stored_file(tmp_path, path.encode())
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.automatic.discard("downloads")
        session.send(assign("true > $out", inputs=[build_input(rig, path) for path in paths]))
        # None is answered before all of these have been asked for.
        requests = [await session.expect(w.NarRequest) for _ in range(MAX_SIDE_BY_SIDE)]
        await session.expect_none(w.NarRequest)
        session.automatic.add("downloads")
        for request in requests:
            await session.serve(request)
        completed = await session.expect(w.JobCompleted)
        prefetch = next(span for span in completed.spans if span.kind is SpanKind.PREFETCH)
        assert prefetch.paths == len(paths)
        assert len({request.path for request in requests}) == MAX_SIDE_BY_SIDE


async def test_builds_that_lack_the_same_input_share_one_download(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    lib = store_path("a", "lib")
    rig.server.paths[lib] = stored_file(tmp_path, b"x" * 1000)
    inputs = [build_input(rig, lib, name="lib", output="out")]
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.automatic.discard("downloads")
        for _ in range(3):
            session.send(assign("cat $LIB > $out", inputs=inputs))
        request = await session.expect(w.NarRequest)
        await session.expect_none(w.NarRequest)
        session.automatic.add("downloads")
        await session.serve(request)
        for _ in range(3):
            await session.expect(w.JobCompleted)


async def test_another_build_takes_a_download_over_when_its_first_asker_is_aborted(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    lib = store_path("a", "lib")
    rig.server.paths[lib] = stored_file(tmp_path, b"x" * 1000)
    inputs = [build_input(rig, lib, name="lib", output="out")]
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.automatic.discard("downloads")
        first, second = assign("true", inputs=inputs), assign("cat $LIB > $out", inputs=inputs)
        session.send(first)
        await session.expect(w.NarRequest)
        session.send(second)
        await session.expect(w.AssignJobResponse, lambda m: m.assignment_id == second.assignment_id)
        session.automatic.add("downloads")
        session.send(server.AbortJob(assignment_id=first.assignment_id, reason="no longer wanted"))
        failed = await session.expect(w.JobFailed)
        assert (failed.assignment_id, failed.kind) == (first.assignment_id, FailureKind.ABORTED)
        await session.expect(w.JobCompleted, lambda m: m.assignment_id == second.assignment_id)


async def test_an_input_with_other_contents_is_fetched_again(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    lib = store_path("a", "lib")
    rig.server.paths[lib] = stored_file(tmp_path, b"of a failed attempt")
    stale = [build_input(rig, lib, name="lib", output="out")]
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        session.send(assign("cat $LIB > $out", inputs=stale))
        await session.expect(w.JobCompleted)
        rig.server.paths[lib] = stored_file(tmp_path, b"the right one")
        session.send(assign("cat $LIB > $out", inputs=[build_input(rig, lib, name="lib", output="out")]))
        await session.expect(w.JobCompleted)
        assert agent.shop.store.real_path(lib).read_bytes() == b"the right one"


async def test_an_input_that_the_server_lost_is_named(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path
) -> None:
    lib = store_path("a", "lib")
    rig.server.paths[lib] = stored_file(tmp_path, b"")
    inputs = [build_input(rig, lib)]
    del rig.server.paths[lib]
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign("true > $out", inputs=inputs))
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.missing_paths) == (FailureKind.INPUTS_UNAVAILABLE, [lib])


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer"])
async def test_a_damaged_nar_is_never_registered(
    rig: Rig, assign: Assign, nursery: trio.Nursery, tmp_path: Path, damage: str
) -> None:
    lib = store_path("a", "lib")
    good = rig.server.paths[lib] = stored_file(tmp_path, b"x" * 100)
    inputs = [build_input(rig, lib)]
    nar = {
        "flipped": good.nar.replace(b"xxx", b"xyx"),
        "truncated": good.nar[:-8],
        "longer": good.nar + bytes(8),
    }[damage]
    rig.server.paths[lib] = DamagedStored(nar, (), good)
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        session.send(assign("true > $out", inputs=inputs))
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.missing_paths) == (FailureKind.INPUTS_UNAVAILABLE, [lib])
        assert agent.shop.store.info(lib) is None
        assert not list((rig.base_dir / "store").iterdir())
