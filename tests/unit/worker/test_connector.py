"""What keeps a worker from connecting, and how soon it tries again."""

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from gradient_protocol.address import Address, TcpAddress, UnixAddress, connect, parse_address
from gradient_worker.agent import Agent
from gradient_worker.connector import nobody_listens, stay_connected
from gradient_worker.reconnect import Reconnect
from gradient_worker.wakeup import Wakeup


def no_socket(tmp_path: Path) -> Address:
    return UnixAddress(tmp_path / "socket")


def left_over_socket(tmp_path: Path) -> Address:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    return UnixAddress(path)


def port_of_both_families(tmp_path: Path) -> Address:
    del tmp_path
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return TcpAddress("localhost", probe.getsockname()[1])


@pytest.mark.parametrize("address_in", [no_socket, left_over_socket, port_of_both_families])
async def test_nobody_listens_there(tmp_path: Path, address_in: Callable[[Path], Address]) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        await connect(address_in(tmp_path))
    assert nobody_listens(caught.value)


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), TimeoutError("timed out"), OSError(113, "No route to host")]
)
def test_whatever_else_it_is_may_be_a_server(error: OSError) -> None:
    assert not nobody_listens(error)


@pytest.mark.parametrize(
    ("error", "tries_in_a_minute"),
    [(ConnectionRefusedError(), 60), (ConnectionResetError(), 6)],
    ids=["nobody", "somebody"],
)
async def test_a_listener_that_comes_back_is_found_within_a_second(
    autojump_clock: trio.testing.MockClock, error: OSError, tries_in_a_minute: int
) -> None:
    tries: list[float] = []

    async def dial(address: Address) -> trio.abc.Stream:
        tries.append(trio.current_time())
        raise OSError(f"all attempts to connect to {address} failed") from error

    agent = cast("Agent", SimpleNamespace(jobs=(), peers_changed=Wakeup()))
    reconnect = Reconnect(parse_address("tcp://127.0.0.1:1"), lambda: 1.0)
    with trio.move_on_after(59.5):
        await stay_connected(agent, reconnect, dial)
    assert len(tries) == tries_in_a_minute
