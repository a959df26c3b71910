"""The agent as a service of systemd: its word, its watchdog, its credentials."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from gradient_worker.config import load

from tests.fakes.agent import Rig
from tests.fakes.manager import Manager
from tests.fakes.server import PEER, TOKEN
from tests.integration.worker.test_process import started

WATCHDOG_SECS = 0.4


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    opened = Manager(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", opened.address)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECS * 1_000_000)))
    yield opened
    opened.close()


async def hear(manager: Manager, wanted: str, told: list[str]) -> None:
    """Waits until something that was told begins so."""
    with trio.fail_after(20):
        while not any(text.startswith(wanted) for text in told):
            await trio.sleep(0.02)
            told += manager.heard()


async def test_it_tells_when_it_is_ready_what_it_does_and_that_it_goes(
    rig: Rig, nursery: trio.Nursery, manager: Manager
) -> None:
    told: list[str] = []
    async with started(rig, nursery) as process:
        # Ready without a server: it is there for its runner's builds.
        await hear(manager, "READY=1", told)
        assert told[0].startswith("READY=1\nSTATUS=not connected to unix://")
        await nursery.start(rig.server.listen, rig.base_dir.parent / "server")
        await rig.server.session(nursery)
        await hear(manager, "STATUS=connected to unix://", told)
        await hear(manager, "WATCHDOG=1", told)
        process.send_signal(signal.SIGTERM)
        await hear(manager, "STOPPING=1", told)
        with trio.fail_after(5):
            assert await process.wait() == 0


async def test_a_loop_that_does_not_turn_is_silent(rig: Rig, nursery: trio.Nursery, manager: Manager) -> None:
    told: list[str] = []
    async with started(rig, nursery) as process:
        await hear(manager, "WATCHDOG=1", told)
        process.send_signal(signal.SIGSTOP)
        await trio.sleep(0.2)
        manager.heard()
        await trio.sleep(3 * WATCHDOG_SECS)
        assert manager.heard() == []
        process.send_signal(signal.SIGCONT)
        told.clear()
        await hear(manager, "WATCHDOG=1", told)


async def test_its_tokens_come_as_a_credential(
    rig: Rig, nursery: trio.Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "credentials"
    directory.mkdir()
    peers = directory / "gradient-worker.peers"
    peers.write_text(f"{PEER}:{TOKEN}\n")
    peers.chmod(0o440)  # as systemd makes them where the unit has a user
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(directory))
    await nursery.start(rig.server.listen, rig.base_dir.parent / "server")
    async with started(rig, nursery):
        (rig.base_dir / "peers").unlink()
        session = await rig.server.session(nursery)
        assert session is not None


def test_a_credential_gives_way_to_everything_else(tmp_path: Path) -> None:
    (tmp_path / "gradient-worker.peers").touch()
    (tmp_path / "gradient-worker.server-ca").touch()
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}

    def loaded(**flags: str) -> tuple[Path | None, Path, str]:
        found = load(file=None, environment=environment, flags=flags, hostname="host", cpu_count=1)
        return found.config.server_ca_file, found.config.peers_file, found.origins["worker.peersFile"]

    origin = "credential gradient-worker.peers"
    assert loaded() == (tmp_path / "gradient-worker.server-ca", tmp_path / "gradient-worker.peers", origin)
    assert loaded(peers_file="/mine")[1:] == (Path("/mine"), "--peers-file")
