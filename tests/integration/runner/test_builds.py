"""What a build sees, how it ends and what is recorded of it, with a real runner and real processes."""

import os
import signal
from pathlib import Path

import pytest
import trio
from gradient_worker.runner.layout import ExitReason
from gradient_worker.runner.values import RunnerRefused, build_directory

from .conftest import PATH, Pool, gone


async def read_pid(path: Path) -> int:
    """The pid that a script writes into a file, once it is there."""
    with trio.fail_after(5):
        while not path.exists() or not path.read_text().endswith("\n"):
            await trio.sleep(0.01)
    return int(path.read_text())


async def test_a_build_sees_what_it_was_given_and_nothing_else(pool: Pool) -> None:
    script = 'pwd; ls -A; cat; env | sort; ps -o sid= -p $$ | tr -d " "; echo $$; echo err >&2; exit 3'
    async with pool.client() as client:
        await client.start(pool.spec("a1", script))
        ended = await client.wait("a1")
    assert (ended.reason, ended.code, ended.signal) == (ExitReason.EXITED, 3, None)
    lines = pool.log("a1").decode().splitlines()
    directory = build_directory(pool.base_dir, "a1")
    assert lines[0] == str(directory.build)
    assert [line for line in lines if line.startswith(("HOME", "PATH", "out"))] == [
        f"HOME={directory.home}",
        f"PATH={PATH}",
        f"out={directory.outputs}/out",
    ]
    inherited = {line.partition("=")[0] for line in lines if "=" in line}
    assert inherited - {"HOME", "PATH", "out"} <= {"PWD", "OLDPWD", "SHLVL", "_"}  # the shell's own
    assert lines[-3] == lines[-2]  # a session of its own
    assert lines[-1] == "err"
    assert ended.log_bytes == len(pool.log("a1"))
    assert not ended.log_truncated
    assert ended.duration_secs is not None
    assert ended.ended_at - ended.started_at == pytest.approx(ended.duration_secs, abs=0.5)


async def test_a_program_that_is_not_there_fails_as_in_a_shell(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "", argv=("no-such-program", "x")))
        ended = await client.wait("a1")
    assert (ended.reason, ended.code) == (ExitReason.EXITED, 127)
    assert pool.log("a1") == b"gradient: cannot run no-such-program: No such file or directory\n"


async def test_a_build_that_the_runner_cannot_set_up_is_not_the_builds_fault(pool: Pool) -> None:
    async with pool.client() as client:
        (pool.base_dir / "builds" / "a1").mkdir(parents=True)
        (pool.base_dir / "builds" / "a1" / "build").write_text("in the way")
        await client.start(pool.spec("a1", "true"))
        ended = await client.wait("a1")
    assert ended.reason is ExitReason.RUNNER_ERROR
    assert "Not a directory" in ended.message


async def test_a_signal_is_told_as_a_signal(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "kill -SEGV $$"))
        ended = await client.wait("a1")
    assert (ended.reason, ended.code, ended.signal) == (ExitReason.EXITED, None, signal.SIGSEGV)


async def test_broken_pipes_end_programs_as_usual(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "(yes; echo $? >&2) | head -1"))
        await client.wait("a1")
    # 128 + SIGPIPE: Python's runner ignores that signal, builds must not.
    assert sorted(pool.log("a1").split()) == [b"141", b"y"]


async def test_too_long_is_a_timeout_even_for_one_that_ignores_the_request_to_end(pool: Pool) -> None:
    async with pool.client() as client:
        script = 'trap "echo asked" TERM; while :; do sleep 0.05; done'
        await client.start(pool.spec("a1", script, timeout_secs=0.3))
        ended = await client.wait("a1")
    assert (ended.reason, ended.signal) == (ExitReason.TIMEOUT, signal.SIGKILL)
    assert b"asked\n" in pool.log("a1")
    assert ended.duration_secs is not None
    assert 0.6 <= ended.duration_secs < 5


async def test_silence_ends_a_build_and_output_prolongs_it(pool: Pool) -> None:
    async with pool.client() as client:
        script = "for i in 1 2 3 4 5 6 7 8; do sleep 0.1; echo $i; done; exec sleep 60"
        await client.start(pool.spec("a1", script, max_silent_secs=0.5))
        ended = await client.wait("a1")
    assert (ended.reason, ended.signal) == (ExitReason.SILENT, signal.SIGTERM)
    assert pool.log("a1").endswith(b"8\n")


async def test_a_closed_output_is_silence_and_not_the_end(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "exec >&- 2>&-; sleep 0.3; exit 5"))
        assert (await client.wait("a1")).code == 5


async def test_killing_is_asked_for_once_and_told_as_killed(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "exec sleep 60"))
        await client.kill("a1")
        await client.kill("a1")
        ended = await client.wait("a1")
        assert (ended.reason, ended.signal) == (ExitReason.KILLED, signal.SIGTERM)
        await client.kill("a1")  # too late, and no fault
        assert await client.wait("a1") == ended


async def test_a_hundred_mib_in_one_line_keep_the_limit_and_do_not_stop_the_build(pool: Pool) -> None:
    async with pool.client() as client:
        script = "head -c 104857600 /dev/zero | tr '\\0' x; exit 7"
        await client.start(pool.spec("a1", script, log_limit_bytes=1_000_003))
        ended = await client.wait("a1")
    assert (ended.reason, ended.code) == (ExitReason.EXITED, 7)
    assert pool.log("a1") == b"x" * 1_000_003
    assert (ended.log_bytes, ended.log_discarded_bytes) == (1_000_003, 104857600 - 1_000_003)
    assert ended.log_truncated


async def test_output_is_kept_byte_by_byte(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "head -c 300000 /dev/urandom | tee copy"))
        ended = await client.wait("a1")
    assert pool.log("a1") == (pool.base_dir / "builds/a1/build/copy").read_bytes()
    assert ended.log_bytes == 300_000


async def test_what_a_build_leaves_behind_is_killed_and_not_waited_for(pool: Pool) -> None:
    script = "(setsid sh -c 'trap \"\" TERM; echo $$ > pid; while :; do sleep 1; done' &) ; sleep 0.2"
    async with pool.client() as client:
        await client.start(pool.spec("other", "exec sleep 60"))
        with trio.fail_after(5):
            await client.start(pool.spec("a1", script))
            pid = await read_pid(pool.base_dir / "builds/a1/build/pid")
            ended = await client.wait("a1")
            await gone(pid)
        assert ended.code == 0
        assert ended.duration_secs is not None
        assert ended.duration_secs < 2
        by_id = {build.assignment_id: build for build in await client.list()}
        assert by_id["other"].is_running


async def test_starting_again_starts_nothing(pool: Pool) -> None:
    async with pool.client() as client:
        spec = pool.spec("a1", "echo once")
        first = await client.start(spec)
        second = await client.start(spec)
        await client.wait("a1")
        third = await client.start(spec)
    assert first.started_at == second.started_at == third.started_at
    assert third.exit is not None
    assert pool.log("a1") == b"once\n"


async def test_forgetting_removes_whatever_a_build_left_in_its_directory(pool: Pool) -> None:
    async with pool.client() as client:
        script = "mkdir -p a/b; echo x > a/b/c; chmod 0 a/b a; ln -s /etc/passwd link"
        await client.start(pool.spec("a1", script))
        await client.wait("a1")
        await client.forget("a1")
        await client.forget("a1")
        assert await client.list() == []
        with pytest.raises(RunnerRefused, match="unknown build"):
            await client.wait("a1")
        builds = pool.base_dir / "builds"
        with trio.fail_after(5):
            while any(not path.name.startswith(".spare") for path in builds.iterdir()):
                await trio.sleep(0.01)


async def test_a_directory_that_is_used_again_has_nothing_of_the_build_before(pool: Pool) -> None:
    async with pool.client() as client:
        for number, script in enumerate(["true", "ls -A . ../home ../tmp ../outputs", "true"]):
            name = f"a{number}"
            await client.start(pool.spec(name, script))
            assert (await client.wait(name)).code == 0
            if number != 1:
                await client.forget(name)
        assert set(pool.log("a1").split()) == {b".:", b"../home:", b"../outputs:", b"../tmp:"}


async def test_a_running_build_is_not_forgotten(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "exec sleep 60"))
        with pytest.raises(RunnerRefused, match="still runs"):
            await client.forget("a1")
        assert (pool.base_dir / "builds/a1").is_dir()


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "x" * 200])
async def test_ids_that_could_leave_the_directory_are_refused(pool: Pool, name: str) -> None:
    async with pool.client() as client:
        with pytest.raises(RunnerRefused, match="plain names"):
            await client.start(pool.spec(name, "true"))
    with pytest.raises(ValueError, match="cannot name a directory"):
        build_directory(pool.base_dir, name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
async def test_results_are_written_for_whoever_reads_the_directory(pool: Pool) -> None:
    async with pool.client() as client:
        await client.start(pool.spec("a1", "echo x > $out"))
        await client.wait("a1")
        directory = build_directory(pool.base_dir, "a1")
        assert directory.result.stat().st_mode & 0o777 == 0o644
        assert (directory.outputs / "out").read_text() == "x\n"


@pytest.mark.parametrize(
    "wrong", [{"argv": ("/bin/sh\0", "x")}, {"argv": ("sh", "a\0b")}, {"env": {"PATH": "/bin", "A=B": "c"}}]
)
async def test_words_that_no_process_can_be_given_are_the_builds_failure_and_leave_nothing_open(
    pool: Pool, wrong: dict[str, object]
) -> None:
    open_files = []
    async with pool.client() as client:
        for number in range(3):
            name = f"a{number}"
            await client.start(pool.spec(name, "true", **wrong))
            ended = await client.wait(name)
            assert (ended.reason, ended.code) == (ExitReason.EXITED, 127)
            await client.forget(name)
            open_files.append(len(list(Path(f"/proc/{pool.runner_pid()}/fd").iterdir())))
    assert open_files[1:] == open_files[:-1]
