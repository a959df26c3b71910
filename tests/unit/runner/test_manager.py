"""What the runner tells the service manager, and when it has to come by to do so."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from gradient_protocol.notify import Notifier
from gradient_worker.runner.manager import Manager

NEVER = float("inf")
Heard = Callable[[], list[str]]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


def listen(address: str) -> tuple[socket.socket, Heard]:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(address)
    manager.setblocking(False)

    def heard() -> list[str]:
        found: list[str] = []
        while True:
            try:
                found.append(manager.recv(4096).decode())
            except BlockingIOError:
                return found

    return manager, heard


def test_nobody_is_told_where_nobody_asked() -> None:
    manager = Manager(Notifier(None))
    assert manager.next_tick("idle") == NEVER
    manager.tick(1.0, "idle")
    manager.stopping("told to stop")


def test_it_says_ready_then_what_is_new_and_pings_at_half_of_the_time(address: str) -> None:
    opened, heard = listen(address)
    with opened:
        manager = Manager(Notifier(address, watchdog_secs=60.0))
        manager.tick(100.0, "idle")
        assert heard() == ["READY=1\nSTATUS=idle", "WATCHDOG=1"]
        assert manager.next_tick("idle") == 130.0
        # A build more or less each moment is not a datagram each.
        assert manager.next_tick("busy") == 101.0
        manager.tick(100.5, "busy")
        assert heard() == []
        manager.tick(101.0, "busy")
        assert heard() == ["STATUS=busy"]
        manager.tick(130.0, "busy")
        assert heard() == ["WATCHDOG=1"]
        manager.stopping("told to stop")
        manager.stopping("told to stop")
        assert heard() == ["STOPPING=1\nSTATUS=told to stop"]


def test_without_a_watchdog_it_comes_by_for_news_alone(address: str) -> None:
    opened, heard = listen(address)
    with opened:
        manager = Manager(Notifier(address))
        manager.tick(100.0, "idle")
        assert heard() == ["READY=1\nSTATUS=idle"]
        assert manager.next_tick("idle") == NEVER


def test_a_manager_that_is_away_is_told_of_once_and_hears_it_all_later(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = Manager(Notifier(address, watchdog_secs=60.0))
    for now in (100.0, 101.0, 102.0):
        manager.tick(now, "idle")
    assert len(capsys.readouterr().err.splitlines()) == 1
    opened, heard = listen(address)
    with opened:
        manager.tick(manager.next_tick("idle"), "idle")
        assert heard() == ["READY=1\nSTATUS=idle", "WATCHDOG=1"]
