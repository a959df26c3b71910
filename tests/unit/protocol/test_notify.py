"""What the service manager is told, at a socket as systemd's is."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from gradient_protocol.notify import Notifier
from gradient_protocol.notify_loop import keep_informed
from trio.testing import MockClock

from tests.fakes.manager import Manager


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@gradient-test-{os.getpid()}"
    opened = Manager(name)
    yield opened
    opened.close()


def test_what_is_said_arrives_as_one_datagram_each(manager: Manager) -> None:
    notifier = Notifier(manager.address)
    notifier.ready("2 jobs\nrunning")
    notifier.status("3 jobs running")
    notifier.watchdog()
    notifier.stopping("told to stop")
    assert manager.heard() == [
        "READY=1\nSTATUS=2 jobs running",
        "STATUS=3 jobs running",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=told to stop",
    ]


@pytest.mark.parametrize(
    ("environment", "watchdog_secs", "is_heard"),
    [
        ({}, None, False),
        ({"NOTIFY_SOCKET": "/run/n"}, None, True),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "60000000"}, 60.0, True),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "7"}, 60.0, True),
        # Of the process that started this one.
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "8"}, None, True),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "0"}, None, True),
        ({"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "soon"}, None, True),
        ({"NOTIFY_SOCKET": "vsock:2:9"}, None, False),
        ({"WATCHDOG_USEC": "60000000"}, None, False),
    ],
)
def test_the_environment_says_who_listens_and_children_do_not_inherit_it(
    environment: dict[str, str], watchdog_secs: float | None, is_heard: bool
) -> None:
    left = {**environment, "HOME": "/"}
    notifier = Notifier.take(left, 7)
    assert (notifier.watchdog_secs, notifier.is_heard) == (watchdog_secs, is_heard)
    assert left == {"HOME": "/"}


def test_nobody_is_told_where_nobody_asked() -> None:
    Notifier(None).ready("here")


def test_a_manager_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Notifier(str(tmp_path / "away")).status("here")


async def test_the_loop_pings_at_half_of_the_time_and_says_what_is_new(
    manager: Manager, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    jobs = 0
    unheard: list[OSError] = []
    loop = (keep_informed, Notifier(manager.address, watchdog_secs=8.0), lambda: f"{jobs} jobs")
    await nursery.start(*loop, unheard.append)
    await trio.sleep(9)
    assert manager.heard() == ["READY=1\nSTATUS=0 jobs", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1"]
    jobs = 2
    await trio.sleep(4)
    assert manager.heard() == ["STATUS=2 jobs", "WATCHDOG=1"]
    assert unheard == []


async def test_a_manager_that_comes_late_hears_that_the_process_is_ready(
    tmp_path: Path, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    unheard: list[OSError] = []
    notifier = Notifier(str(tmp_path / "notify"), watchdog_secs=8.0)
    await nursery.start(keep_informed, notifier, lambda: "here", unheard.append)
    await trio.sleep(13)
    assert len(unheard) == 1  # not one for each ping
    manager = Manager(str(tmp_path / "notify"))
    try:
        await trio.sleep(4)
        assert manager.heard() == ["READY=1\nSTATUS=here", "WATCHDOG=1"]
    finally:
        manager.close()


async def test_without_a_manager_the_loop_is_over_at_once(autojump_clock: MockClock) -> None:
    await keep_informed(Notifier(None), lambda: "here", lambda _: None)
