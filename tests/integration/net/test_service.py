"""The server as a service of systemd."""

import signal
import time
import urllib.request
from pathlib import Path

import pytest

from tests.fakes.manager import Manager
from tests.integration.net.test_server_process import serving

WATCHDOG_SECS = 0.4


def hear(manager: Manager, wanted: str, told: list[str]) -> None:
    """Waits until something that was told begins so."""
    until = time.monotonic() + 20
    while not any(text.startswith(wanted) for text in told):
        assert time.monotonic() < until, told
        time.sleep(0.02)
        told += manager.heard()


def test_it_tells_when_it_serves_what_it_does_and_that_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(f"@gradient-test-{tmp_path.name}")
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECS * 1_000_000)))
    told: list[str] = []
    listen = f"unix://{tmp_path}/socket"
    with serving(tmp_path / "base", "--proto-listen", listen) as (process, lines):
        hear(manager, "READY=1", told)
        assert told[0] == "STATUS=migrating the database"
        assert "READY=1\nSTATUS=0 workers connected, 0 jobs running, 0 jobs waiting" in told
        with urllib.request.urlopen(f"{lines['http']}/readyz") as answer:
            assert answer.status == 200
        hear(manager, "WATCHDOG=1", told)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        manager.heard()
        time.sleep(3 * WATCHDOG_SECS)
        assert manager.heard() == []
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        hear(manager, "STOPPING=1", told)
        assert process.wait(timeout=10) == 0
    manager.close()
