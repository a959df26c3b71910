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

from tests.fakes.agent import Rig, store_path

Assign = Callable[..., server.AssignJob]


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
