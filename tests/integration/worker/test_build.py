"""A real agent and its real runner build what a scripted server assigns."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import trio
from gradient_protocol.kinds import FailureKind, JobKind, JobStage, SpanKind
from gradient_protocol.limits import MAX_CHUNK_DATA
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


def processes_named(argument: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if argument in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


async def test_a_build_goes_all_the_way(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    async with rig.agent() as agent:
        session = await rig.server.session(nursery)
        asked = await session.expect(w.RequestJob, lambda m: m.kind is JobKind.BUILD)
        assert asked
        job = assign(
            'echo building; echo "$GREETING $GRADIENT_CORES" > $out', env={"GREETING": "hi"}, cores=3
        )
        session.send(job)
        answer = await session.expect(w.AssignJobResponse)
        assert answer.accepted
        stages = [(await session.expect(w.JobUpdate, lambda m: m.seq is None)).update.stage for _ in range(3)]
        assert stages == [JobStage.PREFETCH, JobStage.BUILD, JobStage.UPLOAD]
        output = (await session.expect(w.JobUpdate, lambda m: m.seq == 1)).update
        assert isinstance(output, shapes.BuildOutput)
        completed = await session.expect(w.JobCompleted)
        assert completed.seq == 2
        path = job.job.outputs[0].path
        assert b"hi 3\n" in rig.server.paths[path].nar
        assert output.outputs[0].nar_hash == rig.server.paths[path].nar_hash
        assert bytes(rig.server.logs[job.assignment_id]) == b"building\n"
        with trio.fail_after(5):
            while len(agent.jobs) or (rig.base_dir / "builds" / job.assignment_id).exists():
                await trio.sleep(0.01)


async def test_a_command_that_fails_is_permanent(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign("echo oh no; exit 3"))
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.error) == (
            FailureKind.PERMANENT,
            "the command ended with exit status 3",
        )
        assert failed.metrics is not None


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


async def test_outputs_that_are_there_are_only_uploaded(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("echo once > $out")
        session.send(job)
        await session.expect(w.JobCompleted)
        rig.server.paths.clear()
        again = msgspec.structs.replace(job, assignment_id="again")
        session.messages.clear()
        session.send(again)
        await session.expect(w.JobCompleted)
        stages = [m.update.stage for m in session.messages if isinstance(m, w.JobUpdate) and m.seq is None]
        assert stages == [JobStage.UPLOAD]
        output = next(m.update for m in session.messages if isinstance(m, w.JobUpdate) and m.seq == 1)
        assert output.substituted
        assert list(rig.server.paths) == [job.job.outputs[0].path]


async def test_an_output_that_the_command_did_not_make_is_named(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    outputs = [
        shapes.DerivationOutput(name="out", path=store_path("x", "n")),
        shapes.DerivationOutput(name="doc", path=store_path("y", "n-doc")),
    ]
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign("echo > $out", outputs=outputs))
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.error) == (
            FailureKind.PERMANENT,
            "the command did not make its output $doc",
        )


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"timeout_secs": 0.3}, "ran longer than 0.3 s"),
        ({"max_silent_secs": 0.3}, "wrote nothing for 0.3 s"),
    ],
)
async def test_time_and_silence_over(
    rig: Rig, assign: Assign, nursery: trio.Nursery, limits: dict[str, float], error: str
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign("echo begun; sleep 60", **limits))
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.error) == (FailureKind.TIMEOUT, error)


async def test_an_abort_kills_the_build_and_its_children(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("sleep 4711 & echo ready; wait")
        session.send(job)
        with trio.fail_after(5):
            while not rig.server.logs:
                await trio.sleep(0.01)
        session.send(server.AbortJob(assignment_id=job.assignment_id, reason="not wanted"))
        failed = await session.expect(w.JobFailed)
        assert (failed.kind, failed.error) == (FailureKind.ABORTED, "not wanted")
        assert not processes_named("4711")
        await session.expect(w.RequestJob)


async def test_a_grandchild_that_is_left_does_not_hold_the_build(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign("(setsid sleep 4712 &); echo > $out"))
        await session.expect(w.JobCompleted, within_secs=5)
        assert not processes_named("4712")


async def test_log_beyond_the_limits_is_left_out_and_blocks_nothing(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    rig.settings["log_burst_bytes_per_min"] = str(1024 * 1024)
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("head -c 104857600 /dev/zero | tr '\\0' x; echo the end; echo > $out")
        session.send(job)
        await session.expect(w.JobCompleted, within_secs=30)
        log = bytes(rig.server.logs[job.assignment_id])
        assert len(log) < 2 * 1024 * 1024
        assert b"bytes of output left out" in log
        assert log.endswith(b"xthe end\n")
        assert all(len(chunk.data) <= MAX_CHUNK_DATA for chunk in session.log_chunks)


async def test_a_binary_log_arrives_byte_by_byte(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("head -c 600000 /dev/urandom | tee $out")
        session.send(job)
        await session.expect(w.JobCompleted)
        assert bytes(rig.server.logs[job.assignment_id]) in rig.server.paths[job.job.outputs[0].path].nar


async def test_products_of_an_output_are_named(rig: Rig, assign: Assign, nursery: trio.Nursery) -> None:
    script = """mkdir $out; echo page > $out/index.html; ln -s /etc/passwd $out/sly
    cat > $out/products.toml <<'T'
    [[product]]
    type = "report"
    path = "index.html"
    name = "Coverage"
    [[product]]
    path = "sly"
T
    """
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign(script))
        output = (await session.expect(w.JobUpdate, lambda m: m.seq == 1)).update
        product = shapes.BuildProduct(output="out", path="index.html", type="report", name="Coverage", size=5)
        assert output.products == [product]


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user of the host may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


async def test_a_fixed_output_is_downloaded(
    rig: Rig, assign: Assign, nursery: trio.Nursery, public: Path
) -> None:
    file = public / "file"
    file.write_bytes(b"downloaded\n")
    file.chmod(0o644)
    sha256 = hashlib.sha256(b"downloaded\n").hexdigest()
    fixed = shapes.FixedOutput(url=file.as_uri(), sha256=sha256)
    async with rig.agent():
        session = await rig.server.session(nursery)
        job = assign("", command=[], fixed_output=fixed)
        session.send(job)
        completed = await session.expect(w.JobCompleted)
        assert SpanKind.DOWNLOAD in [span.kind for span in completed.spans]
        assert b"downloaded\n" in rig.server.paths[job.job.outputs[0].path].nar
        wrong = shapes.FixedOutput(url=file.as_uri(), sha256="0" * 64)
        session.send(assign("", command=[], fixed_output=wrong))
        failed = await session.expect(w.JobFailed)
        assert failed.kind is FailureKind.PERMANENT
        assert sha256 in failed.error


@pytest.mark.parametrize("kept_by", ["the file", "its directory", "its kind"])
async def test_what_others_may_not_read_is_no_download(
    rig: Rig, assign: Assign, nursery: trio.Nursery, public: Path, kept_by: str
) -> None:
    inner = public / "inner"
    inner.mkdir(mode=0o700 if kept_by == "its directory" else 0o755)
    file = inner / "secret"
    if kept_by == "its kind":
        os.mkfifo(file)
    else:
        file.write_bytes(b"secret\n")
    file.chmod(0o600 if kept_by == "the file" else 0o644)
    link = public / "link"
    link.symlink_to(file)
    fixed = shapes.FixedOutput(url=link.as_uri(), sha256="0" * 64)
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign("", command=[], fixed_output=fixed))
        failed = await session.expect(w.JobFailed)
        assert failed.kind is FailureKind.PERMANENT
        assert "no file that every user of the host may read" in failed.error


async def test_metrics_come_from_the_cgroup_or_are_unknown(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    rig.settings["build_cgroup"] = "auto"
    async with rig.agent() as agent:
        if not agent.shop.meters.measured:
            pytest.skip("no delegated cgroup on this machine")
        session = await rig.server.session(nursery)
        session.send(assign("head -c 50000000 /dev/zero | tail -c 40000000 | wc -c; echo > $out"))
        metrics = (await session.expect(w.JobUpdate, lambda m: m.seq == 1)).update.metrics
        assert 30 < metrics.peak_ram_mb < 500
        assert metrics.cpu_time_ms is not None


async def test_a_path_that_would_leave_the_store_is_refused(
    rig: Rig, assign: Assign, nursery: trio.Nursery
) -> None:
    outputs = [shapes.DerivationOutput(name="out", path="../../../tmp/elsewhere")]
    async with rig.agent():
        session = await rig.server.session(nursery)
        session.send(assign("echo > $out", outputs=outputs))
        failed = await session.expect(w.JobFailed)
        assert failed.kind is FailureKind.TRANSIENT
        assert "elsewhere" in failed.error
