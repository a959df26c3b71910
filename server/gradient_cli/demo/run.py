"""The demo itself: what it starts, what it builds, what it shows, and what it insists on."""

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gradient_protocol.counting import counted

from gradient_cli import output, submit
from gradient_cli.api import Api
from gradient_cli.demo.cluster import show_cluster
from gradient_cli.demo.processes import Processes, wait_until
from gradient_cli.errors import CommandError, ExitCode
from gradient_cli.progress import progress_for

__all__ = ["run_demo"]

WORKERS = (("anvil", "forge"), ("bellows", "forge"), ("chisel", "bench"))
BUILD_SLOTS = 2
READY_SECS = 60.0
AGAIN_SECS = 2.0

Json = dict[str, Any]


def _say(text: str = "") -> None:
    output.console.print(text, markup=False, soft_wrap=True)


def _examples() -> Path:
    """The examples of this installation: beside the package in a wheel, in the checkout otherwise."""
    for candidate in (Path(__file__).parents[1] / "examples", Path(__file__).parents[3] / "examples"):
        if (candidate / "stdlib" / "generate.py").exists():
            return candidate
    raise CommandError("this installation has no examples: run the demo from a checkout", ExitCode.USAGE)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_demo(keep: Path | None) -> ExitCode:
    """Runs it all. Done only if every part of it succeeded."""
    with ExitStack() as stack:
        if keep is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradient-demo-")))
        else:
            keep.mkdir(parents=True, exist_ok=True)
            directory = keep.resolve()
        processes = stack.enter_context(Processes(directory))
        try:
            with _start(directory, processes) as api:
                _show(api, directory)
        except KeyboardInterrupt:
            raise CommandError(
                "the demo was interrupted; everything it started is stopped", ExitCode.FAILED
            ) from None
    _say("all of it succeeded")
    return ExitCode.DONE


def _start(directory: Path, processes: Processes) -> Api:
    """A server and three workers on embedded defaults, each in a directory of its own."""
    port = _free_port()
    socket_path = directory / "server.sock"
    server_directory = directory / "server"
    key_file = server_directory / "api-key"
    url = f"http://127.0.0.1:{port}"
    zones = {zone for _, zone in WORKERS}
    _say(f"server at {url}, {len(WORKERS)} workers in {len(zones)} zones, all in {directory}")
    processes.start(
        "server",
        "gradient-server",
        [
            "serve",
            "--base-dir",
            str(server_directory),
            "--port",
            str(port),
            "--proto-listen",
            f"unix://{socket_path}",
        ],
    )
    wait_until(
        "a server that answers", lambda: key_file.exists() and _answers(url), processes, secs=READY_SECS
    )
    for name, zone in WORKERS:
        processes.start(
            name,
            "gradient-worker",
            [
                "run", "--register", "--name", name, "--zone", zone,
                "--base-dir", str(directory / name), "--server-url", f"unix://{socket_path}",
                "--build-max-concurrent", str(BUILD_SLOTS),
                "--server-http-url", url, "--server-api-key-file", str(key_file),
            ],
        )  # fmt: skip
    api = Api(url, key_file)
    wait_until("three connected workers", lambda: _connected(api) == len(WORKERS), processes, secs=READY_SECS)
    output.print_workers(api.get("/workers")["workers"])
    return api


def _answers(url: str) -> bool:
    try:
        with Api(url, None) as api:
            return bool(api.get("/status"))
    except CommandError:
        return False


def _connected(api: Api) -> int:
    return sum(worker["state"] == "connected" for worker in api.get("/workers")["workers"])


def _show(api: Api, directory: Path) -> None:
    source = directory / "stdlib"
    generator = _examples() / "stdlib" / "generate.py"
    subprocess.run([sys.executable, str(generator), str(source)], check=True)
    # The generated tree is what is uploaded, whatever repository the directory lies in.
    shutil.rmtree(source / "__pycache__", ignore_errors=True)

    _say("\nthe standard library of this Python: compile it in shards, check it, archive it, index it")
    began = time.monotonic()
    first = _build(api, source)
    _say(f"{counted(len(first['builds']), 'build')} in {time.monotonic() - began:.1f} s")
    _expect_spread(first)
    for built in first["outputs"]:
        if built["name"].startswith("bundle"):
            _say(f"{built['path']}, {built['nar_size']} bytes")

    _say("\nwhy the bundle went where it went")
    bundle = next(build for build in first["builds"] if build["name"].startswith("bundle"))
    why = api.get(f"/jobs/build:{bundle['id']}/why")
    if not why.get("decision"):
        raise CommandError("no decision is on record for the bundle", ExitCode.FAILED)
    output.print_decision(why["decision"])

    _say("\nthe same tree again")
    began = time.monotonic()
    again = _build(api, source)
    took = time.monotonic() - began
    started = sum(build["created_at"] > first["finished_at"] for build in again["builds"])
    _say(f"{counted(started, 'build')} started, {took:.1f} s")
    if started or took > AGAIN_SECS:
        raise CommandError(
            f"the second submission should build nothing within {AGAIN_SECS} s", ExitCode.FAILED
        )

    _say("\na cluster: a server and two clients, which start together on three workers or not at all")
    show_cluster(api, _examples() / "cluster", directory / "cluster")


def _build(api: Api, source: Path) -> Json:
    evaluation = submit.submit(api, source, [], project="default", task="demo", prioritize=False)
    view = submit.watch(api, evaluation, progress_for(as_json=False))
    if view["status"] != "Completed":
        output.print_evaluation(view)
        raise CommandError(f"the evaluation ended {view['status']}", ExitCode.FAILED)
    return view


def _expect_spread(view: Json) -> None:
    used: dict[str, int] = {}
    for build in view["builds"]:
        used[build["worker"]] = used.get(build["worker"], 0) + 1
    _say(", ".join(f"{name} built {number}" for name, number in sorted(used.items())))
    if len(used) != len(WORKERS):
        raise CommandError("not every worker was used", ExitCode.FAILED)
