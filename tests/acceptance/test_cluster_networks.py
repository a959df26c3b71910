"""The example of a cluster on workers that have a network namespace each: hosts of their own, nearly."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.pool import Pool, Started, Worker
from tests.acceptance.processes import program

EXAMPLE = Path(__file__).parents[2] / "examples/cluster"
WORKERS = ("host-a", "host-b", "host-c")


def address(number: int) -> str:
    """Of a worker's host, within namespaces that nobody else sees."""
    return f"10.77.0.{number + 1}"


def ip(*arguments: str) -> None:
    """Runs `ip`; the test is skipped where it cannot do it."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"namespaces cannot be made here: ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """One for each worker, joined by a bridge in one more; nothing of the host's own network is touched."""
    for needed in ("ip", "nsenter"):
        if shutil.which(needed) is None:
            pytest.skip(f"namespaces cannot be made here: there is no {needed}")
    lan = f"gradient-{os.getpid()}"
    names = [f"{lan}-{number}" for number in range(len(WORKERS))]
    with contextlib.ExitStack() as stack:
        for name in (lan, *names):
            ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ip("-n", lan, "link", "add", "bridge", "type", "bridge")
        ip("-n", lan, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ip("-n", lan, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", lan, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names


def start_worker_in(pool: Pool, namespace: str, name: str, endpoint: str) -> None:
    """An agent with its runner and builds in the namespace; a socket's path crosses it."""
    registered = pool.gradient_json("worker", "register", name)
    pool.write_peers(name, registered["peers_line"] + "\n")
    base_dir = pool.directory / name
    (base_dir / "worker_id").write_text(registered["worker_id"] + "\n")
    arguments = [
        "nsenter", f"--net=/run/netns/{namespace}",
        program("gradient-worker"), "run", "--name", name, "--base-dir", str(base_dir),
        "--server-url", pool.listen, "--system-cpu-core-score", "1000", "--endpoint", endpoint,
    ]  # fmt: skip
    process = Started(arguments, pool.directory / f"{name}.log")
    pool.workers[name] = Worker(name, base_dir, arguments, process, {})


def test_the_example_measures_across_hosts(empty_pool: Pool, namespaces: list[str], tmp_path: Path) -> None:
    pool = empty_pool
    pool.start_server()
    for number, name in enumerate(WORKERS):
        start_worker_in(pool, namespaces[number], name, address(number))
    pool.wait_connected(*WORKERS)
    tree = tmp_path / "throughput"
    subprocess.run([sys.executable, "-B", EXAMPLE / "generate.py", tree], check=True)
    done = pool.gradient("cluster", "submit", tree, "--wait")
    assert done.returncode == 0, (done.stdout, done.stderr)
    cluster = pool.gradient_json("cluster", "show", "throughput")
    members = {(one["role"], one["index"]): one for one in cluster["tries"][-1]["members"]}
    at = address(WORKERS.index(members["server", 0]["worker"]))
    log = pool.log_of(members["client", 0]["job"]).decode()
    assert f"the server listens on {at} " in log
    assert "mbit_per_sec" in log
