"""Builds that run as users of their own, under a runner that is root."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from gradient_worker.runner.client import RunnerClient, connect
from gradient_worker.runner.values import RunnerRefused, build_directory

from .conftest import Pool, end_process

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can run builds as other users")

UID, AGENT_UID = 54321, 54400
RUNNER_WITH_A_BUILD_USER = f"""
import pwd, sys
from gradient_worker.runner import main
def getpwnam(name):
    if name == "gradient-build-1":
        return pwd.struct_passwd((name, "x", {UID}, {UID}, "", "/", "/bin/false"))
    raise KeyError(name)
pwd.getpwnam = getpwnam
sys.exit(main.main())
"""


@pytest.fixture
def base_dir() -> Iterator[Path]:
    """Of the agent's user, and with parents that a build's user may pass through."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        base = Path(name) / "base"
        base.mkdir(mode=0o755)
        os.chown(base, AGENT_UID, AGENT_UID)
        (base / "peers").write_text("secret")
        (base / "peers").chmod(0o600)
        yield base


async def connected(pool: Pool, nursery: trio.Nursery) -> RunnerClient:
    command = [sys.executable, "-c", RUNNER_WITH_A_BUILD_USER, *pool.options.argv()]
    nursery.start_soon(lambda: trio.run_process(command, check=False))
    with trio.fail_after(10):
        while (client := await connect(pool.base_dir)) is None:
            await trio.sleep(0.02)
    await nursery.start(client.run)
    return client


async def test_a_build_is_another_user_and_its_outputs_are_the_agents(base_dir: Path) -> None:
    pool = Pool(base_dir, "off")
    script = f"""
        id -u; id -G; cat {base_dir}/peers; echo to-stderr > /dev/stderr
        umask; mkdir -p $out/sub; echo x > $out/sub/file; ln -s {base_dir}/peers $out/link
    """
    async with trio.open_nursery() as nursery:
        client = await connected(pool, nursery)
        assert (await client.info()).build_users == ("gradient-build-1",)
        await client.start(pool.spec("a1", script))
        with pytest.raises(RunnerRefused, match="all 1 build users are taken"):
            await client.start(pool.spec("a2", "true"))
        assert (await client.wait("a1")).code == 0
        lines = pool.log("a1").decode().splitlines()
        assert lines[:2] == [str(UID), str(UID)]
        assert "Permission denied" in lines[2]
        assert lines[3:] == ["to-stderr", "0022"]
        outputs = build_directory(base_dir, "a1").outputs
        owners = {path: path.lstat().st_uid for path in (outputs, *outputs.rglob("*"))}
        assert len(owners) == 5
        assert set(owners.values()) == {AGENT_UID}
        assert (base_dir / "peers").stat().st_uid == 0  # a link is not followed
        assert (base_dir / "runner" / "socket").stat().st_uid == AGENT_UID
        await client.forget("a1")
        await client.start(pool.spec("a3", "id -u"))  # the user is free again
        assert (await client.wait("a3")).code == 0
        await end_process(pool.runner_pid())


async def test_files_of_somebody_else_in_the_outputs_are_not_given_away(base_dir: Path) -> None:
    pool = Pool(base_dir, "off")
    async with trio.open_nursery() as nursery:
        client = await connected(pool, nursery)
        await client.start(pool.spec("a1", "echo x > $out; while [ ! -e go ]; do sleep 0.02; done"))
        outputs = build_directory(base_dir, "a1").outputs
        while not (outputs / "out").exists():
            await trio.sleep(0.01)
        (outputs / "hard-link").hardlink_to(base_dir / "peers")
        (build_directory(base_dir, "a1").build / "go").touch()
        await client.wait("a1")
        assert (outputs / "out").stat().st_uid == AGENT_UID
        assert (base_dir / "peers").stat().st_uid == 0
        await end_process(pool.runner_pid())


async def test_parents_that_shut_the_user_out_are_named(base_dir: Path) -> None:
    base_dir.parent.chmod(0o700)
    pool = Pool(base_dir, "off")
    async with trio.open_nursery() as nursery:
        client = await connected(pool, nursery)
        await client.start(pool.spec("a1", "true"))
        ended = await client.wait("a1")
        assert ended.reason == "runner-error"
        assert "gradient-build-1 cannot enter" in ended.message
        assert "chmod o+x" in ended.message
        await end_process(pool.runner_pid())
